"""Products with a positive semidefinite matrix M on tensor cores, for the fused conjugate gradients.

A float32 number is, but for its last two bits, the sum of two float16 numbers; of the four products of parts, three
make MV about as accurate as a float32 product. They stand side by side along the inner dimension of one product with
float32 sums. Where the caller allows TF32, one part is as much.

Powers of two keep the parts in float16's range: M is scaled on both sides to a diagonal between 1 and 4, each column
of V to a largest entry between 1 and 2. They are exact, and undone where the product is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.device import round_up
from proxprop.kernels.launch import launches, with_rows


@triton.jit
def power(x):
    """The power of two at or below |x|; 1 where x is zero, subnormal or not finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_parts(v, AT, between, inside, PARTS: tl.constexpr):
    """Parts of numbers below 2: high, low and high, `between` numbers apart."""
    v = v * 16384.0
    high = v.to(tl.float16)
    tl.store(AT, high, mask=inside)
    if PARTS == 3:
        tl.store(AT + between, (v - high.to(tl.float32)).to(tl.float16), mask=inside)
        tl.store(AT + 2 * between, high, mask=inside)


@triton.jit
def unscaled(size):
    """What the product with parts of columns of this `size` is to be multiplied by, beside M's side."""
    return size / 67108864.0  # 2²⁶: what M (4096) and V (16384) were multiplied by


@triton.jit
def _split_row(
    M, DIAGONAL, PARTS_OF_M, size, stride, rows, padded, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """A row of M, scaled, as parts side by side: low, high, high; zeros below the last."""
    row, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < tl.where(row < size, size, 0)
    M += group * size * stride
    diagonal = tl.load(M + column.to(tl.int64) * (stride + 1), mask=inside, other=1.0)
    place = tl.minimum(row, size - 1)
    own = tl.load(M + place.to(tl.int64) * (stride + 1))
    tl.store(DIAGONAL + group * size + place, own)
    m = tl.load(M + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    m = m / power(tl.sqrt(own)) / power(tl.sqrt(diagonal)) * 4096.0
    high = m.to(tl.float16)
    at = PARTS_OF_M + (group * rows + row) * PARTS * padded + column
    if PARTS == 3:
        tl.store(at, (m - high.to(tl.float32)).to(tl.float16), mask=column < padded)
        tl.store(at + padded, high, mask=column < padded)
        tl.store(at + 2 * padded, high, mask=column < padded)
    else:
        tl.store(at, high, mask=column < padded)


def split(M: Tensor, rows: int, parts: int) -> tuple[Tensor, Tensor]:
    """Parts of M `[groups, size, size]`, `[groups, rows, parts·padded]`, zero below M's rows, and its diagonal."""
    M = with_rows(M)
    groups, size, _ = M.shape
    padded = round_up(size, tuning.FP16_INNER_UNIT)
    out = M.new_empty(groups, rows, parts * padded, dtype=torch.float16)
    diagonal = M.new_empty(groups, size)
    launch = launches("halves.split", [M], rows, parts)
    launch(
        _split_row, (rows, groups), M, diagonal, out, size, M.stride(1), rows, padded,
        PARTS=parts, COLUMNS=triton.next_power_of_2(padded),
    )  # fmt: skip
    return out, diagonal


def product(left: Tensor, right: Tensor) -> Tensor:
    """A batched product of float16 arrays with float32 sums."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())  # under Triton's interpreter
