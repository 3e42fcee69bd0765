"""Feature-space conjugate gradients on a GPU: a product on tensor cores and one kernel a step.

A step has two inner products and three updates of arrays `[groups, features, outputs]`, which are a dozen launches as
torch operations. A program takes a few columns: whole ones where they are short, else some rows at a time.
`proxprop.solvers.conjugate_gradients` is the plain twin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.device import round_up
from proxprop.kernels import split_fp16
from proxprop.kernels.launch import launches, on_its_device
from proxprop.kernels.split_fp16 import power, side_of, store_terms, unscaled
from proxprop.kernels.stopping import (
    epsilon,
    flags,
    floor_of,
    share_of,
    smaller,
    spoilt,
    step_length,
    still_going,
    stuck,
)


@triton.jit
def _tile(first, column, features, wide, ROWS: tl.constexpr):
    """Some rows of these columns of an array `[features, wide]`: their numbers, and which entries are where."""
    row = first + tl.arange(0, ROWS)
    inside = (row < features)[:, None] & (column < wide)[None, :]
    return row, inside, row[:, None].to(tl.int64) * wide + column[None, :]


@triton.jit
def _side(DIAGONAL, row, features):
    """The powers of two that these rows of S were divided by."""
    return side_of(tl.load(DIAGONAL + row, mask=row < features, other=1.0))


@triton.jit
def _hand_over(
    largest, SEARCH, DIAGONAL, TERMS_OF_SEARCH, UNSCALE, column, features, padded, wide,
    TERMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the terms of a group's search directions; `largest` is the largest scaled entry of each column."""
    tl.debug_barrier()  # other threads stored what is read back here
    size = power(largest)
    in_column = column < wide
    tl.store(UNSCALE + column, unscaled(size), mask=in_column)
    for first in range(0, padded, ROWS):
        row, inside, at = _tile(first, column, features, wide, ROWS)
        search = tl.load(SEARCH + at, mask=inside, other=0.0) * _side(DIAGONAL, row, features)[:, None]
        inside = (row < padded)[:, None] & in_column[None, :]
        store_terms(search / size[None, :], TERMS_OF_SEARCH + at, padded.to(tl.int64) * wide, inside, TERMS)


@triton.jit
def _largest(largest, search, DIAGONAL, row, features):
    """The largest entry of each column so far, after scaling as the rows of S."""
    return tl.maximum(largest, tl.max(tl.abs(search) * _side(DIAGONAL, row, features)[:, None], axis=0))


