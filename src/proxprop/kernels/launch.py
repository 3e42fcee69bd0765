"""Launch the same kernels again without asking Triton which: to find that out takes longer than to launch them.

For every launch Triton looks at all arguments, because it compiles for their types, for the alignment of pointers and
for whole numbers that are 1 or multiples of 16. A solve leads to the same kernels whenever its arrays have the same
shapes, strides and alignment, so that its launches are kept by those, in their order.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Launching = Callable[Concatenate[Tensor, Arguments], Result]

ALIGNMENT = 16
"""In bytes: what Triton asks of pointers. Arrays that torch makes have more."""


class Launches:
    """The launches of one solve, which are to come in the same order every time."""

    def __init__(self, kept: dict[int, Callable[..., None]]) -> None:
        self.kept, self.turn = kept, 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel.

        Args:
            kernel: what `triton.jit` returned.
            grid: how many programs.
            args: pointers to arrays and numbers; all but floating ones follow from what the solve is kept by.
            constants: the rest of the kernel's arguments, and options of the compiler.
        """
        turn, self.turn = self.turn, self.turn + 1
        if (launch := self.kept.get(turn)) is not None:
            launch(*args)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            launch = compiled[(*grid, 1, 1)[:3]]
            rest = [constants[name] for name in kernel.arg_names[len(args) :]]
            self.kept[turn] = lambda *args: launch(*args, *rest)


def launches(solve: str, arrays: Sequence[Tensor], *numbers: object) -> Launches:
    """The launches of a solve that these arrays and numbers lead to.

    Args:
        solve: its name.
        arrays: that it is given, on one device; those that it makes are aligned.
        numbers: all else that decides about its launches.
    """
    seen = [(array.dtype, array.shape, array.stride(), array.data_ptr() % ALIGNMENT) for array in arrays]
    return Launches(_kept(solve, arrays[0].device, *numbers, *seen))


@lru_cache(maxsize=4096)
def _kept(*question: object) -> dict[int, Callable[..., None]]:
    return {}


def on_its_device(launching: Launching[Arguments, Result]) -> Launching[Arguments, Result]:
    """Launch on the device of the first argument; Triton would take the current one."""

    @wraps(launching)
    def launch(array: Tensor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if (
            not array.is_cuda or array.get_device() == torch.cuda.current_device()
        ):  # to enter one takes longer
            return launching(array, *args, **kwargs)
        with torch.cuda.device_of(array):
            return launching(array, *args, **kwargs)

    return launch


def with_rows(M: Tensor) -> Tensor:
    """M `[groups, size, size]`, copied unless its rows are contiguous and evenly apart."""
    even = len(M) == 1 or M.stride(0) == M.shape[1] * M.stride(1)
    return M if even and M.stride(2) == 1 else M.contiguous()
