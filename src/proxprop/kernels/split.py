"""Bfloat16 parts of a float32 array in one pass; `proxprop.solve.products.plain_parts` is the plain twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.kernels import on_its_device

NUMBERS = 1024
"""Numbers that a program splits."""


@triton.jit
def _head(x):
    """The leading eight bits of a float32 number, as a float32 number."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(X, PARTS, numbers, ORDER: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < numbers
    x = tl.load(X + at, mask=inside, other=0.0)
    first = _head(x)
    second = _head(x - first)
    third = x - first - second
    for place in tl.static_range(len(ORDER)):
        if ORDER[place] == 0:
            tl.store(PARTS + at, first.to(tl.bfloat16), mask=inside)
        elif ORDER[place] == 1:
            tl.store(PARTS + at, second.to(tl.bfloat16), mask=inside)
        else:
            tl.store(PARTS + at, third.to(tl.bfloat16), mask=inside)
        PARTS += numbers


@on_its_device
def parts(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Bfloat16 parts of x `[rows, columns]` in this order, above one another: `[len(order)·rows, columns]`."""
    x = x.contiguous()
    rows, columns = x.shape
    out = x.new_empty(len(order) * rows, columns, dtype=torch.bfloat16)
    _split[(triton.cdiv(x.numel(), NUMBERS),)](x, out, x.numel(), ORDER=order, NUMBERS=NUMBERS)
    return out
