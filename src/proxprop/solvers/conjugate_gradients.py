"""The one conjugate-gradient loop: given a product and an inner product, the same iterates in every space.

In feature space and matrix-free this is the textbook's iteration on `(λI + S) D = B`. In sample space it runs on
coefficients: residual `r = Aᵀρ`, search direction `p = Aᵀπ`, solution `D = AᵀU`. Every inner product of the textbook
becomes one with `K = AAᵀ`,

    ⟨r, r⟩ = ⟨ρ, Kρ⟩        ⟨p, (λI + AᵀA)p⟩ = ⟨Kπ, λπ + Kπ⟩

and Kπ follows π's own recurrence, so a step takes one product with K. Conjugate gradients on `(λI + K) U = G` in the
Euclidean inner product would be another method with other iterates.

The loop departs from the textbook where float32 makes it go wrong:

- A column stops once its residual is what rounding leaves of it. A product rounds by about `ε√(‖W‖⟨p, Wp⟩)`, W being
  K or S, so the steps taken so far bound what the recurrence can still tell.
- In sample space part of ρ can lie in the null space of K (more samples than features, equal rows). It does not reach
  D, but its rounding reaches ⟨ρ, Kρ⟩ and ends the iteration earlier, perhaps after a first step of the least possible
  length. `Iterate.lost` says where that may cost too much.
- Each residual is orthogonalised against the first one once more. One eigenvalue that dominates, as the mean of
  activations makes it, would otherwise come back after two steps and take a step of its own again.
- A direction that rounding turned uphill is replaced by its first step, which goes along the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from proxprop import device
from proxprop.solvers.memory import is_transformed

ROUNDING = 10
"""Multiple of a product's rounding below which a residual is noise."""

SPOILT = 4
"""Multiple of the rounding of S that the curvature along every step has to exceed."""

NEAR = 64
"""Multiple of the rounding of K below which a residual's square is too close to it to be trusted."""

HIDDEN = 30
"""Least length of the steps taken, relative to what may hide below the rounding of K; else a column counts as lost."""


class Iterate(NamedTuple):
    """Where an iteration ended.

    Attributes:
        solution: in the shape of the right-hand side.
        lost: for each column whether rounding of W, if it was formed as a matrix, may have spoilt it; None for none.
    """

    solution: Tensor
    lost: Tensor | None


def conjugate_gradients(
    multiply: Callable[[Tensor], Tensor],
    B: Tensor,
    damping: float | Tensor,
    iterations: int,
    dims: tuple[int, ...],
    diagonal: Tensor | None = None,
    out: Tensor | None = None,
) -> Iterate:
    """Take up to `iterations` steps on `(λI + W) X = B` from `X = 0`.

    Args:
        multiply: the product `V -> WV`, freshly made.
        B: right-hand side.
        damping: λ.
        iterations: how many steps.
        dims: the dimensions an inner product sums over; each index of the others is a column with its own steps.
        diagonal: in sample space K's diagonal, which broadcasts against B. None takes the Euclidean inner product.
        out: where to write the solution, of B's shape.
    """
    iteration = _Iteration(multiply, B, damping, dims, diagonal, out)
    for _ in range(1, iterations):
        iteration.advance()
    return iteration.end()


