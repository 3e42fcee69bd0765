"""`AᵀA` of a 16-bit matrix on tensor cores, with half of the FLOPs: tiles on and below the diagonal, and their mirrors.

Sums are float32. A bias's column of ones needs no copy of A: its products are column sums, which the tiles on the
diagonal find on their way. A few tiles leave most of a GPU idle, so each of them is then summed by several programs,
over parts of the rows, and a second kernel adds these up in the same order each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.device import multiprocessors, round_up
from proxprop.kernels.launch import launches, on_its_device

SUMMED = tl.constexpr(64)
"""Rows of ones that a tile is multiplied with for its column sums; tensor cores take no fewer."""


@triton.jit
def _place(index):
    """The row and the column of a tile, counted along the rows of the lower triangle."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def _load(A, row, column, last, features, stride):
    inside = (row < last)[:, None] & (column < features)[None, :]
    return tl.load(A + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(total, S, row, column, features, stride, mirrored):
    """Store a tile, and its mirror unless it lies on the diagonal."""
    inside = (row < features)[:, None] & (column < features)[None, :]
    tl.store(S + row[:, None].to(tl.int64) * stride + column[None, :], total, mask=inside)
    if mirrored:
        at = column[:, None].to(tl.int64) * stride + row[None, :]
        tl.store(S + at, tl.trans(total), mask=tl.trans(inside))


@triton.jit
def _border(sums, S, column, samples, features, stride):
    """Store the last row and column, which the ones add."""
    inside = column < features
    last = tl.full((), 0, tl.int64) + features
    tl.store(S + last * stride + column, sums, mask=inside)
    tl.store(S + column.to(tl.int64) * stride + features, sums, mask=inside)
    tl.store(S + last * (stride + 1), samples * 1.0)


@triton.jit
def _multiply(
    A, S, PARTS, SUMS, samples, features, stride, out_stride, length, tiles,
    ONES: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum one tile over `length` rows."""
    index, part = tl.program_id(0), tl.program_id(1)
    tile_row, tile_column = _place(index)
    row = tile_row * TILE + tl.arange(0, TILE)
    column = tile_column * TILE + tl.arange(0, TILE)
    first, last = part * length, tl.minimum((part + 1) * length, samples)
    total = tl.zeros((TILE, TILE), tl.float32)
    if tile_row == tile_column:
        counted = tl.zeros((SUMMED, TILE), tl.float32)
        ones = tl.full((SUMMED, DEPTH), 1.0, A.dtype.element_ty)
        for start in range(first, last, DEPTH):
            a = _load(A, start + tl.arange(0, DEPTH), row, last, features, stride)
            total = tl.dot(tl.trans(a), a, total)
            if ONES:
                counted = tl.dot(ones, a, counted)
        if ONES:
            sums = tl.sum(counted, axis=0) / SUMMED
            if SPLIT:
                tl.store(SUMS + (part * tiles + tile_row).to(tl.int64) * TILE + tl.arange(0, TILE), sums)
            else:
                _border(sums, S, row, samples, features, out_stride)
    else:
        for start in range(first, last, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            a = _load(A, depth, row, last, features, stride)
            b = _load(A, depth, column, last, features, stride)
            total = tl.dot(tl.trans(a), b, total)
    if SPLIT:
        inner = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(PARTS + (part * tl.num_programs(0) + index).to(tl.int64) * TILE * TILE + inner, total)
    else:
        _store(total, S, row, column, features, out_stride, tile_row != tile_column)


@triton.jit
def _add(
    PARTS, SUMS, S, samples, features, out_stride, parts, tiles,
    ONES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of some rows of a tile."""
    index, slab = tl.program_id(0), tl.program_id(1)
    tile_row, tile_column = _place(index)
    inner = slab * ROWS + tl.arange(0, ROWS)
    at = inner[:, None] * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros((ROWS, TILE), tl.float32)
    for part in range(parts):
        total += tl.load(PARTS + (part * tl.num_programs(0) + index).to(tl.int64) * TILE * TILE + at)
    column = tile_column * TILE + tl.arange(0, TILE)
    _store(total, S, tile_row * TILE + inner, column, features, out_stride, tile_row != tile_column)
    if ONES and (tile_row == tile_column) & (slab == 0):
        sums = tl.zeros((TILE,), tl.float32)
        for part in range(parts):
            sums += tl.load(SUMS + (part * tiles + tile_row).to(tl.int64) * TILE + tl.arange(0, TILE))
        _border(sums, S, column, samples, features, out_stride)


def parts_of(samples: int, pairs: int, programs: int) -> int:
    """The number of parts of the rows that takes the least time; a single part needs no second kernel.

    Args:
        samples: rows of A.
        pairs: tiles that are computed.
        programs: how many run at a time.
    """

    def rows(parts: int) -> float:
        """The time that so many parts take, in rows that a multiprocessor multiplies one after the other."""
        extra = parts * tuning.SQUARE_PART_ROWS * max(pairs / programs, 1 / parts) if parts > 1 else 0.0
        return float(triton.cdiv(pairs * parts, programs) * samples / parts + extra)

    most = max(1, min(tuning.SQUARE_MOST_PARTS, samples // tuning.SQUARE_DEPTH))
    return min(range(1, most + 1), key=rows)


@on_its_device
def transposed_square(A: Tensor, ones: bool, dense: bool) -> Tensor:
    """`AᵀA` in float32 for A `[samples, features]`, as if a column of ones came behind A's if asked for.

    Args:
        A: float16 or bfloat16.
        ones: whether to add the column.
        dense: whether the rows of the result lie without gaps; else each begins where a GPU likes it to.
    """
    if A.stride(1) != 1:
        A = A.contiguous()
    samples, features = A.shape
    size = features + ones
    wide = size if dense else round_up(size, tuning.ALIGNED)
    S = A.new_empty(size, wide, dtype=torch.float32)[:, :size]
    tile, depth = tuning.SQUARE_TILE, tuning.SQUARE_DEPTH
    tiles = triton.cdiv(features, tile)
    pairs = tiles * (tiles + 1) // 2
    parts = parts_of(samples, pairs, multiprocessors(A))
    length = round_up(triton.cdiv(samples, parts), depth)
    parts = triton.cdiv(samples, length)
    split = parts > 1
    partial = S.new_empty(parts * pairs * tile * tile) if split else S
    sums = S.new_empty(parts * tiles * tile) if split and ones else S
    launch = launches("symmetric_square", [A], ones, dense)
    launch(
        _multiply, (pairs, parts), A, S, partial, sums, samples, features, A.stride(0), wide, length, tiles,
        ONES=ones, SPLIT=split, TILE=tile, DEPTH=depth,
        num_warps=tuning.SQUARE_WARPS, num_stages=tuning.SQUARE_STAGES,
    )  # fmt: skip
    if split:
        rows = tuning.SQUARE_ADDED_ROWS
        launch(
            _add, (pairs, tile // rows), partial, sums, S, samples, features, wide, parts, tiles,
            ONES=ones, TILE=tile, ROWS=rows,
        )  # fmt: skip
    return S
