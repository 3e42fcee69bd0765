"""What a device can do, and how a step is run.

Every rule that depends on a device, on a precision setting or on the way of running (compiled, captured in a CUDA
graph, under a dispatch mode) is a function here.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from proxprop.torch_internals import dispatch_modes, is_batched_or_differentiated
from proxprop.tuning import FAST_BFLOAT16, SYMMETRIC_SQUARE_LEAST_SIZE

TF32_ROUNDING = 2.0**-11
"""ε of TF32, which has eleven bits; one float16 term has as many."""

MOST_GROUPS = 2**16 - 1
"""Most programs that CUDA launches along the second axis of a grid, where kernels have their groups."""

_coarse = ContextVar("coarse", default=False)
_captured = ContextVar("captured", default=False)


def use_triton(array: Tensor) -> bool:
    """Whether to use Triton kernels for this array: float32 on a CUDA GPU, with Triton installed.

    Their plain twins run under torch.compile, which fuses operations itself, and under a dispatch mode, such as a
    counter of FLOPs, which should see each operation. They also take an array of too many groups: a normalisation has
    one for each of its channels.
    """
    suits = array.is_cuda and array.dtype == torch.float32 and (array.dim() < 3 or len(array) <= MOST_GROUPS)
    return suits and not is_traced() and _has_triton()


def is_traced() -> bool:
    """Whether operations are compiled or pass through a dispatch mode."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0


def is_transformed(tensor: Tensor) -> bool:
    """Whether operations on a tensor are traced, batched or differentiated, and accept no output to write to."""
    if type(tensor) is not Tensor or is_traced():
        return True
    return is_batched_or_differentiated(tensor) or (tensor.requires_grad and torch.is_grad_enabled())


def use_fp16_products(array: Tensor) -> bool:
    """Whether to multiply this array in float16: Triton kernels can take it, and sums are float32."""
    return use_triton(array) and not torch.backends.cuda.matmul.allow_fp16_accumulation


def use_symmetric_square(array: Tensor) -> bool:
    """Whether a Triton kernel computes `AᵀA` of this array: large matrices of 16-bit numbers on a GPU."""
    suits = array.dtype in (torch.bfloat16, torch.float16) and (array.dim() == 2 or len(array) == 1)
    large = suits and array.is_cuda and min(array.shape[-2:]) >= SYMMETRIC_SQUARE_LEAST_SIZE
    return large and not is_traced() and _has_triton()


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(array: Tensor) -> int:
    """Number of multiprocessors, and so of programs at a time where each takes a whole one."""
    return _multiprocessors(array.get_device())


def fp16_terms() -> int:
    """Float16 terms that a product needs for the accuracy the caller asked for: 3 for float32, 1 for TF32."""
    return 1 if tf32_allowed() or _coarse.get() else 3


def coarse_numbers() -> AbstractContextManager[None]:
    """Declare within this context that inputs have no more bits than one float16 term."""
    return _switched_on(_coarse)


@contextmanager
def float32_products(precision: Literal["ieee", "tf32"], like: Tensor) -> Iterator[None]:
    """Within this context a GPU rounds factors of float32 products to TF32, or not, whatever the caller allows."""
    if not like.is_cuda or torch.compiler.is_compiling():
        yield
        return
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        yield
    finally:
        products.fp32_precision = before


def tf32_allowed() -> bool:
    """Whether the caller allows a GPU to round float32 products to TF32's eleven bits, or fewer."""
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def product_rounding(array: Tensor) -> float:
    """ε of a product with this array: TF32's where a GPU may use TF32."""
    coarse = array.is_cuda and array.dtype == torch.float32 and not is_traced() and tf32_allowed()
    return TF32_ROUNDING if coarse else float(torch.finfo(array.dtype).eps)


def is_captured(tensor: Tensor) -> bool:
    """Whether operations on this tensor are captured in a CUDA graph.

    A fake tensor may name a device that does not exist, so CUDA must be initialised too.
    """
    if _captured.get():
        return True
    return tensor.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def as_if_captured() -> AbstractContextManager[None]:
    """Choose operations within this context as in a CUDA graph, to warm up for a capture."""
    return _switched_on(_captured)


@contextmanager
def _switched_on(flag: ContextVar[bool]) -> Iterator[None]:
    before = flag.set(True)
    try:
        yield
    finally:
        flag.reset(before)


def precision_settings() -> tuple[object, ...]:
    """Every global setting that decides which operations a solve runs."""
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_fp16_accumulation,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        _coarse.get(),
    )


def has_fast_bfloat16(array: Tensor) -> bool:
    """Whether a GPU multiplies the bfloat16 terms of this array faster than its float32 numbers."""
    return use_triton(array) and torch.cuda.get_device_capability(array.device) in FAST_BFLOAT16


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of unit that is at least size.

    Example:
        >>> round_up(9, 8), round_up(8, 8)
        (16, 8)
    """
    return -(-size // unit) * unit


def precision(*tensors: Tensor) -> torch.dtype:
    """The precision to solve in: float64 where anything is, else float32."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def no_autocast(device: str) -> Any:
    """A context without autocast; the meta device has none to switch off."""
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
