"""Triton kernels for NVIDIA GPUs, and whether they can be used; each has a twin in plain torch for where they can't."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Launching = Callable[Concatenate[Tensor, Arguments], Result]

ALIGNED = 8
"""A GPU multiplies by rows or columns that don't begin at multiples of so many numbers at a fraction of its speed."""

_coarse = ContextVar("coarse", default=False)


def take(array: Tensor) -> bool:
    """Whether Triton is there and the kernels are made for this array: float32 on a CUDA GPU.

    The twins are taken where torch.compile fuses them itself, and where a mode, such as a counter of FLOPs, is to see
    what is done.
    """
    made_for = array.is_cuda and array.dtype == torch.float32
    return made_for and not is_watched() and _found()


def is_watched() -> bool:
    """Whether what is done is compiled, or passes through a mode of torch's dispatch."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def multiply(array: Tensor) -> bool:
    """Whether, beside that, float16 products with float32 sums can be had."""
    return take(array) and not torch.backends.cuda.matmul.allow_fp16_accumulation


def parts() -> int:
    """How many products of float16 parts are as accurate as the caller asks for: 3 for float32, else 1."""
    return 1 if tf32_allowed() or _coarse.get() else 3


@contextmanager
def for_coarse_numbers() -> Iterator[None]:
    """Within, numbers have no more bits than a float16 part to begin with."""
    before = _coarse.set(True)
    try:
        yield
    finally:
        _coarse.reset(before)


def tf32_allowed() -> bool:
    """Whether the caller lets float32 products on a GPU be rounded to TF32's eleven bits, or fewer."""
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def is_captured(tensor: Tensor) -> bool:
    """Whether what is done with a tensor goes into a CUDA graph; a fake one may claim to be on a device that is not."""
    return tensor.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on_its_device(launching: Launching[Arguments, Result]) -> Launching[Arguments, Result]:
    """Launch on the device of the first argument: Triton would take the current one."""

    @wraps(launching)
    def launch(array: Tensor, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.cuda.device_of(array):
            return launching(array, *args, **kwargs)

    return launch


def up(size: int, unit: int) -> int:
    """The least multiple of unit that is not less than size."""
    return -(-size // unit) * unit


def with_rows(M: Tensor) -> Tensor:
    """M `[groups, size, size]`, copied unless its rows are contiguous and evenly apart."""
    even = len(M) == 1 or M.stride(0) == M.shape[1] * M.stride(1)
    return M if even and M.stride(2) == 1 else M.contiguous()


@cache
def _found() -> bool:
    return find_spec("triton") is not None
