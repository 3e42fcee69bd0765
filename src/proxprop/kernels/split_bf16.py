"""Bfloat16 parts of a float32 array in one pass; `proxprop.solvers.matmul.plain_parts` is the plain twin."""

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
def _split(X, PARTS, lines, length, stride, part, ORDER: tl.constexpr, NUMBERS: tl.constexpr):
    """Some numbers of a line, `stride` from the next; the parts of a line are side by side, filled up with zeros."""
    program = tl.program_id(0).to(tl.int64)
    line, at = program % lines, program // lines * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < part
    x = tl.load(X + line * stride + at, mask=at < length, other=0.0)
    first = _head(x)
    second = _head(x - first)
    third = x - first - second
    PARTS += line * len(ORDER) * part
    for place in tl.static_range(len(ORDER)):
        if ORDER[place] == 0:
            tl.store(PARTS + at, first.to(tl.bfloat16), mask=inside)
        elif ORDER[place] == 1:
            tl.store(PARTS + at, second.to(tl.bfloat16), mask=inside)
        else:
            tl.store(PARTS + at, third.to(tl.bfloat16), mask=inside)
        PARTS += part


@on_its_device
def parts(x: Tensor, order: tuple[int, ...], rows: int) -> Tensor:
    """Bfloat16 parts of x in this order, above one another: `[len(order)·rows, columns]`.

    They are stored as x is, by rows or by columns, but never by columns that would begin anywhere: a GPU multiplies
    those at half its speed.

    Args:
        x: `[up to rows, columns]`.
        order: which parts, counted from the largest.
        rows: of each part, zeros behind those of x.
    """
    length, columns = x.shape
    by_columns = x.stride(0) == 1 and x.stride(1) >= length and len(order) * rows % tuning.ALIGNED == 0
    if not by_columns:
        x = x.contiguous()
    lines, line, stride = (columns, length, x.stride(1)) if by_columns else (1, x.numel(), x.numel())
    part = rows if by_columns else rows * columns
    out = x.new_empty(lines, len(order) * part, dtype=torch.bfloat16)
    programs = (lines * triton.cdiv(part, tuning.SPLIT_NUMBERS),)
    launch = launches("split.parts", [x], order, rows)
    launch(_split, programs, x, out, lines, line, stride, part, ORDER=order, NUMBERS=tuning.SPLIT_NUMBERS)
    return out.mT if by_columns else out.view(len(order) * rows, columns)
