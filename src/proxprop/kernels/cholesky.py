"""The inverse Cholesky factor of small systems on a GPU, in few kernels.

For `λI + M = LLᵀ` of a few hundred rows, LAPACK's way (the factor, then a triangular solve) takes a GPU many times
longer than its arithmetic: one step waits for the other. Here `L⁻¹` comes from eliminating `[λI + M | I]` two blocks
a kernel, in which every program factorises the pivot blocks for itself rather than wait for another.
`torch.linalg.cholesky_ex` and `solve_triangular` are the plain twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.kernels import on_its_device, with_rows

BLOCK = 16
"""Rows of a block: what one warp factorises without waiting for others."""


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


@triton.jit
def _dot(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit(do_not_specialize=["step"])
def _eliminate(
    M, NEXT, INVERSE, LEAST, size, stride, padded, step, damping, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Eliminate two blocks, `step` and the one after it, from the tile of this program.

    Left of `step`, M holds what has become of the identity. Factors of the two blocks are `P⁻¹` and `Q⁻¹`; the rows of
    `[λI + M | I]` that they belong to become `upper` and `lower`, with which the rows below are eliminated.
    """
    first, second, group = step + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M += group.to(tl.int64) * (size if FIRST else padded) * stride
    tile = tl.arange(0, BLOCK)[:, None].to(tl.int64) * padded + tl.arange(0, BLOCK)[None, :]
    out = group.to(tl.int64) * padded * padded + first.to(tl.int64) * BLOCK * padded + second * BLOCK + tile

    # All that is needed is asked for before the long wait for the pivot blocks.
    after = step + 1
    pivot = _load(M, step, step, size, stride, damping, BLOCK, FIRST)
    beside = _load(M, step, after, size, stride, damping, BLOCK, FIRST)
    pivot2 = _load(M, after, after, size, stride, damping, BLOCK, FIRST)
    left = _load(M, first, step, size, stride, damping, BLOCK, FIRST)
    left2 = _load(M, first, after, size, stride, damping, BLOCK, FIRST)
    upper = _load(M, step, second, size, stride, damping, BLOCK, FIRST)
    lower = _load(M, after, second, size, stride, damping, BLOCK, FIRST)
    rest = _load(M, first, second, size, stride, damping, BLOCK, FIRST)

    P, least = _inverse_factor(pivot, BLOCK)
    beside = _dot(P, beside)
    Q, least2 = _inverse_factor(pivot2 - _dot(tl.trans(beside), beside), BLOCK)
    upper = _dot(P, upper)
    index = tl.arange(0, BLOCK)
    if second == step:  # the identity's own columns
        upper = P
        lower = tl.zeros((BLOCK, BLOCK), tl.float32)
        rest = lower
    elif second == after:
        upper = tl.zeros((BLOCK, BLOCK), tl.float32)
        lower = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        rest = upper
    lower = _dot(Q, lower - _dot(tl.trans(beside), upper))
    if first == step:  # rows of L⁻¹ are finished
        tl.store(INVERSE + out, tl.where(second > step, 0.0, upper))
        if second == step:
            least = tl.where(least2 > least, least, least2)
            tl.store(LEAST + group * (padded // (2 * BLOCK)) + step // 2, least)
    elif first == after:
        tl.store(INVERSE + out, tl.where(second > after, 0.0, lower))
    else:
        left = _dot(left, tl.trans(P))  # tiles of L
        left2 = _dot(left2 - _dot(left, beside), tl.trans(Q))
        tl.store(NEXT + out, rest - _dot(left, upper) - _dot(left2, lower))


@triton.jit
def _mend(INVERSE, LEAST, M, FAILED, size, stride, padded, damping, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Where a pivot was not positive, put `I/√(λ + trace M)` in place of `L⁻¹`; NaN where that overflows."""
    group, index = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    blocks = padded // (2 * BLOCK)
    block = tl.arange(0, SIZE)
    least = tl.load(LEAST + group * blocks + block, mask=block < blocks, other=1.0)
    broken = tl.sum((least > 0).to(tl.int32), axis=0) < SIZE
    diagonal = tl.load(
        M + group * size * stride + index.to(tl.int64) * (stride + 1), mask=index < size, other=0.0
    )
    bound = damping + tl.sum(diagonal, axis=0)
    finite = bound < float("inf")
    tl.store(FAILED + group, broken & finite)
    if broken:
        bound = tl.where(finite, bound, float("nan"))
        for row in range(padded):
            line = tl.where(index == row, 1.0 / tl.sqrt(bound), 0.0 * bound)
            tl.store(INVERSE + (group * padded + row) * padded + index, line, mask=index < padded)


@on_its_device
def inverse_factor(M: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`L⁻¹` with `LLᵀ = λI + M`, and whether that is not positive definite in this precision.

    Args:
        M: symmetric `[groups, size, size]`, float32.
        damping: λ.

    Returns:
        `L⁻¹ [groups, padded, padded]`, the identity beyond `size`; where the flag `[groups]` is true, the identity over
        `√(λ + trace M)`, and NaN where M is not finite.
    """
    M = with_rows(M)
    groups, size, _ = M.shape
    padded = triton.cdiv(size, 2 * BLOCK) * 2 * BLOCK
    blocks = padded // BLOCK
    now, after, inverse = (M.new_empty(groups, padded, padded) for _ in range(3))
    least = M.new_empty(groups, blocks // 2)
    failed = torch.empty(groups, dtype=torch.bool, device=M.device)
    for step in range(0, blocks, 2):
        _eliminate[(blocks - step, blocks, groups)](
            now if step else M, after, inverse, least, size, padded if step else M.stride(1), padded, step, damping,
            FIRST=step == 0, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
        now, after = after, now
    _mend[(groups,)](
        inverse, least, M, failed, size, M.stride(1), padded, damping,
        BLOCK=BLOCK, SIZE=triton.next_power_of_2(padded),
    )  # fmt: skip
    return inverse, failed