@triton.jit
def _begin(
    B, SEARCH, RESIDUAL, DIAGONAL, TERMS_OF_SEARCH, UNSCALE, SCALE, SQUARED, SPOILT, features, padded, outputs, wide,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale each column of B to a largest entry between 1 and 2: the first residual and search direction."""
    group = tl.program_id(1).to(tl.int64)
    tl.store(SPOILT + group, 0)
    B += group * features * outputs
    SEARCH += group * features * wide
    RESIDUAL += group * features * wide
    DIAGONAL += group * features
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_column = column < wide
    largest = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, features, ROWS):
        row, inside, at = _tile(first, column, features, outputs, ROWS)
        largest = tl.maximum(largest, tl.max(tl.abs(tl.load(B + at, mask=inside, other=0.0)), axis=0))
    scale = power(largest)
    largest, squared = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, features, ROWS):
        row, inside, at = _tile(first, column, features, outputs, ROWS)
        search = tl.load(B + at, mask=inside, other=0.0) / scale[None, :]
        row, inside, at = _tile(first, column, features, wide, ROWS)
        tl.store(SEARCH + at, search, mask=inside)
        tl.store(RESIDUAL + at, search, mask=inside)
        squared += tl.sum(search * search, axis=0)
        largest = _largest(largest, search, DIAGONAL, row, features)
    tl.store(SCALE + group * wide + column, scale, mask=in_column)
    tl.store(SQUARED + group * wide + column, squared, mask=in_column)
    _hand_over(
        largest, SEARCH, DIAGONAL, TERMS_OF_SEARCH + group * TERMS * padded * wide, UNSCALE + group * wide,
        column, features, padded, wide, TERMS, ROWS,
    )  # fmt: skip


@triton.jit
def _note(length, squared, ENERGY, SMALLEST, LARGEST, SPOILT, at, inside, epsilon, FIRST: tl.constexpr):
    """Note a step of each column, and return the square below which its next residual is noise.

    SPOILT is set once a step is taken along a curvature below the rounding of S, or where S or the first curvature
    overflowed.
    """
    energy, smallest, largest = length * squared, length, length
    if not FIRST:
        energy += tl.load(ENERGY + at, mask=inside, other=0.0)
        smallest = smaller(tl.load(SMALLEST + at, mask=inside, other=1.0), length)
        largest = tl.maximum(tl.load(LARGEST + at, mask=inside, other=0.0), length)
    tl.store(ENERGY + at, energy, mask=inside)
    tl.store(SMALLEST + at, smallest, mask=inside)
    tl.store(LARGEST + at, largest, mask=inside)
    found = spoilt(largest, smallest, epsilon)
    if FIRST:
        found |= stuck(length, squared)
    if tl.max((found & inside).to(tl.int32), axis=0) > 0:
        tl.store(SPOILT, 1)
    return floor_of(energy, smallest, epsilon)


@triton.jit
def _advance_whole(
    SEARCH, S_SEARCH, RESIDUAL, D, DIAGONAL, TERMS_OF_SEARCH, UNSCALE, SCALE, SQUARED,
    ENERGY, SMALLEST, LARGEST, SPOILT, damping, epsilon, features, padded, wide,
    FIRST: tl.constexpr, LAST: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_advance` for short columns, which a program holds whole: nothing is read twice."""
    group = tl.program_id(1).to(tl.int64)
    DIAGONAL += group * features
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    in_column = column < wide
    at_column = group * wide + column
    inside = (row < features)[:, None] & in_column[None, :]
    at = group * features * wide + row[:, None] * wide + column[None, :]
    search = tl.load(SEARCH + at, mask=inside, other=0.0)
    S_search = tl.load(S_SEARCH + at, mask=inside, other=0.0)
    side = _side(DIAGONAL, row, features)
    unscale = tl.load(UNSCALE + at_column, mask=in_column, other=0.0)
    squared = tl.load(SQUARED + at_column, mask=in_column, other=0.0)
    if not FIRST:
        solution = tl.load(D + at, mask=inside, other=0.0)
    if not LAST:
        residual = tl.load(RESIDUAL + at, mask=inside, other=0.0)
    image = damping * search + S_search * unscale[None, :] * side[:, None]
    length = step_length(squared, tl.sum(search * image, axis=0), damping)
    floor = _note(
        length, squared, ENERGY, SMALLEST, LARGEST, SPOILT + group, at_column, in_column, epsilon, FIRST
    )
    if FIRST:
        solution = length[None, :] * search
    else:
        solution += length[None, :] * search
    if LAST:
        solution *= tl.load(SCALE + at_column, mask=in_column, other=1.0)[None, :]
    tl.store(D + at, solution, mask=inside)
    if not LAST:
        residual -= length[None, :] * image
        if FIRST:
            residual -= share_of(tl.sum(residual * search, axis=0), squared)[None, :] * search
        after = still_going(tl.sum(residual * residual, axis=0), floor, squared, length)
        search = residual + tl.where(squared == 0, 0.0, after / squared)[None, :] * search
        tl.store(SQUARED + at_column, after, mask=in_column)
        tl.store(RESIDUAL + at, residual, mask=inside)
        tl.store(SEARCH + at, search, mask=inside)
        search *= side[:, None]
        size = power(tl.max(tl.abs(search), axis=0))
        tl.store(UNSCALE + at_column, unscaled(size), mask=in_column)
        at = TERMS_OF_SEARCH + group * TERMS * padded * wide + row[:, None] * wide + column[None, :]
        store_terms(
            search / size[None, :], at, padded * wide, (row < padded)[:, None] & in_column[None, :], TERMS
        )


@triton.jit
def _advance(
    SEARCH, S_SEARCH, RESIDUAL, D, DIAGONAL, TERMS_OF_SEARCH, UNSCALE, SCALE, SQUARED,
    ENERGY, SMALLEST, LARGEST, SPOILT, damping, epsilon, features, padded, wide,
    FIRST: tl.constexpr, LAST: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Take a step, some rows of a few columns at a time."""
    group = tl.program_id(1).to(tl.int64)
    SEARCH += group * features * wide
    S_SEARCH += group * features * wide
    RESIDUAL += group * features * wide
    D += group * features * wide
    DIAGONAL += group * features
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_column = column < wide
    at_column = group * wide + column
    unscale = tl.load(UNSCALE + at_column, mask=in_column, other=0.0)
    squared = tl.load(SQUARED + at_column, mask=in_column, other=0.0)

    curvature = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, features, ROWS):
        row, inside, at = _tile(first, column, features, wide, ROWS)
        side = _side(DIAGONAL, row, features)
        search = tl.load(SEARCH + at, mask=inside, other=0.0)
        S_search = tl.load(S_SEARCH + at, mask=inside, other=0.0) * unscale[None, :] * side[:, None]
        curvature += tl.sum(search * (damping * search + S_search), axis=0)
    length = step_length(squared, curvature, damping)
    floor = _note(
        length, squared, ENERGY, SMALLEST, LARGEST, SPOILT + group, at_column, in_column, epsilon, FIRST
    )

    after, overlap = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, features, ROWS):
        row, inside, at = _tile(first, column, features, wide, ROWS)
        search = tl.load(SEARCH + at, mask=inside, other=0.0)
        solution = length[None, :] * search
        if not FIRST:
            solution += tl.load(D + at, mask=inside, other=0.0)
        if LAST:
            solution *= tl.load(SCALE + at_column, mask=in_column, other=1.0)[None, :]
        tl.store(D + at, solution, mask=inside)
        if not LAST:
            side = _side(DIAGONAL, row, features)
            S_search = tl.load(S_SEARCH + at, mask=inside, other=0.0) * unscale[None, :] * side[:, None]
            residual = tl.load(RESIDUAL + at, mask=inside, other=0.0)
            residual -= length[None, :] * (damping * search + S_search)
            after += tl.sum(residual * residual, axis=0)
            if FIRST:
                overlap += tl.sum(residual * search, axis=0)
            tl.store(RESIDUAL + at, residual, mask=inside)

    if not LAST:
        tl.debug_barrier()
        share = share_of(overlap, squared)
        after = still_going(after - share * overlap, floor, squared, length)
        tl.store(SQUARED + at_column, after, mask=in_column)
        ratio = tl.where(squared == 0, 0.0, after / squared)
        largest = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, features, ROWS):
            row, inside, at = _tile(first, column, features, wide, ROWS)
            search = tl.load(SEARCH + at, mask=inside, other=0.0)
            residual = tl.load(RESIDUAL + at, mask=inside, other=0.0)
            if FIRST:
                residual -= share[None, :] * search
                tl.store(RESIDUAL + at, residual, mask=inside)
            search = residual + ratio[None, :] * search
            tl.store(SEARCH + at, search, mask=inside)
            largest = _largest(largest, search, DIAGONAL, row, features)
        _hand_over(
            largest, SEARCH, DIAGONAL, TERMS_OF_SEARCH + group * TERMS * padded * wide, UNSCALE + group * wide,
            column, features, padded, wide, TERMS, ROWS,
        )  # fmt: skip


@on_its_device
def feature_cg(
    S: Tensor, B: Tensor, damping: float, iterations: int, terms: int
) -> tuple[Tensor, Tensor | None]:
    """Conjugate gradients in feature space, with a step length for each output.

    Args:
        S: `[groups, features, features]`, float32.
        B: `[groups, features, outputs]`, float32.
        damping: λ.
        iterations: number of steps.
        terms: 3 for products as accurate as float32's, 1 for products as accurate as TF32's.

    Returns:
        D `[groups, features, outputs]`, and for each group whether rounding of S may have spoilt it; see `flags`.
    """
    damping = float(damping)  # Triton specialises on integers; a float compiles once
    groups, features, outputs = B.shape
    terms_of_S, diagonal = split_fp16.split(S, features, terms)
    most = max(tuning.FEATURE_CG_LEAST_OUTPUTS, tuning.FEATURE_CG_MOST_NUMBERS // (groups * features))
    blocks = max(1, triton.cdiv(outputs, most))
    found = [
        _solve(terms_of_S, diagonal, some, damping, iterations, terms)
        for some in B.split(triton.cdiv(outputs, blocks), dim=-1)
    ]
    D = found[0][0] if len(found) == 1 else torch.cat([D for D, _ in found], dim=-1)
    return D, flags([spoilt for _, spoilt in found], terms)


def _solve(
    terms_of_S: Tensor, diagonal: Tensor, B: Tensor, damping: float, iterations: int, terms: int
) -> tuple[Tensor, Tensor]:
    """`feature_cg` for a block of outputs."""
    B = B.contiguous()
    groups, features, outputs = B.shape
    padded, wide = round_up(features, tuning.FP16_INNER_UNIT), round_up(outputs, tuning.FP16_WIDTH_UNIT)
    whole = padded <= tuning.FEATURE_CG_WHOLE_ROWS
    columns = 4 if outputs < 256 else 8 if whole or outputs < 2048 else 16
    rows = triton.next_power_of_2(padded) if whole else tuning.FEATURE_CG_ROWS
    shape = {"TERMS": terms, "ROWS": rows, "COLUMNS": columns, "num_warps": 4 if columns == 16 else 8}
    programs = (triton.cdiv(wide, columns), groups)
    terms_of_search = B.new_empty(groups, terms * padded, wide, dtype=torch.float16)
    search, residual, D = (B.new_empty(groups, features, wide) for _ in range(3))
    squared, scale, unscale, energy, smallest, largest = B.new_empty(6, groups, wide).unbind()
    spoilt_by = torch.empty(groups, dtype=torch.bool, device=B.device)
    launch = launches("feature_cg", [B], iterations, terms)
    launch(
        _begin, programs,
        B, search, residual, diagonal, terms_of_search, unscale, scale, squared, spoilt_by,
        features, padded, outputs, wide, **shape,
    )  # fmt: skip
    for step in range(iterations):
        launch(
            _advance_whole if whole else _advance, programs,
            search, split_fp16.product(terms_of_S, terms_of_search), residual, D, diagonal, terms_of_search, unscale,
            scale, squared, energy, smallest, largest, spoilt_by, damping, epsilon(terms), features, padded, wide,
            FIRST=step == 0, LAST=step == iterations - 1, **shape,
        )  # fmt: skip
    return D[..., :outputs], spoilt_by
