"""The inverse Cholesky factor of small systems on a GPU, in few kernels.

For `λI + M = LLᵀ` of a few hundred rows, LAPACK's way (the factor, then a triangular solve) takes a GPU many times
longer than its arithmetic: one step waits for the other. Here `L⁻¹` comes from eliminating `[λI + M | I]` by blocks, a
kernel each, in which one program factorises the pivot block of the next. Programs are few, of one warp and soon done
but for that one, so that there is room for other kernels beside them.
`torch.linalg.cholesky_ex` and `solve_triangular` are the plain twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.kernels.launch import launches, on_its_device, with_rows
from proxprop.tuning import CHOLESKY_TILE


@triton.jit
def _load(M, first, second, size, stride, damping, FIRST: tl.constexpr):
    """Entries of M; in the first step of `λI + M`, continued by the identity beyond its size."""
    at = first.to(tl.int64) * stride + second
    if FIRST:
        tile = tl.load(M + at, mask=(first < size) & (second < size), other=0.0)
        tile += tl.where(first == second, tl.where(first < size, damping, 1.0), 0.0)
    else:
        tile = tl.load(M + at)
    return tile


@triton.jit
def _dot(left, right):
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _factorise(tile, PIVOT, SQUARES, BLOCK: tl.constexpr):
    """Store `L⁻¹` of a symmetric tile `LLᵀ`, and the squares of L's diagonal.

    By columns, of which a thread holds one entry each: the entries of the pivot's row are a shuffle away. In each step
    the first column is done, and what becomes of the identity's takes the last place.
    """
    index = tl.arange(0, BLOCK)
    tl.store(PIVOT + index[:, None] * BLOCK + index[None, :], tile)
    tl.debug_barrier()
    columns = ()  # type: tuple[Tensor, ...]
    for j in tl.static_range(BLOCK):
        columns += (tl.load(PIVOT + j * BLOCK + index),)
    tl.debug_barrier()
    pivots = tl.full((BLOCK,), 1.0, tl.float32)
    for k in range(BLOCK):
        place = tl.full((BLOCK,), k, tl.int32)
        pivot = tl.gather(columns[0], place, 0)
        pivots = tl.where(index == k, pivot, pivots)
        down = tl.where(index > k, columns[0] / pivot, 0.0)
        eliminated = ()  # type: tuple[Tensor, ...]
        for j in tl.static_range(1, BLOCK):
            eliminated += (columns[j] - down * tl.gather(columns[j], place, 0),)
        eliminated += (tl.where(index == k, 1.0, -down),)
        columns = eliminated
    root = tl.sqrt(pivots)
    for j in tl.static_range(BLOCK):
        tl.store(PIVOT + index * BLOCK + j, tl.where(index < j, 0.0, columns[j] / root))
    tl.store(SQUARES + index, pivots)


@triton.jit
def _begin(M, PIVOTS, SQUARES, size, stride, steps, damping, BLOCK: tl.constexpr):
    """Factorise the first pivot tile."""
    group, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tile = _load(M + group * size * stride, index[:, None], index[None, :], size, stride, damping, True)
    _factorise(tile, PIVOTS + group * steps * BLOCK * BLOCK, SQUARES + group * steps * BLOCK, BLOCK)


@triton.jit(do_not_specialize=["step"])
def _eliminate(
    M, WORK, PARTIAL, INVERSE, PIVOTS, SQUARES, size, stride, steps, step, damping,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Eliminate block `step` from the tile of this program, on or below the diagonal.

    With `L⁻¹` of the pivot tile, its rows of `[λI + M | I]` become `above`; rows below lose their share of it. Right of
    `step` that is what is left of M, in WORK, elsewhere what has become of the identity, in PARTIAL. The program of the
    next pivot tile, one of the first to be launched, factorises it at once, while all others are done.
    """
    number, group = tl.program_id(0) + step * (step + 1) // 2, tl.program_id(1).to(tl.int64)
    first = ((tl.sqrt(8.0 * number + 2.0) - 1.0) / 2.0).to(tl.int32)
    second = number - first * (first + 1) // 2
    padded = steps * BLOCK
    M += group * (size if FIRST else padded) * stride
    WORK += group * padded * padded
    PARTIAL += group * padded * padded
    INVERSE += group * padded * padded
    SQUARES += group * padded
    PIVOTS += group * steps * BLOCK * BLOCK

    down, along = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    here = step * BLOCK + along
    tile = (first * BLOCK + down).to(tl.int64) * padded + second * BLOCK + along
    L = tl.load(PIVOTS + step * BLOCK * BLOCK + down * BLOCK + along)
    if second == step:
        above, rest = L, tl.zeros((BLOCK, BLOCK), tl.float32)
    elif second < step:
        above = _dot(
            L, tl.load(PARTIAL + (step * BLOCK + down).to(tl.int64) * padded + second * BLOCK + along)
        )
        rest = tl.load(PARTIAL + tile)
    else:
        above = _dot(L, tl.trans(_load(M, second * BLOCK + down, here, size, stride, damping, FIRST)))
        rest = _load(M, first * BLOCK + down, second * BLOCK + along, size, stride, damping, FIRST)
    if first == step:  # rows of L⁻¹ are finished
        tl.store(INVERSE + tile, above)
        if second == step:
            for right in range(1, steps - step):
                tl.store(INVERSE + tile + right * BLOCK, tl.zeros((BLOCK, BLOCK), tl.float32))
    else:
        left = _dot(_load(M, first * BLOCK + down, here, size, stride, damping, FIRST), tl.trans(L))
        rest -= _dot(left, above)
        if second <= step:
            tl.store(PARTIAL + tile, rest)
        elif first == step + 1:
            _factorise(rest, PIVOTS + (step + 1) * BLOCK * BLOCK, SQUARES + (step + 1) * BLOCK, BLOCK)
        else:
            tl.store(WORK + tile, rest)


