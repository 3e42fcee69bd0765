"""Sample-space conjugate gradients on a GPU: a product on tensor cores and one kernel a step.

The iterates are those of `proxprop.solvers.conjugate_gradients`, the plain twin, by three-term recurrences. `λπ + Kπ`
is the difference of two residuals over a step length, so π and Kπ need not be kept,

    image = λρ + Kρ + (β/α₋)(ρ₋ − ρ)      ⟨p, (λI + AᵀA)p⟩ = ⟨Kρ, image⟩      ρ₊ = ρ − α·image

and `U = Σ cᵢρᵢ` is put together at the end, with `cᵢ = αᵢ + βᵢ₊₁cᵢ₊₁`. This halves what a step reads and writes. Where
the caller allows TF32, U is rounded to eleven bits in the next product anyway. The float16 terms of the residuals have
as many bits, so U is put together from them.

Three-term recurrences lose the conjugacy of directions sooner than two-term ones. Therefore β is taken from
⟨r, r − r₋⟩, which keeps directions conjugate from step to step, no curvature counts for less than λ⟨p, p⟩, and a column
stops where it counts as lost.

Outputs are rows here, so that memory is read and written in long lines. The few threads that sum over an output hold it
in registers, so there must be few samples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.device import round_up
from proxprop.kernels import split_fp16
from proxprop.kernels.launch import launches, on_its_device
from proxprop.kernels.rotation import rotated
from proxprop.kernels.split_fp16 import M_SCALE, power, side_of, store_terms, unscaled
from proxprop.kernels.stopping import (
    epsilon,
    flags,
    floor_of,
    hidden,
    share_of,
    smaller,
    step_length,
    still_going,
)


@triton.jit
def _hand_over(rho, side, RHO, TERMS_OF_RHO, UNSCALE, output, sample, padded, outputs, TERMS: tl.constexpr):
    """Store the residuals of some outputs, and their terms for the next product."""
    there = output < outputs
    inside = there[:, None] & (sample < padded)[None, :]
    tl.store(RHO + output[:, None] * padded + sample[None, :], rho, mask=inside)
    rho *= side[None, :]
    size = power(tl.max(tl.abs(rho), axis=1))
    tl.store(UNSCALE + output, unscaled(size), mask=there)
    at = TERMS_OF_RHO + output[:, None] * TERMS * padded + sample[None, :]
    store_terms(rho / size[:, None], at, padded, inside, TERMS)


@triton.jit
def _slot(step, TERMS: tl.constexpr):
    """The place of a step's residual: where the terms of all residuals are kept, only the last two residuals are."""
    return step % 2 if TERMS == 1 else step


