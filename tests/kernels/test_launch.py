"""Kept launches run the same kernels with the same constants, and are kept under everything they depend on."""

import pytest
import torch

from proxprop.kernels.launch import launches


class Kernel:
    """A stand-in for a function decorated with `triton.jit`: a launch returns what was compiled for it."""

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


def launch_all(kernel: Kernel, X: torch.Tensor, damping: float, steps: int = 2) -> None:
    launch = launches("a function", [X], steps, id(kernel))
    for step in range(steps):
        last = step == steps - 1
        launch(kernel, (7, 3), X, len(X), damping, LAST=last, ROWS=4 + step, num_warps=8)


def test_triton_is_asked_once_and_later_launches_take_new_arrays_and_floats() -> None:
    kernel, first, second = Kernel(), torch.zeros(5), torch.ones(5)
    launch_all(kernel, first, 0.1)
    assert [constants["ROWS"] for _, _, constants in kernel.asked] == [4, 5]
    assert not kernel.run
    launch_all(kernel, second, 0.2)
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
def test_triton_is_asked_again_for_another_kind_of_array_or_number(other: torch.Tensor) -> None:
    kernel = Kernel()
    launch_all(kernel, torch.zeros(5), 0.1)
    launch_all(kernel, other, 0.1)
    assert len(kernel.asked) == 4
    launch_all(kernel, torch.zeros(5), 0.1, steps=3)
    assert len(kernel.asked) == 7


def test_launches_after_an_interrupted_call_begin_with_the_first() -> None:
    kernel, X = Kernel(), torch.zeros(5)
    launch = launches("a function", [X], 2, id(kernel))
    launch(kernel, (7, 3), X, 5, 0.1, LAST=False, ROWS=4, num_warps=8)
    launch_all(kernel, X, 0.1)
    launch_all(kernel, X, 0.1)
    assert [args[3:] for _, args in kernel.run] == [(4, False), (4, False), (5, True)]


def test_interpreted_launches_are_not_kept() -> None:
    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **constants: self.asked.append((grid, args, constants))

    kernel = Interpreted()
    launch_all(kernel, torch.zeros(5), 0.1)
    launch_all(kernel, torch.zeros(5), 0.1)
    assert len(kernel.asked) == 4