class _Iteration:
    """The arrays and the numbers of each column between two steps; arguments as for `conjugate_gradients`.

    For a small layer the calls of torch cost more than the arithmetic, so this takes few of them.
    """

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        B: Tensor,
        damping: float | Tensor,
        dims: tuple[int, ...],
        diagonal: Tensor | None,
        out: Tensor | None,
    ) -> None:
        self.multiply, self.damping, self.dims = multiply, damping, dims
        self.epsilon, self.tiny = device.product_rounding(B), torch.finfo(B.dtype).tiny
        self.spare = None if is_transformed(B) else torch.empty_like(B)
        self.can_look = self.spare is not None and B.device.type == "cpu"
        self.first, self.scale = normalize(B, dims, self.spare)
        self.residual = self.search = self.first
        self.W_search = multiply(self.first)
        self.rounding = None if diagonal is None else diagonal * self.epsilon
        self.dual_first = self.first if diagonal is None else self.W_search
        self.squared = self._inner(self.first, self.dual_first)
        self.near: Tensor | None = None
        noise = self._noise(self.squared)
        if noise is not None:
            spoilt = self.squared <= NEAR * noise  # its first step is all that it takes
            self.squared.masked_fill_(self.squared <= noise, 0.0)
        self.over_first = self.squared.reciprocal().nan_to_num_(torch.nan, 0.0)
        self.image, self.length = self._measure(None)
        self.smallest = self.length
        if diagonal is not None:  # this step leads along the gradient, but its length may be rounding
            self.length = self.length.maximum(1 / (diagonal.sum(dims, keepdim=True) + damping))
            self.smallest = self.length.masked_fill(spoilt, 0.0)
        self.solution = torch.mul(self.length, self.search, out=out)
        self.largest = self.first_length = self.length
        self.energy = (self.length * self.squared).add_(self.tiny)  # so that over a zero it is infinite
        self.steps = 1

    def advance(self) -> None:
        """Find the next search direction and take the step along it."""
        # The first step's arrays are needed to the end; from the third step on, the second's are written over.
        reused = self.spare is not None and self.steps > 1
        residual, search, W_search, image = (
            (self.residual, self.search, self.W_search, self.image) if reused else (None,) * 4
        )
        self.residual = torch.addcmul(self.residual, self.length, self.image, value=-1, out=residual)
        share = self._inner(self.residual, self.dual_first).mul_(self.over_first)
        self.residual.addcmul_(share, self.first, value=-1)
        dual = self.residual if self.rounding is None else self.multiply(self.residual)
        ratio = self._compare(self._inner(self.residual, dual))
        self.search = torch.addcmul(self.residual, ratio, self.search, out=search)
        if self.rounding is None:
            self.W_search = self.multiply(self.search)
        else:
            self.W_search = torch.addcmul(dual, ratio, self.W_search, out=W_search)
        self.image, self.length = self._measure(image)
        self.solution.addcmul_(self.length, self.search)
        self.smallest = self.smallest.minimum(self.length)
        if self.rounding is None:
            self.largest = self.largest.maximum(self.length)
        self.energy = torch.addcmul(self.energy, self.length, self.squared)
        self.steps += 1

    def end(self) -> Iterate:
        """The solution, replaced by its first step where rounding turned it uphill."""
        if self.steps > 1:
            uphill = self._inner(self.solution, self.dual_first) < 0
            if not self.can_look or uphill.any():
                self.solution.copy_(torch.where(uphill, self.first_length * self.first, self.solution))
        return Iterate(self.solution.mul_(self.scale), self._lost())

    def _compare(self, squared: Tensor) -> Tensor:
        """Stop the columns whose new residual is noise, and return the ratio to the one before.

        A column that has stopped takes steps of length zero, so its floor is infinite from then on.
        """
        floor = (
            (self.energy / self.smallest).abs_().mul_((ROUNDING * self.epsilon) ** 2)
        )  # a length can be -0
        noise = self._noise(squared)
        if noise is not None:
            floor = floor.maximum(noise)
        before = self.squared.add_(self.tiny)  # where it is zero, so is what is divided by it
        self.squared = squared.masked_fill_(squared <= floor, 0.0)
        return self.squared / before

    def _measure(self, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The image `λp + Wp` of the search direction, and the length of the step along it.

        The curvature is zero where a column has nothing left to solve. Where rounding makes it negative, no step is
        taken; none is longer than `1/λ`.
        """
        if isinstance(self.damping, Tensor):
            image = torch.addcmul(self.W_search, self.search, self.damping, out=out)
        else:
            image = torch.add(self.W_search, self.search, alpha=self.damping, out=out)
        curvature = self._inner(self.search if self.rounding is None else self.W_search, image)
        length = self.squared / curvature.add_(self.tiny)
        return image, length.clamp_(0 * self.damping, 1 / self.damping)  # type: ignore[arg-type]

    def _lost(self) -> Tensor | None:
        """Whether rounding of W may have spoilt a column.

        In feature space it has where a step was taken along a curvature below the rounding of S. In sample space
        `√noise/λ` bounds what rounding of K hides of D, and `‖D‖² ≥ ‖D‖²_M / ‖M‖`, energy times the first step.
        """
        if self.near is not None:
            lost = self.near > self.energy * self.first_length * (self.damping / HIDDEN) ** 2
        elif self.steps > 1:
            lost = self.largest * (SPOILT * self.epsilon) > self.first_length
        else:
            return None
        return None if self.can_look and not lost.any() else lost

    def _inner(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mul(left, right, out=self.spare).sum(self.dims, keepdim=True)

    def _noise(self, squared: Tensor) -> Tensor | None:
        """What rounding of K makes of the residual's square, in sample space.

        The largest that a residual came near to is kept.
        """
        if self.rounding is None:
            return None
        weighted = torch.mul(self.residual, self.rounding, out=self.spare)
        noise = weighted.mul_(self.residual).sum(self.dims, keepdim=True)
        near = noise.masked_fill(squared > NEAR * noise, 0.0)
        self.near = near if self.near is None else self.near.maximum(near)
        return noise


def normalize(B: Tensor, dims: tuple[int, ...], spare: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split B into columns of largest entry 1 and their scale, so that squares neither over- nor underflow."""
    scale = torch.abs(B, out=spare).amax(dims, keepdim=True).clamp_(min=torch.finfo(B.dtype).tiny)
    return B / scale, scale
