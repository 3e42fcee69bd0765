"""The inverse Cholesky factor of small systems on a GPU, one kernel a block of columns.

For `λI + M = LLᵀ` of a few hundred rows, LAPACK's way (the factor, then a triangular solve) takes a GPU many times
longer than its arithmetic: one step waits for the other. Here `L⁻¹` comes from eliminating `[λI + M | I]` block by
block, and in each block's kernel every program factorises the same pivot block for itself rather than wait for it.
`torch.linalg.cholesky_ex` and `solve_triangular` are the plain twin.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
"""Rows of a block."""

WARPS = 2


@triton.jit
def _entry(vector, k, BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK) == k, vector, 0.0), axis=0)


@triton.jit
def _row(tile, k, BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK)[:, None] == k, tile, 0.0), axis=0)


@triton.jit
def _column(tile, k, BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK)[None, :] == k, tile, 0.0), axis=1)


@triton.jit
def _inverse_factor(tile, BLOCK: tl.constexpr):
    """`L⁻¹` for one symmetric block `LLᵀ`, and its smallest pivot.

    Two columns are eliminated at a time, because each elimination waits for the one before.
    """
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    least = float("inf")
    for k in range(0, BLOCK, 2):
        down, down2 = _column(tile, k, BLOCK), _column(tile, k + 1, BLOCK)
        along, along2 = _row(tile, k, BLOCK), _row(tile, k + 1, BLOCK)
        done, done2 = _row(inverse, k, BLOCK), _row(inverse, k + 1, BLOCK)
        pivot, corner, pivot2 = (
            _entry(down, k, BLOCK),
            _entry(down, k + 1, BLOCK),
            _entry(down2, k + 1, BLOCK),
        )
        factor = corner / pivot
        pivot2 -= factor * corner
        along2 -= factor * along
        done2 -= factor * done
        least = tl.where(pivot > least, least, pivot)  # comparisons that take NaN over
        least = tl.where(pivot2 > least, least, pivot2)
        down = tl.where(index > k + 1, down / pivot, 0.0)
        down2 = tl.where(index > k + 1, (down2 - corner * down) / pivot2, 0.0)
        tile -= down[:, None] * along[None, :] + down2[:, None] * along2[None, :]
        inverse -= down[:, None] * done[None, :] + down2[:, None] * done2[None, :]
        inverse = tl.where(row == k, done[None, :] / tl.sqrt(pivot), inverse)
        inverse = tl.where(row == k + 1, done2[None, :] / tl.sqrt(pivot2), inverse)
    return inverse, least


@triton.jit
def _load(M, first, second, size, stride, damping, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """A tile of M; in the first step of `λI + M`, continued by the identity beyond its size."""
    row = first * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = second * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row.to(tl.int64) * stride + column
    if FIRST:
        tile = tl.load(M + at, mask=(row < size) & (column < size), other=0.0)
        tile += tl.where(row == column, tl.where(row < size, damping, 1.0), 0.0)
    else:
        tile = tl.load(M + at)
    return tile


@triton.jit(do_not_specialize=["step"])
def _eliminate(
    M, NEXT, INVERSE, LEAST, size, stride, padded, step, damping, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, second, group = step + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M += group.to(tl.int64) * (size if FIRST else padded) * stride
    tile = tl.arange(0, BLOCK)[:, None].to(tl.int64) * padded + tl.arange(0, BLOCK)[None, :]
    out = group.to(tl.int64) * padded * padded + first.to(tl.int64) * BLOCK * padded + second * BLOCK + tile

    pivot, least = _inverse_factor(_load(M, step, step, size, stride, damping, BLOCK, FIRST), BLOCK)
    if first == step:  # a row of L⁻¹ is finished
        if second < step:
            across = _load(M, step, second, size, stride, damping, BLOCK, FIRST)
            tl.store(INVERSE + out, tl.dot(pivot, across, input_precision="ieee"))
        elif second == step:
            tl.store(INVERSE + out, pivot)
            tl.store(LEAST + group * (padded // BLOCK) + step, least)
        else:
            tl.store(INVERSE + out, tl.zeros((BLOCK, BLOCK), tl.float32))
    else:
        left = _load(M, first, step, size, stride, damping, BLOCK, FIRST)
        left = tl.dot(left, tl.trans(pivot), input_precision="ieee")  # a tile of L
        if second == step:
            tl.store(NEXT + out, -tl.dot(left, pivot, input_precision="ieee"))
        else:
            across = _load(M, step, second, size, stride, damping, BLOCK, FIRST)
            across = tl.dot(pivot, across, input_precision="ieee")
            rest = _load(M, first, second, size, stride, damping, BLOCK, FIRST)
            tl.store(NEXT + out, rest - tl.dot(left, across, input_precision="ieee"))


def inverse_factor(M: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`L⁻¹` with `LLᵀ = λI + M`, and whether that is not positive definite in this precision.

    Args:
        M: symmetric `[groups, size, size]`, float32, its rows contiguous.
        damping: λ.

    Returns:
        `L⁻¹ [groups, size, size]`, meaningless where the flag `[groups]` is true.
    """
    groups, size, _ = M.shape
    blocks = triton.cdiv(size, BLOCK)
    padded = blocks * BLOCK
    now, after, inverse = (M.new_empty(groups, padded, padded) for _ in range(3))
    least = M.new_empty(groups, blocks)
    for step in range(blocks):
        _eliminate[(blocks - step, blocks, groups)](
            now if step else M, after, inverse, least, size, padded if step else M.stride(1), padded, step, damping,
            FIRST=step == 0, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        now, after = after, now
    return inverse[:, :size, :size], ~(least > 0).all(-1)
