"""Products with a positive semidefinite matrix M on tensor cores, for the fused conjugate gradients.

The sum of two float16 numbers, high and low, has all but the last two bits of a float32 number. Three of the four
products of such terms make MV about as accurate as a float32 product. The terms lie side by side along the inner
dimension of one product with float32 sums. Where the caller allows TF32, the high terms are enough.

Powers of two keep the terms in float16's range. They scale M on both sides to a diagonal between 1 and 4, and each
column of V to a largest entry between 1 and 2. They are exact, and are undone where the product is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.device import round_up
from proxprop.kernels.launch import launches, on_its_device, with_rows

M_SCALE, V_SCALE = tl.constexpr(4096.0), tl.constexpr(16384.0)
"""Powers of two that bring the scaled entries of M and V near the top of float16's range."""


@triton.jit
def power(x):
    """The power of two at or below |x|; 1 where x is zero, subnormal or not finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def side_of(diagonal):
    """The power of two that a row of M is divided by, given its diagonal entry; a column likewise."""
    return power(tl.sqrt(diagonal))


@triton.jit
def _store(x, AT, between, inside, LOW: tl.constexpr, TERMS: tl.constexpr):
    """Store the terms of x, `between` numbers apart: low in place `LOW` of three, and high elsewhere."""
    high = x.to(tl.float16)
    if TERMS == 3:
        low = (x - high.to(tl.float32)).to(tl.float16)
        tl.store(AT + LOW * between, low, mask=inside)
        tl.store(AT + (1 - LOW) * between, high, mask=inside)
        tl.store(AT + 2 * between, high, mask=inside)
    else:
        tl.store(AT, high, mask=inside)


@triton.jit
def store_terms(v, AT, between, inside, TERMS: tl.constexpr):
    """Store the terms of entries of V, which are below 2: high, low, high."""
    _store(v * V_SCALE, AT, between, inside, 1, TERMS)


@triton.jit
def unscaled(size):
    """The multiplier that undoes the scaling of a column of V by its `size`; the sides of M are undone apart."""
    return size / (M_SCALE * V_SCALE)


@triton.jit
def _split_row(
    M, DIAGONAL, TERMS_OF_M, size, stride, rows, padded, TERMS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Scale a row of M and store its terms: low, high, high. Rows below the last are zero."""
    row, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < tl.where(row < size, size, 0)
    M += group * size * stride
    diagonal = tl.load(M + column.to(tl.int64) * (stride + 1), mask=inside, other=1.0)
    place = tl.minimum(row, size - 1)
    own = tl.load(M + place.to(tl.int64) * (stride + 1))
    tl.store(DIAGONAL + group * size + place, own)
    m = tl.load(M + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    m = m / side_of(own) / side_of(diagonal) * M_SCALE
    _store(m, TERMS_OF_M + (group * rows + row) * TERMS * padded + column, padded, column < padded, 0, TERMS)


def split(M: Tensor, rows: int, terms: int) -> tuple[Tensor, Tensor]:
    """Terms of M `[groups, size, size]`, and its diagonal.

    Args:
        M: positive semidefinite, float32.
        rows: rows of the result; those beyond the rows of M are zero.
        terms: 3 for products as accurate as float32's, 1 for products as accurate as TF32's.

    Returns:
        The terms `[groups, rows, terms·padded]`, and the diagonal `[groups, size]`.
    """
    M = with_rows(M)
    groups, size, _ = M.shape
    padded = round_up(size, tuning.FP16_INNER_UNIT)
    out = M.new_empty(groups, rows, terms * padded, dtype=torch.float16)
    diagonal = M.new_empty(groups, size)
    launch = launches("split_fp16.split", [M], rows, terms)
    launch(
        _split_row, (rows, groups), M, diagonal, out, size, M.stride(1), rows, padded,
        TERMS=terms, COLUMNS=triton.next_power_of_2(padded),
    )  # fmt: skip
    return out, diagonal


@triton.jit
def _stack(
    M, TERMS_OF_M, rows, columns, group_stride, stride, scale, BY_ROWS: tl.constexpr, NUMBERS: tl.constexpr
):  # fmt: skip
    """Store the terms of some numbers of a row: high, low, high, high."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < columns
    m = tl.load(M + group * group_stride + row * stride + at, mask=inside, other=0.0) * scale
    high = m.to(tl.float16)
    low = (m - high.to(tl.float32)).to(tl.float16)
    TERMS_OF_M += group * rows * columns * 4
    if BY_ROWS:
        between = rows.to(tl.int64) * columns
        TERMS_OF_M += row * columns + at
    else:
        between = columns.to(tl.int64)
        TERMS_OF_M += row * columns * 4 + at
    tl.store(TERMS_OF_M, high, mask=inside)
    tl.store(TERMS_OF_M + between, low, mask=inside)
    tl.store(TERMS_OF_M + 2 * between, high, mask=inside)
    tl.store(TERMS_OF_M + 3 * between, high, mask=inside)


@on_its_device
def stack(X: Tensor, dim: int, scale: float) -> Tensor:
    """Terms of X `[groups, rows, columns]` times a power of two, stacked along one of the last two dimensions.

    Returns:
        High, low, high, high: `[groups, 4·rows, columns]`, or `[groups, rows, 4·columns]`.
    """
    if X.stride(-1) != 1:
        X = X.contiguous()
    groups, rows, columns = X.shape
    shape = (groups, 4 * rows, columns) if dim == 1 else (groups, rows, 4 * columns)
    out = X.new_empty(shape, dtype=torch.float16)
    grid = rows, triton.cdiv(columns, tuning.SPLIT_NUMBERS), groups
    launch = launches("split_fp16.stack", [X], dim)
    launch(
        _stack, grid, X, out, rows, columns, X.stride(0), X.stride(1), float(scale),
        BY_ROWS=dim == 1, NUMBERS=tuning.SPLIT_NUMBERS,
    )  # fmt: skip
    return out


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product of float16 arrays with float32 sums."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())  # under Triton's interpreter
