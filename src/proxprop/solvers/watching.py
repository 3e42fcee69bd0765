"""How rounding in float32 disturbs conjugate gradients, and how each column is protected from it.

The loop departs from the textbook where rounding would make it go wrong:

- A column stops once its residual is no more than rounding. A product rounds by about `ε√(‖W‖⟨p, Wp⟩)`, with W being
  K or S, so the steps taken so far bound the smallest residual that the recurrence can resolve.
- In sample space part of ρ can lie in the null space of K (more samples than features, equal rows). It does not reach
  D, but its rounding reaches ⟨ρ, Kρ⟩ and ends the iteration earlier, perhaps after a first step of the least possible
  length. `Watch.lost` says where that may cost too much.
- Each residual is orthogonalised against the first one once more. One eigenvalue that dominates, as the mean of
  activations makes it, would otherwise come back after two steps and take a step of its own again.
- A direction that rounding turned uphill is replaced by its first step, which goes along the gradient.

None of this changes a column whose residual is large enough. So a CPU, which can look at its numbers without waiting,
begins to watch at the first residual that is too small (`Calm`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 10
"""Multiple of a product's rounding below which a residual is noise."""

SPOILT = 4
"""Multiple of the rounding of S that the curvature along every step has to exceed."""

NEAR = 64
"""Multiple of the rounding of K below which a residual's square is too close to it to be trusted."""

HIDDEN = 30
"""Steps must be this many times as long as what rounding of K may hide; else a column counts as lost."""

HARMLESS = 1e-2
"""Largest harmless share of a residual along the first one, left there by rounding."""

FEW = 3
"""Most steps without orthogonalising; in more, even an eigenvalue that hardly dominates comes back."""

Inner = Callable[..., Tensor]
"""The inner product of each column of two arrays, perhaps with weights that broadcast against them."""


class Bounds(NamedTuple):
    """How large W is at most.

    Attributes:
        entry: bounds its diagonal.
        norm: bounds its eigenvalues.
    """

    entry: float
    norm: float


class Start(NamedTuple):
    """Where an iteration starts, and what tells rounding there.

    Attributes:
        residual: the first one; in sample space its coefficients.
        squared: its square.
        inner: inner product of arrays.
        damping: λ.
        epsilon: ε of a product.
        diagonal: in sample space K's diagonal.
    """

    residual: Tensor
    squared: Tensor
    inner: Inner
    damping: float | Tensor
    epsilon: float
    diagonal: Tensor | None


class Calm:
    """Tells whether every residual is so large that rounding can't matter.

    Three bounds need the first residual alone, and so one comparison a step:

    - In exact arithmetic steps use up no more than `⟨r₀, r₀⟩/λ` of energy, and none is shorter than `1/(λ + ‖W‖)`. So a
      column stops below `(ROUNDING·ε)²(1 + ‖W‖/λ)` of the first square at the latest.
    - The part of ρ in the null space of K never grows. The rest adds far more to ⟨ρ, Kρ⟩ than its rounding. So a
      residual above `2·NEAR` times the rounding of ⟨ρ₀, Kρ₀⟩ is not near its own rounding.
    - Without orthogonalising, an eigenvalue that dominates the first square by 1/s comes back by that factor in each
      step. Few steps are too few for it.

    Args:
        start: of the iteration; its λ is a number.
        bounds: how large W is.
    """

    def __init__(self, start: Start, bounds: Bounds) -> None:
        assert not isinstance(start.damping, Tensor)
        condition, sample = 1 + bounds.norm / start.damping, start.diagonal is not None
        self.squared, self.epsilon = start.squared, start.epsilon
        self.stop = 2 * (ROUNDING * self.epsilon) ** 2 * condition
        self.noise = 2 * NEAR * self.epsilon * bounds.entry
        self.norms = start.inner(start.residual, start.residual) if sample else None
        self.can_be = self.stop < 1 and (sample or SPOILT * self.epsilon * condition < 1)

    def holds(self, squared: Tensor, growing: int) -> bool:
        """Look at a residual.

        Args:
            squared: its square.
            growing: number of steps in which its part along the first one can grow; 0 if it is orthogonalised.
        """
        if not self.can_be:
            return False
        margin = squared
        if squared is not self.squared:
            harmless = (self.epsilon / HARMLESS) ** (1 / growing) if growing else 0.0
            margin = torch.sub(squared, self.squared, alpha=max(self.stop, harmless))
        if self.norms is not None:
            margin = torch.sub(margin, self.norms, alpha=self.noise)
        return float(margin.amin()) >= 0


class Watch:
    """Tells a column's residual from rounding, and acts on it.

    Args:
        start: of the iteration; where its square is noise it is set to zero.
    """

    def __init__(self, start: Start) -> None:
        self.inner, self.damping, self.epsilon = start.inner, start.damping, start.epsilon
        self.tiny = torch.finfo(start.residual.dtype).tiny
        self.rounding = None if start.diagonal is None else start.diagonal * self.epsilon
        self.near: Tensor | None = None
        self.spoilt: Tensor | None = None
        noise = self._noise(start.residual, start.squared)
        if noise is not None:
            self.spoilt = start.squared <= NEAR * noise  # such a column takes only its first step
            start.squared.masked_fill_(start.squared <= noise, 0.0)
        self.steps = 0

    def took(self, length: Tensor, squared: Tensor) -> None:
        """Remember a step and the square of the residual that it was taken for."""
        self.steps += 1
        if self.steps == 1:
            self.first_length = self.smallest = self.largest = length
            if self.spoilt is not None:
                self.smallest = length.masked_fill(self.spoilt, 0.0)
            self.energy = (length * squared).add_(self.tiny)  # so that over a zero it is infinite
            self.stuck = (squared > 0) & ~(length > 0)  # a length can be NaN
            return
        self.smallest = self.smallest.minimum(length)
        if self.rounding is None:
            self.largest = self.largest.maximum(length)
        self.energy = torch.addcmul(self.energy, length, squared)

    def stop(self, residual: Tensor, squared: Tensor) -> None:
        """Set a residual's square to zero where it is noise.

        A column that has stopped takes steps of length zero, so its floor is infinite from then on.
        """
        floor = (
            (self.energy / self.smallest).abs_().mul_((ROUNDING * self.epsilon) ** 2)
        )  # a length can be -0
        noise = self._noise(residual, squared)
        if noise is not None:
            floor = floor.maximum(noise)
        squared.masked_fill_(squared <= floor, 0.0)

    def lost(self) -> Tensor | None:
        """Whether rounding of W may have spoilt a column.

        In feature space it has where a step was taken along a curvature below the rounding of S. In sample space
        `√noise/λ` bounds what rounding of K hides of D, and `‖D‖² ≥ ‖D‖²_M / ‖M‖`, energy times the first step.
        """
        if self.near is not None:
            return self.near > self.energy * self.first_length * (self.damping / HIDDEN) ** 2
        return self.largest * (SPOILT * self.epsilon) > self.first_length if self.steps > 1 else None

    def _noise(self, residual: Tensor, squared: Tensor) -> Tensor | None:
        """How far rounding of K may change the residual's square, in sample space.

        The largest that a residual came near to is kept.
        """
        if self.rounding is None:
            return None
        noise = self.inner(residual, residual, self.rounding)
        near = noise.masked_fill(squared > NEAR * noise, 0.0)
        self.near = near if self.near is None else self.near.maximum(near)
        return noise
