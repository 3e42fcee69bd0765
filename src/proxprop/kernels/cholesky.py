"""The inverse Cholesky factor of small systems on a GPU, in a few launches.

For `λI + M = LLᵀ` of a few hundred rows, LAPACK's way (the factor, then triangular substitution) takes a GPU many times
longer than the arithmetic, because each step waits for the one before. Here `L⁻¹` comes from eliminating `[λI + M | I]`
tile by tile. Each launch eliminates one pivot tile, and one of its programs factorises the next. Programs are few and
of one warp, and all but that one are soon done, which leaves room for other kernels.
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
    """Load a tile of M; in the first step, of `λI + M` padded with the identity."""
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
def _factorise(tile, PIVOT, SQUARES, TILE: tl.constexpr):
    """Store `L⁻¹` of a symmetric tile `LLᵀ`, and the squares of L's diagonal.

    A thread holds one entry of each column, so the entries of the pivot's row are a shuffle away. Each step drops the
    first column, which is eliminated, and appends a column of the inverse.
    """
    index = tl.arange(0, TILE)
    tl.store(PIVOT + index[:, None] * TILE + index[None, :], tile)
    tl.debug_barrier()
    columns = ()  # type: tuple[Tensor, ...]
    for j in tl.static_range(TILE):
        columns += (tl.load(PIVOT + j * TILE + index),)
    tl.debug_barrier()
    pivots = tl.full((TILE,), 1.0, tl.float32)
    for k in range(TILE):
        place = tl.full((TILE,), k, tl.int32)
        pivot = tl.gather(columns[0], place, 0)
        pivots = tl.where(index == k, pivot, pivots)
        down = tl.where(index > k, columns[0] / pivot, 0.0)
        eliminated = ()  # type: tuple[Tensor, ...]
        for j in tl.static_range(1, TILE):
            eliminated += (columns[j] - down * tl.gather(columns[j], place, 0),)
        eliminated += (tl.where(index == k, 1.0, -down),)
        columns = eliminated
    root = tl.sqrt(pivots)
    for j in tl.static_range(TILE):
        tl.store(PIVOT + index * TILE + j, tl.where(index < j, 0.0, columns[j] / root))
    tl.store(SQUARES + index, pivots)


@triton.jit
def _begin(M, PIVOTS, SQUARES, size, stride, steps, damping, TILE: tl.constexpr):
    """Factorise the first pivot tile."""
    group, index = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    tile = _load(M + group * size * stride, index[:, None], index[None, :], size, stride, damping, True)
    _factorise(tile, PIVOTS + group * steps * TILE * TILE, SQUARES + group * steps * TILE, TILE)


@triton.jit(do_not_specialize=["step"])
def _eliminate(
    M, WORK, PARTIAL, INVERSE, PIVOTS, SQUARES, size, stride, steps, step, damping,
    FIRST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Eliminate pivot `step` from the tile of this program, on or below the diagonal.

    `L⁻¹` of the pivot tile turns its rows of `[λI + M | I]` into `above`; rows below subtract their share of `above`.
    WORK holds the tiles right of `step`, the remainder of M. PARTIAL holds the others, which become the inverse. The
    program of the next pivot tile is one of the first to be launched and factorises it at once.
    """
    number, group = tl.program_id(0) + step * (step + 1) // 2, tl.program_id(1).to(tl.int64)
    first = ((tl.sqrt(8.0 * number + 2.0) - 1.0) / 2.0).to(tl.int32)
    second = number - first * (first + 1) // 2
    padded = steps * TILE
    M += group * (size if FIRST else padded) * stride
    WORK += group * padded * padded
    PARTIAL += group * padded * padded
    INVERSE += group * padded * padded
    SQUARES += group * padded
    PIVOTS += group * steps * TILE * TILE

    down, along = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    here = step * TILE + along
    at = (first * TILE + down).to(tl.int64) * padded + second * TILE + along
    L = tl.load(PIVOTS + step * TILE * TILE + down * TILE + along)
    if second == step:
        above, rest = L, tl.zeros((TILE, TILE), tl.float32)
    elif second < step:
        above = _dot(L, tl.load(PARTIAL + (step * TILE + down).to(tl.int64) * padded + second * TILE + along))
        rest = tl.load(PARTIAL + at)
    else:
        above = _dot(L, tl.trans(_load(M, second * TILE + down, here, size, stride, damping, FIRST)))
        rest = _load(M, first * TILE + down, second * TILE + along, size, stride, damping, FIRST)
    if first == step:  # these rows of L⁻¹ are finished
        tl.store(INVERSE + at, above)
        if second == step:
            for right in range(1, steps - step):
                tl.store(INVERSE + at + right * TILE, tl.zeros((TILE, TILE), tl.float32))
    else:
        left = _dot(_load(M, first * TILE + down, here, size, stride, damping, FIRST), tl.trans(L))
        rest -= _dot(left, above)
        if second <= step:
            tl.store(PARTIAL + at, rest)
        elif first == step + 1:
            _factorise(rest, PIVOTS + (step + 1) * TILE * TILE, SQUARES + (step + 1) * TILE, TILE)
        else:
            tl.store(WORK + at, rest)


