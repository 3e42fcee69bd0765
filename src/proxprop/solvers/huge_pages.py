"""Huge pages for large results on a CPU."""

import ctypes
import mmap
from functools import lru_cache
from typing import Any

from torch import Tensor


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
