"""Launches that are kept go to the same kernels with the same constants, and are kept by all that decides about them."""

import pytest
import torch

from proxprop.kernels.launch import launches


class Kernel:
    """What `triton.jit` returns, as far as it is asked: a launch returns what was compiled for it."""

    arg_names = ("X", "size", "damping", "ROWS", "LAST")

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.run: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self.asked.append((grid, args, constants)) or Compiled(self)


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args: self.kernel.run.append((grid, args))


def solve(kernel: Kernel, X: torch.Tensor, damping: float, steps: int = 2) -> None:
    launch = launches("a solve", [X], steps, id(kernel))
    for step in range(steps):
        last = step == steps - 1
        launch(kernel, (7, 3), X, len(X), damping, LAST=last, ROWS=4 + step, num_warps=8)


def test_a_solve_is_asked_for_once_and_launched_with_new_arrays_and_numbers() -> None:
    kernel, first, second = Kernel(), torch.zeros(5), torch.ones(5)
    solve(kernel, first, 0.1)
    assert [constants["ROWS"] for _, _, constants in kernel.asked] == [4, 5]
    assert not kernel.run
    solve(kernel, second, 0.2)
    assert len(kernel.asked) == 2
    for step, (grid, args) in enumerate(kernel.run):
        assert grid == (7, 3, 1)
        assert args[0] is second
        assert args[1:] == (5, 0.2, 4 + step, step == 1)  # in the kernel's order


@pytest.mark.parametrize(
    "other",
    [torch.zeros(6), torch.zeros(10)[::2], torch.zeros(6)[1:], torch.zeros(5, dtype=torch.float64)],
    ids=["shape", "stride", "alignment", "type"],
)
def test_another_array_is_another_solve(other: torch.Tensor) -> None:
    kernel = Kernel()
    solve(kernel, torch.zeros(5), 0.1)
    solve(kernel, other, 0.1)
    assert len(kernel.asked) == 4
    solve(kernel, torch.zeros(5), 0.1, steps=3)
    assert len(kernel.asked) == 7


def test_a_solve_that_was_broken_off_goes_on_where_it_was() -> None:
    kernel, X = Kernel(), torch.zeros(5)
    launch = launches("a solve", [X], 2, id(kernel))
    launch(kernel, (7, 3), X, 5, 0.1, LAST=False, ROWS=4, num_warps=8)
    solve(kernel, X, 0.1)
    solve(kernel, X, 0.1)
    assert [args[3:] for _, args in kernel.run] == [(4, False), (4, False), (5, True)]


def test_what_an_interpreter_runs_is_not_kept() -> None:
    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **constants: self.asked.append((grid, args, constants))

    kernel = Interpreted()
    solve(kernel, torch.zeros(5), 0.1)
    solve(kernel, torch.zeros(5), 0.1)
    assert len(kernel.asked) == 4
