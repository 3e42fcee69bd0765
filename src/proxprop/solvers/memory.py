"""Where results are written: huge pages for large ones, and whether an operation accepts an output."""

import ctypes
import mmap
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from proxprop.device import is_traced
from proxprop.torch_internals import is_batched_or_differentiated


def in_huge_pages(array: Tensor) -> Tensor:
    """Ask for huge pages for a large new array on a CPU, and return the array.

    Linux allocates memory when it is first written to, four kilobytes at a time unless asked otherwise. For the
    gradient of a large layer this takes a good share of its product's time. NumPy asks likewise.

    Args:
        array: contiguous, at least one page, not yet written to. Without huge pages it stays as it is.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start, size = array.data_ptr(), array.numel() * array.element_size()
        first, behind = -(-start // mmap.PAGESIZE), (start + size) // mmap.PAGESIZE
        _madvise()(first * mmap.PAGESIZE, (behind - first) * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return array


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's madvise; Python's mmap offers it only for its own memory."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def is_transformed(tensor: Tensor) -> bool:
    """Whether operations on a tensor are traced, batched or differentiated, and accept no output to write to."""
    if type(tensor) is not Tensor or is_traced():
        return True
    return is_batched_or_differentiated(tensor) or (tensor.requires_grad and torch.is_grad_enabled())