@triton.jit
def _mend(INVERSE, SQUARES, M, FAILED, size, stride, padded, damping, least_share, SIZE: tl.constexpr):
    """Where a pivot is too small a share of its diagonal entry, put `I/√(λ + trace M)` in place of `L⁻¹`.

    That is NaN where M is not finite.
    """
    group, index = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = index < size
    pivots = tl.load(SQUARES + group * padded + index, mask=inside, other=1.0)
    diagonal = tl.load(M + group * size * stride + index.to(tl.int64) * (stride + 1), mask=inside, other=0.0)
    sound = pivots > least_share * tl.where(inside, diagonal + damping, 1.0)
    broken = tl.sum(sound.to(tl.int32), axis=0) < SIZE  # true where NaN is
    bound = damping + tl.sum(diagonal, axis=0)
    tl.store(FAILED + group, broken & (bound == bound))  # NaN is not a failure of the factorisation
    if broken:
        bound = tl.where(bound < float("inf"), bound, float("nan"))
        for row in range(padded):
            line = tl.where(index == row, 1.0 / tl.sqrt(bound), 0.0 * bound)
            tl.store(INVERSE + (group * padded + row) * padded + index, line, mask=index < padded)


@on_its_device
def inverse_factor(M: Tensor, damping: float, least_share: float) -> tuple[Tensor, Tensor]:
    """`L⁻¹` with `LLᵀ = λI + M`, and whether that is not positive definite in this precision.

    Args:
        M: symmetric `[groups, size, size]`, float32.
        damping: λ.
        least_share: the smallest part of its diagonal entry that a pivot may be.

    Returns:
        `L⁻¹ [groups, padded, padded]`, the identity beyond `size`; where the flag `[groups]` is true, the identity over
        `√(λ + trace M)`, and NaN where M is not finite.
    """
    damping = float(damping)  # Triton specialises on integers; a float compiles once
    M = with_rows(M)
    groups, size, _ = M.shape
    steps = triton.cdiv(size, CHOLESKY_TILE)
    padded = steps * CHOLESKY_TILE
    work, partial, inverse = (M.new_empty(groups, padded, padded) for _ in range(3))
    pivots, squares = M.new_empty(groups, steps, CHOLESKY_TILE, CHOLESKY_TILE), M.new_empty(groups, padded)
    failed = torch.empty(groups, dtype=torch.bool, device=M.device)
    launch = launches("cholesky.inverse_factor", [M])
    launch(
        _begin,
        (groups,),
        M,
        pivots,
        squares,
        size,
        M.stride(1),
        steps,
        damping,
        BLOCK=CHOLESKY_TILE,
        num_warps=1,
    )
    for step in range(steps):
        tiles = (steps * (steps + 1) - step * (step + 1)) // 2
        launch(
            _eliminate, (tiles, groups),
            work if step else M, work, partial, inverse, pivots, squares,
            size, padded if step else M.stride(1), steps, step, damping,
            FIRST=step == 0, BLOCK=CHOLESKY_TILE, num_warps=1,
        )  # fmt: skip
    launch(
        _mend, (groups,), inverse, squares, M, failed, size, M.stride(1), padded, damping, least_share,
        SIZE=triton.next_power_of_2(padded),
    )  # fmt: skip
    return inverse, failed