@triton.jit
def _begin(
    G, DIAGONAL, RHO, TERMS_OF_RHO, UNSCALE, SCALE, UNIT, LOST, stride, damping, root, samples, padded, outputs,
    ROTATE: tl.constexpr, TERMS: tl.constexpr, SAMPLES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Transpose and scale G: each output is its first residual."""
    group = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    sample = tl.arange(0, SAMPLES)
    inside = (sample < samples)[:, None] & (output < outputs)[None, :]
    at = (group * samples + sample[:, None]) * stride + output[None, :]
    rho = tl.load(G + at, mask=inside, other=0.0)
    if ROTATE:
        rho = tl.where(inside, rotated(rho, sample, samples, root), 0.0)
    rho = tl.trans(rho)
    scale = power(tl.max(tl.abs(rho), axis=1))
    tl.store(SCALE + group * outputs + output, scale, mask=output < outputs)
    diagonal = tl.load(DIAGONAL + group * samples + sample, mask=sample < samples, other=1.0)
    side = side_of(diagonal)
    # In this unit of K, squares can't overflow. Every program of a group stores the same unit.
    largest = tl.max(tl.where(sample < samples, diagonal, damping), axis=0)
    tl.store(UNIT + group, power(tl.maximum(largest, damping)))
    tl.store(LOST + group, largest == float("inf"))  # K overflowed
    _hand_over(
        rho / scale[:, None], side, RHO + group * outputs * padded, TERMS_OF_RHO + group * outputs * TERMS * padded,
        UNSCALE + group * outputs, output, sample, padded, outputs, TERMS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["step"])
def _advance(
    RHO, K_RHO, DIAGONAL, TERMS_OF_RHO, UNSCALE, SCALE, SQUARED, SEARCH, LENGTH, RATIO, ENERGY, SMALLEST, LOST, UNIT,
    step, array, line, damping, epsilon, samples, padded, outputs,
    FIRST: tl.constexpr, LAST: tl.constexpr, TERMS: tl.constexpr, SAMPLES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Take a step for some outputs; the last one puts U together, in the place of Kρ."""
    group = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    sample = tl.arange(0, SAMPLES)
    there = output < outputs
    inside = there[:, None] & (sample < padded)[None, :]
    at = output[:, None] * padded + sample[None, :]
    at_output = group * outputs + output
    step = step.to(tl.int64)
    RHO += group * outputs * padded
    K_RHO += group * outputs * padded
    TERMS_OF_RHO += group * outputs * TERMS * padded

    rho = tl.load(RHO + _slot(step, TERMS) * array + at, mask=inside, other=0.0)
    K_rho = tl.load(K_RHO + at, mask=inside, other=0.0)
    if not FIRST:
        previous = tl.load(RHO + _slot(step - 1, TERMS) * array + at, mask=inside, other=0.0)
    diagonal = tl.load(DIAGONAL + group * samples + sample, mask=sample < samples, other=0.0)
    side = side_of(diagonal)
    unscale = tl.load(UNSCALE + step * line + at_output, mask=there, other=0.0)
    unit = tl.load(UNIT + group)
    K_rho = K_rho * unscale[:, None] * (side / unit)[None, :]
    diagonal, damping = diagonal / unit, damping / unit
    squared = tl.sum(rho * K_rho, axis=1)
    noise = tl.sum(diagonal[None, :] * rho * rho, axis=1) * epsilon
    image = damping * rho + K_rho
    ratio = tl.zeros((OUTPUTS,), tl.float32)
    if FIRST:
        squared = tl.where(squared <= noise, 0.0, squared)
    else:
        energy = tl.load(ENERGY + at_output, mask=there, other=0.0)
        smallest = tl.load(SMALLEST + at_output, mask=there, other=1.0)
        before = tl.load(SQUARED + at_output, mask=there, other=0.0)
        step_before = tl.load(LENGTH + (step - 1) * line + at_output, mask=there, other=1.0)
        floor = floor_of(energy, smallest, epsilon)
        lost = hidden(noise, squared, energy, smallest, damping) & there
        squared = still_going(squared, tl.where(noise > floor, noise, floor), before, step_before)
        squared = tl.where(lost, 0.0, squared)
        ratio = squared - tl.sum(previous * K_rho, axis=1)
        ratio = tl.where((before == 0) | (squared == 0), 0.0, ratio / before)
        image += tl.where(ratio == 0, 0.0, ratio / step_before)[:, None] * (previous - rho)
    search = squared  # ⟨p, p⟩
    if not FIRST:
        search += ratio * ratio * tl.load(SEARCH + at_output, mask=there, other=0.0)
    # ⟨r, (λI + S)p⟩ is p's curvature as far as directions are conjugate. A curvature is at least λ⟨p, p⟩.
    curvature, least = tl.sum(K_rho * image, axis=1), damping * search
    length = step_length(squared, tl.where(curvature < least, least, curvature), damping)
    if FIRST:
        shortest = 1.0 / (damping + tl.sum(diagonal, axis=0))
        length = tl.where(length < shortest, shortest, length)
        energy, smallest = length * squared, length
    else:
        energy, smallest = energy + length * squared, smaller(smallest, length)

    if LAST:
        share = length
        u = share[:, None] * rho
        for back in range(1, step + 1):
            earlier = step - back
            share = tl.load(LENGTH + earlier * line + at_output, mask=there, other=0.0) + ratio * share
            ratio = tl.load(RATIO + earlier * line + at_output, mask=there, other=0.0)
            if TERMS == 1:
                unscale = tl.load(UNSCALE + earlier * line + at_output, mask=there, other=0.0)
                rho = tl.load(TERMS_OF_RHO + earlier * array + at, mask=inside, other=0.0).to(tl.float32)
                u += (share * unscale * M_SCALE)[:, None] * (rho / side[None, :])
            else:
                u += share[:, None] * tl.load(RHO + earlier * array + at, mask=inside, other=0.0)
        u *= (tl.load(SCALE + at_output, mask=there, other=1.0) / unit)[:, None]
        lost = hidden(noise, squared, energy, smallest, damping) & there
        if tl.max(lost.to(tl.int32), axis=0) > 0:
            tl.store(LOST + group, 1)
        tl.store(K_RHO + at, u, mask=inside)  # the sums have read Kρ
    else:
        tl.store(SQUARED + at_output, squared, mask=there)
        tl.store(SEARCH + at_output, search, mask=there)
        tl.store(ENERGY + at_output, energy, mask=there)
        tl.store(SMALLEST + at_output, smallest, mask=there)
        tl.store(LENGTH + step * line + at_output, length, mask=there)
        tl.store(RATIO + step * line + at_output, ratio, mask=there)
        if TERMS == 1:
            TERMS_OF_RHO += (step + 1) * array
        after = rho - length[:, None] * image
        if FIRST:
            after -= share_of(tl.sum(after * K_rho, axis=1), squared)[:, None] * rho
        _hand_over(
            after, side, RHO + _slot(step + 1, TERMS) * array, TERMS_OF_RHO,
            UNSCALE + (step + 1) * line + group * outputs, output, sample, padded, outputs, TERMS,
        )  # fmt: skip


@on_its_device
def sample_cg(
    K: Tensor, G: Tensor, damping: float, iterations: int, terms: int, rotate: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Conjugate gradients in sample space, with a step length for each output.

    Args:
        K: `[groups, samples, samples]`, contiguous float32.
        G: `[groups, samples, outputs]`, float32.
        damping: λ.
        iterations: number of steps; all residuals, or their terms, are kept until the end.
        terms: 3 for products as accurate as float32's, 1 for products as accurate as TF32's.
        rotate: whether to rotate G first, as K is.

    Returns:
        U `[groups, samples, outputs]`, stored with outputs as rows, and for each group whether rounding of K may hide
        too much of it; see `flags`.
    """
    damping = float(damping)  # Triton specialises on integers; a float compiles once
    G = G.contiguous()
    groups, samples, outputs = G.shape
    padded = round_up(samples, tuning.FP16_INNER_UNIT)
    terms_of_K, diagonal = split_fp16.split(K, padded, terms)
    kept, residuals = _arrays(iterations, terms)
    blocks = triton.cdiv(
        groups * outputs * padded * (2 * terms * kept + 4 * residuals), tuning.SAMPLE_CG_MOST_BYTES
    )
    found = [
        _solve(terms_of_K, diagonal, some, damping, iterations, terms, rotate)
        for some in G.split(triton.cdiv(outputs, blocks), dim=-1)
    ]
    U = found[0][0] if len(found) == 1 else torch.cat([U for U, _ in found], dim=1)
    return U[..., :samples].mT, flags([lost for _, lost in found], terms)


def _arrays(iterations: int, terms: int) -> tuple[int, int]:
    """The number of residuals whose terms are kept, and the number of residuals kept."""
    return (iterations, 2) if terms == 1 else (1, iterations)


def _solve(
    terms_of_K: Tensor,
    diagonal: Tensor,
    G: Tensor,
    damping: float,
    iterations: int,
    terms: int,
    rotate: bool,
) -> tuple[Tensor, Tensor]:
    """`sample_cg` for a block of outputs; U has outputs as rows, padded."""
    groups, samples, outputs = G.shape
    padded = terms_of_K.shape[1]
    length = triton.next_power_of_2(padded)
    kept, residuals = _arrays(iterations, terms)
    terms_of_rho = G.new_empty(kept, groups, outputs, terms * padded, dtype=torch.float16)
    rho = G.new_empty(residuals, groups, outputs, padded)
    lengths, ratio, unscale = (G.new_empty(iterations, groups, outputs) for _ in range(3))
    squared, search, scale, energy, smallest = G.new_empty(5, groups, outputs).unbind()
    unit, lost = G.new_empty(groups), torch.empty(groups, dtype=torch.bool, device=G.device)
    transposed = max(1, tuning.SAMPLE_CG_TRANSPOSED_NUMBERS // length)
    rows = max(1, tuning.SAMPLE_CG_NUMBERS // length)
    launch = launches("sample_cg", [G], iterations, terms, rotate)
    launch(
        _begin, (triton.cdiv(outputs, transposed), groups),
        G, diagonal, rho, terms_of_rho, unscale, scale, unit, lost, G.stride(1), damping, samples**0.5, samples, padded,
        outputs, ROTATE=rotate, TERMS=terms, SAMPLES=length, OUTPUTS=transposed, num_warps=8,
    )  # fmt: skip
    for step in range(iterations):
        K_rho = split_fp16.product(terms_of_rho[step % kept], terms_of_K.mT)
        launch(
            _advance, (triton.cdiv(outputs, rows), groups),
            rho, K_rho, diagonal, terms_of_rho, unscale, scale, squared, search, lengths, ratio, energy, smallest,
            lost, unit,
            step, rho[0].numel(), squared.numel(), damping, epsilon(terms), samples, padded, outputs,
            FIRST=step == 0, LAST=step == iterations - 1,
            TERMS=terms, SAMPLES=length, OUTPUTS=rows, num_warps=4,
        )  # fmt: skip
    return K_rho, lost  # the last step has put U in its place
