"""Bfloat16 parts of a float32 array in one pass; `proxprop.solve.products.plain_parts` is the plain twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.kernels import on_its_device
from proxprop.kernels.launch import launches

NUMBERS = 1024
"""Numbers that a program splits."""

ALIGNED = 8
"""Lines of parts begin at multiples of this many numbers."""


@triton.jit
def _head(x):
    """The leading eight bits of a float32 number, as a float32 number."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(X, PARTS, lines, length, stride, ORDER: tl.constexpr, NUMBERS: tl.constexpr):
    """Some numbers of a line, `stride` from the next; the parts of a line are side by side."""
    program = tl.program_id(0).to(tl.int64)
    line, at = program % lines, program // lines * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < length
    x = tl.load(X + line * stride + at, mask=inside, other=0.0)
    first = _head(x)
    second = _head(x - first)
    third = x - first - second
    PARTS += line * len(ORDER) * length
    for place in tl.static_range(len(ORDER)):
        if ORDER[place] == 0:
            tl.store(PARTS + at, first.to(tl.bfloat16), mask=inside)
        elif ORDER[place] == 1:
            tl.store(PARTS + at, second.to(tl.bfloat16), mask=inside)
        else:
            tl.store(PARTS + at, third.to(tl.bfloat16), mask=inside)
        PARTS += length


@on_its_device
def parts(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Bfloat16 parts of x `[rows, columns]` in this order, above one another: `[len(order)·rows, columns]`.

    They are stored as x is, by rows or by columns, but never by columns that would begin anywhere: a GPU multiplies
    those at half its speed.
    """
    rows, columns = x.shape
    by_columns = x.stride(0) == 1 and x.stride(1) >= rows and len(order) * rows % ALIGNED == 0
    if not by_columns:
        x = x.contiguous()
    lines, length, stride = (columns, rows, x.stride(1)) if by_columns else (1, x.numel(), x.numel())
    out = x.new_empty(lines, len(order) * length, dtype=torch.bfloat16)
    programs = (lines * triton.cdiv(length, NUMBERS),)
    launch = launches("split.parts", [x], order)
    launch(_split, programs, x, out, lines, length, stride, ORDER=order, NUMBERS=NUMBERS)
    return out.mT if by_columns else out.view(len(order) * rows, columns)
