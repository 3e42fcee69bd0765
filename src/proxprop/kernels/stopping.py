"""When the conjugate-gradient kernels end a column's iteration: the rules of `proxprop.solvers.conjugate_gradients`.

A residual is noise below `ROUNDING·ε` of what the steps so far make of it, `√(energy/smallest step)`. A column whose
square is zero has stopped. Comparisons are written so that NaN is let through.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop.solvers.conjugate_gradients import HIDDEN, NEAR, ROUNDING, SPOILT

_ROUNDING, _SPOILT = tl.constexpr(ROUNDING), tl.constexpr(SPOILT)
_HIDDEN, _NEAR = tl.constexpr(HIDDEN), tl.constexpr(NEAR)


def epsilon(terms: int) -> float:
    """The rounding of a product of so many float16 terms."""
    return 2.0**-23 if terms == 3 else 2.0**-11


def flags(found: Sequence[Tensor], terms: int) -> Tensor | None:
    """For each group whether a block of its outputs was flagged; None where the caller allows TF32's few digits."""
    if terms == 1:
        return None
    return found[0] if len(found) == 1 else torch.stack(list(found)).any(0)


@triton.jit
def step_length(squared, curvature, damping):
    """`squared / curvature`, held to what is possible: rounding must neither turn a step around nor overshoot."""
    length = tl.where(curvature == 0, 1.0 / damping, squared / curvature)
    length = tl.where(length > 1.0 / damping, 1.0 / damping, length)
    return tl.where(length < 0, 0.0, length)


@triton.jit
def share_of(overlap, squared):
    """What to take of the first residual off the second: rounding of the step's length leaves some of it."""
    return tl.where(squared == 0, 0.0, overlap / squared)


@triton.jit
def still_going(squared, floor, before, length):
    """The new residual's square; zero where it is noise, or where the column had stopped before."""
    return tl.where((squared <= floor) | (before == 0) | (length == 0), 0.0, squared)


@triton.jit
def floor_of(energy, smallest, epsilon):
    """The square below which a residual is noise."""
    return energy / smallest * (_ROUNDING * epsilon) * (_ROUNDING * epsilon)


@triton.jit
def smaller(smallest, length):
    """The smallest step so far; one that was not taken does not count."""
    return tl.where((length > 0) & (length < smallest), length, smallest)


@triton.jit
def spoilt(largest, smallest, epsilon):
    """Whether a step was taken along a curvature below the rounding of S."""
    return largest * (_SPOILT * epsilon) > smallest


@triton.jit
def hidden(noise, squared, energy, smallest, damping):
    """Whether more may hide below the rounding of K than a column close to it can do without."""
    return (_HIDDEN * _HIDDEN * noise / (damping * damping) > energy * smallest) & (squared <= _NEAR * noise)
