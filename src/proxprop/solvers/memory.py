"""Where results are written: whether that can be told to an operation, and large ones in huge pages."""

import ctypes
import mmap
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from proxprop.device import is_traced
from proxprop.torch_internals import is_batched_or_differentiated


def in_huge_pages(array: Tensor) -> Tensor:
    """Ask for huge pages for a large array on a CPU that nothing was written to yet.

    Linux hands memory out when it is first written to, four kilobytes at a time unless it is asked for more: for the
    gradient of a large layer that is a good part of the time that its product takes. NumPy asks likewise.

    Args:
        array: contiguous, of at least a page; where Linux has no huge pages to give, it is left as it is.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start, size = array.data_ptr(), array.numel() * array.element_size()
        first, behind = -(-start // mmap.PAGESIZE), (start + size) // mmap.PAGESIZE
        _madvise()(first * mmap.PAGESIZE, (behind - first) * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return array


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """The C library's function; Python's mmap has it for its own memory alone."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def is_transformed(tensor: Tensor) -> bool:
    """Whether operations on a tensor are traced, batched or differentiated, and can't write where they are told to."""
    if type(tensor) is not Tensor or is_traced():
        return True
    return is_batched_or_differentiated(tensor) or (tensor.requires_grad and torch.is_grad_enabled())