@triton.jit
def _mend(INVERSE, SQUARES, M, FAILED, size, stride, padded, damping, least_share, SIZE: tl.constexpr):
    """Replace `L⁻¹` by `I/√(λ + trace M)` where a pivot is too small a share of its diagonal entry.

    The result is NaN where M is not finite.
    """
    group, index = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = index < size
    pivots = tl.load(SQUARES + group * padded + index, mask=inside, other=1.0)
    diagonal = tl.load(M + group * size * stride + index.to(tl.int64) * (stride + 1), mask=inside, other=0.0)
    sound = pivots > least_share * tl.where(inside, diagonal + damping, 1.0)
    broken = tl.sum(sound.to(tl.int32), axis=0) < SIZE  # true also where a pivot is NaN
    bound = damping + tl.sum(diagonal, axis=0)
    tl.store(FAILED + group, broken & (bound == bound))  # NaN is not a failure of the factorisation
    if broken:
        bound = tl.where(bound < float("inf"), bound, float("nan"))
        for row in range(padded):
            line = tl.where(index == row, 1.0 / tl.sqrt(bound), 0.0 * bound)
            tl.store(INVERSE + (group * padded + row) * padded + index, line, mask=index < padded)


@on_its_device
def inverse_factor(M: Tensor, damping: float, least_share: float) -> tuple[Tensor, Tensor]:
    """`L⁻¹` with `LLᵀ = λI + M`, and whether the factorisation failed.

    Args:
        M: symmetric `[groups, size, size]`, float32.
        damping: λ.
        least_share: smallest share of its diagonal entry that a pivot may be.

    Returns:
        `L⁻¹ [groups, padded, padded]`, which is the identity beyond `size`, and `[groups]` flags. Where the
        factorisation failed, the identity over `√(λ + trace M)` stands for `L⁻¹`; where M is not finite, NaN.
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
        _begin, (groups,), M, pivots, squares, size, M.stride(1), steps, damping, TILE=CHOLESKY_TILE, num_warps=1,
    )  # fmt: skip
    for step in range(steps):
        tiles = (steps * (steps + 1) - step * (step + 1)) // 2
        launch(
            _eliminate, (tiles, groups),
            work if step else M, work, partial, inverse, pivots, squares,
            size, padded if step else M.stride(1), steps, step, damping,
            FIRST=step == 0, TILE=CHOLESKY_TILE, num_warps=1,
        )  # fmt: skip
    launch(
        _mend, (groups,), inverse, squares, M, failed, size, M.stride(1), padded, damping, least_share,
        SIZE=triton.next_power_of_2(padded),
    )  # fmt: skip
    return inverse, failed
