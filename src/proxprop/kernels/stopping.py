"""When the conjugate-gradient kernels stop a column: the rules of `proxprop.solvers.watching`.

A residual is noise below `ROUNDING·ε` times the size that the steps so far give it, `√(energy/smallest step)`. A column
whose square is zero has stopped. Comparisons are written so that NaN passes through.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.device import TF32_ROUNDING
from proxprop.solvers.watching import HIDDEN, NEAR, ROUNDING, SPOILT

_ROUNDING, _SPOILT = tl.constexpr(ROUNDING), tl.constexpr(SPOILT)
_HIDDEN, _NEAR = tl.constexpr(HIDDEN), tl.constexpr(NEAR)


def epsilon(terms: int) -> float:
    """ε of a product in so many float16 terms: float32's for 3, TF32's for 1."""
    return torch.finfo(torch.float32).eps if terms == 3 else TF32_ROUNDING


def flags(found: Sequence[Tensor], terms: int) -> Tensor | None:
    """Whether a block of a group's outputs was flagged, for each group; None where the caller allows TF32."""
    if terms == 1:
        return None
    return found[0] if len(found) == 1 else torch.stack(list(found)).any(0)


@triton.jit
def step_length(squared, curvature, damping):
    """`squared / curvature`, between 0 and 1/λ: rounding must neither reverse a step nor lengthen it beyond reason."""
    length = tl.where(curvature == 0, 1.0 / damping, squared / curvature)
    length = tl.where(length > 1.0 / damping, 1.0 / damping, length)
    return tl.where(length < 0, 0.0, length)


@triton.jit
def share_of(overlap, squared):
    """The share of the first residual to subtract from the second; rounding of the step length leaves it there."""
    return tl.where(squared == 0, 0.0, overlap / squared)


@triton.jit
def still_going(squared, floor, before, length):
    """The new residual's square; zero where the residual is noise or the column has stopped."""
    return tl.where((squared <= floor) | (before == 0) | (length == 0), 0.0, squared)


@triton.jit
def floor_of(energy, smallest, epsilon):
    """The square below which a residual is noise."""
    return energy / smallest * (_ROUNDING * epsilon) * (_ROUNDING * epsilon)


@triton.jit
def smaller(smallest, length):
    """The smallest step so far; steps of length zero do not count."""
    return tl.where((length > 0) & (length < smallest), length, smallest)


@triton.jit
def spoilt(largest, smallest, epsilon):
    """Whether a step was taken along a curvature below the rounding of S."""
    return largest * (_SPOILT * epsilon) > smallest


@triton.jit
def stuck(length, squared):
    """Whether there is a residual but no first step, as where a product overflowed; the length can be NaN."""
    return (squared > 0) & ((length > 0) == 0)


@triton.jit
def hidden(noise, squared, energy, smallest, damping):
    """Whether the rounding of K may hide too much of a column whose residual is close to that rounding."""
    # Triton 3.7's interpreter multiplies a tensor by a constant, but not a constant by a tensor.
    return (noise * (_HIDDEN * _HIDDEN) / (damping * damping) > energy * smallest) & (
        squared <= noise * _NEAR
    )
