"""Sample-space conjugate gradients on a GPU: a product on tensor cores and one kernel a step.

The iterates are those of `proxprop.solve.cg.sample_cg`, the plain twin, by three-term recurrences: since `λπ + Kπ` is
the difference of two residuals over a step length, π and Kπ need not be kept,

    image = λρ + Kρ + (β/α₋)(ρ₋ − ρ)      ⟨p, (λI + AᵀA)p⟩ = ⟨Kρ, image⟩      ρ₊ = ρ − α·image

and `U = Σ cᵢρᵢ` is put together at the end, `cᵢ = αᵢ + βᵢ₊₁cᵢ₊₁`. That halves what a step reads and writes. A program
holds whole columns in registers, so there must be few samples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.kernels import halves, on_its_device
from proxprop.kernels.halves import power, store_parts, unscaled

NUMBERS = 8192
"""Numbers of one array that a program holds: 32 a thread with 8 warps."""

WARPS = 8


@triton.jit
def _hand_over(
    rho, side, RHO, PARTS_OF_RHO, UNSCALE, at_column, in_column, row, column, group, samples, padded, wide,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store a residual, and its parts for the next product."""
    tl.store(
        RHO + row[:, None] * wide + column[None, :], rho, mask=(row < samples)[:, None] & in_column[None, :]
    )
    rho *= side[:, None]
    size = power(tl.max(tl.abs(rho), axis=0))
    tl.store(UNSCALE + at_column, unscaled(size), mask=in_column)
    at = PARTS_OF_RHO + group * PARTS * padded * wide + row[:, None] * wide + column[None, :]
    inside = (row < padded)[:, None] & in_column[None, :]
    store_parts(rho, size, at, padded * wide, inside, PARTS)


