"""Split float32 numbers into bfloat16 terms in one pass; `proxprop.solvers.matmul.plain_terms` is the plain twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.kernels.launch import launches, on_its_device


@triton.jit
def _head(x):
    """The leading eight bits of a float32 number, as a float32 number."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(X, TERMS_OF_X, lines, length, stride, padded, ORDER: tl.constexpr, NUMBERS: tl.constexpr):
    """Split some numbers of a line. The terms of a line lie side by side, each padded with zeros."""
    program = tl.program_id(0).to(tl.int64)
    line, at = program % lines, program // lines * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < padded
    x = tl.load(X + line * stride + at, mask=at < length, other=0.0)
    first = _head(x)
    second = _head(x - first)
    third = x - first - second
    TERMS_OF_X += line * len(ORDER) * padded
    for place in tl.static_range(len(ORDER)):
        if ORDER[place] == 0:
            tl.store(TERMS_OF_X + at, first.to(tl.bfloat16), mask=inside)
        elif ORDER[place] == 1:
            tl.store(TERMS_OF_X + at, second.to(tl.bfloat16), mask=inside)
        else:
            tl.store(TERMS_OF_X + at, third.to(tl.bfloat16), mask=inside)
        TERMS_OF_X += padded


@on_its_device
def terms(x: Tensor, order: tuple[int, ...], rows: int) -> Tensor:
    """Bfloat16 terms of x in this order, stacked: `[len(order)·rows, columns]`.

    They are stored as x is, by rows or by columns. Columns that would not be aligned are stored by rows instead: a GPU
    multiplies unaligned columns at half its speed.

    Args:
        x: `[up to rows, columns]`.
        order: which terms, counted from the largest.
        rows: rows of each term; those beyond the rows of x are zero.
    """
    length, columns = x.shape
    by_columns = x.stride(0) == 1 and x.stride(1) >= length and len(order) * rows % tuning.ALIGNED == 0
    if not by_columns:
        x = x.contiguous()
    lines, line, stride = (columns, length, x.stride(1)) if by_columns else (1, x.numel(), x.numel())
    padded = rows if by_columns else rows * columns
    out = x.new_empty(lines, len(order) * padded, dtype=torch.bfloat16)
    programs = (lines * triton.cdiv(padded, tuning.SPLIT_NUMBERS),)
    launch = launches("split_bf16.terms", [x], order, rows)
    launch(_split, programs, x, out, lines, line, stride, padded, ORDER=order, NUMBERS=tuning.SPLIT_NUMBERS)
    return out.mT if by_columns else out.view(len(order) * rows, columns)
