"""Launch the same kernels again without asking Triton which; Triton takes longer to find out than to launch them.

Triton looks at all arguments of every launch, because it compiles for their types, for the alignment of pointers, and
for integers that are 1 or multiples of 16. A function launches the same kernels in the same order whenever its arrays
have the same shapes, strides and alignment. So its launches are kept under these.
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
"""Alignment in bytes that Triton compiles pointers for; torch aligns new arrays to more."""


class Launches:
    """The launches of one call of a function, which come in the same order in every call."""

    def __init__(self, kept: dict[int, Callable[..., None]]) -> None:
        self.kept, self.place = kept, 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel.

        Args:
            kernel: a function decorated with `triton.jit`.
            grid: number of programs along each axis.
            args: arrays and numbers. What `launches` was given determines the integers among them; floats may differ.
            constants: the kernel's other arguments, and options of the compiler.
        """
        place, self.place = self.place, self.place + 1
        if (launch := self.kept.get(place)) is not None:
            launch(*args)
            return
        compiled = kernel[grid](*args, **constants)
        if compiled is not None:  # Triton's interpreter compiles nothing
            launch = compiled[(*grid, 1, 1)[:3]]
            rest = [constants[name] for name in kernel.arg_names[len(args) :]]
            self.kept[place] = lambda *args: launch(*args, *rest)


def launches(function: str, arrays: Sequence[Tensor], *numbers: object) -> Launches:
    """The launches of a call with these arrays and numbers.

    Args:
        function: name of the function that launches.
        arrays: arrays the function was given, on one device; those that it makes are aligned.
        numbers: everything else that its launches depend on.
    """
    seen = [(array.dtype, array.shape, array.stride(), array.data_ptr() % ALIGNMENT) for array in arrays]
    return Launches(_kept(function, arrays[0].device, *numbers, *seen))


@lru_cache(maxsize=4096)
def _kept(*key: object) -> dict[int, Callable[..., None]]:
    return {}


def on_its_device(launching: Launching[Arguments, Result]) -> Launching[Arguments, Result]:
    """Launch on the device of the first argument; Triton would use the current one."""

    @wraps(launching)
    def launch(array: Tensor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Entering a device takes longer than asking for the current one.
        if not array.is_cuda or array.get_device() == torch.cuda.current_device():
            return launching(array, *args, **kwargs)
        with torch.cuda.device_of(array):
            return launching(array, *args, **kwargs)

    return launch


def with_rows(M: Tensor) -> Tensor:
    """M `[groups, size, size]`, copied unless its rows are contiguous and evenly spaced."""
    even = len(M) == 1 or M.stride(0) == M.shape[1] * M.stride(1)
    return M if even and M.stride(2) == 1 else M.contiguous()