@triton.jit
def _begin(
    G, DIAGONAL, RHO, PARTS_OF_RHO, UNSCALE, SCALE, samples, padded, outputs, wide,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    inside = (row < samples)[:, None] & (column < outputs)[None, :]
    rho = tl.load(
        G + group * samples * outputs + row[:, None] * outputs + column[None, :], mask=inside, other=0.0
    )
    scale = power(tl.max(tl.abs(rho), axis=0))
    tl.store(SCALE + group * wide + column, scale, mask=column < wide)
    side = power(tl.sqrt(tl.load(DIAGONAL + group * samples + row, mask=row < samples, other=1.0)))
    _hand_over(
        rho / scale[None, :], side, RHO + group * samples * wide, PARTS_OF_RHO, UNSCALE, group * wide + column,
        column < wide, row, column, group, samples, padded, wide, PARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["step"])
def _advance(
    RHO, K_RHO, DIAGONAL, PARTS_OF_RHO, UNSCALE, SCALE, SQUARED, LENGTH, RATIO, U,
    step, array, line, damping, samples, padded, outputs, wide,
    FIRST: tl.constexpr, LAST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    in_column = column < wide
    inside = (row < samples)[:, None] & in_column[None, :]
    at = row[:, None] * wide + column[None, :]
    at_column = group * wide + column
    step = step.to(tl.int64)
    RHO += group * samples * wide

    rho = tl.load(RHO + step * array + at, mask=inside, other=0.0)
    K_rho = tl.load(K_RHO + group * samples * wide + at, mask=inside, other=0.0)
    if not FIRST:
        previous = tl.load(RHO + (step - 1) * array + at, mask=inside, other=0.0)
    diagonal = tl.load(DIAGONAL + group * samples + row, mask=row < samples, other=0.0)
    side = power(tl.sqrt(diagonal))
    unscale = tl.load(UNSCALE + at_column, mask=in_column, other=0.0)
    K_rho = K_rho * unscale[None, :] * side[:, None]
    squared = tl.sum(rho * K_rho, axis=0)
    image = damping * rho + K_rho
    ratio = tl.zeros((COLUMNS,), tl.float32)
    if not FIRST:
        squared = tl.where(
            squared <= tl.sum(diagonal[:, None] * rho * rho, axis=0) * 1.1920929e-07, 0.0, squared
        )
        before = tl.load(SQUARED + at_column, mask=in_column, other=0.0)
        ratio = tl.where(before == 0, 0.0, squared / before)
        step_before = tl.load(LENGTH + (step - 1) * line + at_column, mask=in_column, other=1.0)
        image += tl.where(ratio == 0, 0.0, ratio / step_before)[None, :] * (previous - rho)
    curvature = tl.sum(K_rho * image, axis=0)
    length = tl.where(curvature == 0, 1.0 / damping, squared / curvature)
    # What is possible, by comparisons that let NaN through: rounding must not turn a step around or overshoot.
    length = tl.where(length > 1.0 / damping, 1.0 / damping, length)
    length = tl.where(length < 0, 0.0, length)
    if FIRST:
        shortest = 1.0 / (damping + tl.sum(diagonal, axis=0))
        length = tl.where(length < shortest, shortest, length)

    if LAST:
        share = length
        u = share[None, :] * rho
        for back in range(1, step + 1):
            share = (
                tl.load(LENGTH + (step - back) * line + at_column, mask=in_column, other=0.0) + ratio * share
            )
            ratio = tl.load(RATIO + (step - back) * line + at_column, mask=in_column, other=0.0)
            u += share[None, :] * tl.load(RHO + (step - back) * array + at, mask=inside, other=0.0)
        u *= tl.load(SCALE + at_column, mask=in_column, other=1.0)[None, :]
        inside = (row < samples)[:, None] & (column < outputs)[None, :]
        tl.store(U + group * samples * outputs + row[:, None] * outputs + column[None, :], u, mask=inside)
    else:
        tl.store(SQUARED + at_column, squared, mask=in_column)
        tl.store(LENGTH + step * line + at_column, length, mask=in_column)
        tl.store(RATIO + step * line + at_column, ratio, mask=in_column)
        _hand_over(
            rho - length[None, :] * image, side, RHO + (step + 1) * array, PARTS_OF_RHO, UNSCALE, at_column,
            in_column, row, column, group, samples, padded, wide, PARTS,
        )  # fmt: skip


@on_its_device
def sample_cg(K: Tensor, G: Tensor, damping: float, iterations: int, parts: int) -> Tensor:
    """`proxprop.solve.cg.sample_cg` for one step length an output, in the scale of G.

    Args:
        K: `[groups, samples, samples]`, contiguous float32.
        G: `[groups, samples, outputs]`, float32.
        damping: λ.
        iterations: how many steps; every residual is kept until the end.
        parts: 3 for products as accurate as float32's, 1 for products as accurate as TF32's.

    Returns:
        U `[groups, samples, outputs]`.
    """
    G = G.contiguous()
    groups, samples, outputs = G.shape
    padded, wide = halves.up(samples, halves.INNER), halves.up(outputs, halves.WIDE)
    rows = triton.next_power_of_2(padded)
    columns = max(1, NUMBERS // rows)
    programs = (triton.cdiv(wide, columns), groups)
    diagonal = K.diagonal(dim1=-2, dim2=-1).contiguous()
    parts_of_K = halves.split(K, diagonal, parts)
    parts_of_rho = K.new_empty(groups, parts * padded, wide, dtype=torch.float16)
    rho = K.new_empty(iterations, groups, samples, wide)
    length, ratio = (K.new_empty(iterations, groups, wide) for _ in range(2))
    squared, scale, unscale = (K.new_empty(groups, wide) for _ in range(3))
    U = torch.empty_like(G)
    _begin[programs](
        G, diagonal, rho, parts_of_rho, unscale, scale, samples, padded, outputs, wide,
        PARTS=parts, ROWS=rows, COLUMNS=columns, num_warps=WARPS,
    )  # fmt: skip
    for step in range(iterations):
        K_rho = halves.product(parts_of_K, parts_of_rho)
        _advance[programs](
            rho, K_rho, diagonal, parts_of_rho, unscale, scale, squared, length, ratio, U,
            step, rho[0].numel(), squared.numel(), damping, samples, padded, outputs, wide,
            FIRST=step == 0, LAST=step == iterations - 1,
            PARTS=parts, ROWS=rows, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip
    return U
