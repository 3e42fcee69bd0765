"""Triton kernels for NVIDIA GPUs, and whether they can be used; each has a twin in plain torch for where they can't."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def take(array: Tensor) -> bool:
    """Whether Triton is there and the kernels are made for this array: float32 on a CUDA GPU."""
    made_for = array.is_cuda and array.dtype == torch.float32
    return made_for and not torch.compiler.is_compiling() and _found()  # torch.compile fuses the twins itself


def multiply(array: Tensor) -> bool:
    """Whether, beside that, float16 products with float32 sums can be had."""
    return take(array) and not torch.backends.cuda.matmul.allow_fp16_accumulation


def parts() -> int:
    """How many products of float16 parts are as accurate as the caller asks for: 3 for float32, 1 for TF32."""
    return 1 if tf32_allowed() else 3


def tf32_allowed() -> bool:
    """Whether the caller lets float32 products on a GPU be rounded to TF32's eleven bits, or fewer."""
    return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


@cache
def _found() -> bool:
    return find_spec("triton") is not None
