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

from proxprop.solvers.memory import is_transformed

ROUNDING = 10.0
"""Multiple of a product's rounding below which a residual is noise."""

SPOILT = 4.0
"""Multiple of the rounding of S that the curvature along every step has to exceed."""

HIDDEN = 0.1
"""Length, relative to the steps taken, of what may hide below the rounding of K before a column counts as lost."""


class Iterate(NamedTuple):
    """Where an iteration ended.

    Attributes:
        solution: in the shape of the right-hand side.
        lost: for each column whether rounding of W, if it was formed as a matrix, may have spoilt it.
    """

    solution: Tensor
    lost: Tensor


def conjugate_gradients(
    multiply: Callable[[Tensor], Tensor],
    B: Tensor,
    damping: Tensor,
    iterations: int,
    dims: tuple[int, ...],
    diagonal: Tensor | None = None,
    out: Tensor | None = None,
) -> Iterate:
    """Take up to `iterations` steps on `(λI + W) X = B` from `X = 0`.

    Args:
        multiply: the product `V -> WV`, freshly made.
        B: right-hand side.
        damping: λ, a tensor that broadcasts against B.
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
    """The arrays and the numbers of each column between two steps; arguments as for `conjugate_gradients`."""

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        B: Tensor,
        damping: Tensor,
        dims: tuple[int, ...],
        diagonal: Tensor | None,
        out: Tensor | None,
    ) -> None:
        self.multiply, self.damping, self.dims, self.diagonal = multiply, damping, dims, diagonal
        self.epsilon, self.longest = torch.finfo(B.dtype).eps, damping.reciprocal()
        self.spare = None if is_transformed(B) else torch.empty_like(B)
        self.first, self.scale = normalize(B, dims, self.spare)
        self.residual = self.search = self.first
        self.W_search = multiply(self.first)
        self.dual_first = self.first if diagonal is None else self.W_search
        self.squared = self.first_squared = self._inner(self.first, self.dual_first)
        if diagonal is not None:
            self.noise = self._rounding_of_K(diagonal)
            self.squared = self.squared.masked_fill(self.squared <= self.noise, 0.0)
        self.image, self.length = self._measure(None)
        if diagonal is not None:  # this step leads along the gradient, but its length may be rounding
            trace = diagonal.sum(dims, keepdim=True)
            self.length = self.length.maximum((trace + damping).reciprocal())
        self.solution = torch.mul(self.length, self.search, out=out)
        self.smallest = self.largest = self.first_length = self.length
        self.energy = self.length * self.squared
        self.steps = 1

    def advance(self) -> None:
        """Find the next search direction and take the step along it."""
        # The first step's arrays are needed to the end; from the third step on, the second's are written over.
        reused = self.spare is not None and self.steps > 1
        residual, search, W_search, image = (
            (self.residual, self.search, self.W_search, self.image) if reused else (None,) * 4
        )
        self.residual = torch.addcmul(self.residual, self.length, self.image, value=-1, out=residual)
        share = quotient(self._inner(self.residual, self.dual_first), self.first_squared, 0.0)
        self.residual.addcmul_(share, self.first, value=-1)
        dual = self.residual if self.diagonal is None else self.multiply(self.residual)
        ratio = self._compare(self._inner(self.residual, dual))
        self.search = torch.addcmul(self.residual, ratio, self.search, out=search)
        if self.diagonal is None:
            self.W_search = self.multiply(self.search)
        else:
            self.W_search = torch.addcmul(dual, ratio, self.W_search, out=W_search)
        self.image, self.length = self._measure(image)
        self.solution.addcmul_(self.length, self.search)
        self.smallest = torch.where(self.length > 0, self.smallest.minimum(self.length), self.smallest)
        self.largest = self.largest.maximum(self.length)
        self.energy = torch.addcmul(self.energy, self.length, self.squared)
        self.steps += 1

    def end(self) -> Iterate:
        """The solution, replaced by its first step where rounding turned it uphill."""
        if self.steps > 1:
            uphill = self._inner(self.solution, self.dual_first) < 0
            if self.spare is None or self.spare.is_cuda:  # nothing here can look at a number without waiting
                self.solution = torch.where(uphill, self.first_length * self.first, self.solution)
            elif uphill.any():
                self.solution.copy_(torch.where(uphill, self.first_length * self.first, self.solution))
        return Iterate(self.solution.mul_(self.scale), self._lost())

    def _compare(self, squared: Tensor) -> Tensor:
        """Stop the columns whose new residual is noise, for good; return the ratio to the one before."""
        floor = self.energy / self.smallest * (ROUNDING * self.epsilon) ** 2
        if self.diagonal is not None:
            self.noise = self._rounding_of_K(self.diagonal)
            floor = floor.maximum(self.noise)
        before = self.squared
        self.squared = squared.masked_fill_((squared <= floor) | (before == 0) | (self.length == 0), 0.0)
        return quotient(self.squared, before, 0.0)

    def _measure(self, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The image `λp + Wp` of the search direction, and the length of the step along it."""
        image = torch.addcmul(self.W_search, self.search, self.damping, out=out)
        curvature = self._inner(self.search if self.diagonal is None else self.W_search, image)
        length = quotient(self.squared, curvature, self.longest)
        return image, length.clamp_(min=0.0).minimum(self.longest)

    def _lost(self) -> Tensor:
        """Whether rounding of W may have spoilt a column.

        In feature space it has where a step was taken along a curvature below the rounding of S. In sample space
        `√noise/λ` bounds what rounding of K hides of D, and `‖D‖² ≥ ‖D‖²_M / ‖M‖`, energy times the smallest step.
        """
        if self.diagonal is None:
            return self.largest * (SPOILT * self.epsilon) > self.smallest
        hidden = self.noise * self.longest.square() > HIDDEN**2 * self.energy * self.smallest
        return hidden & (self.squared == 0)

    def _rounding_of_K(self, diagonal: Tensor) -> Tensor:
        """How much of ⟨ρ, Kρ⟩ may be rounding."""
        weighted = torch.mul(self.residual, diagonal, out=self.spare)
        return weighted.mul_(self.residual).sum(self.dims, keepdim=True).mul_(self.epsilon)

    def _inner(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mul(left, right, out=self.spare).sum(self.dims, keepdim=True)


def quotient(numerator: Tensor, denominator: Tensor, degenerate: Tensor | float) -> Tensor:
    """`numerator / denominator`, or `degenerate` where the denominator is exactly zero; NaN stays NaN.

    A zero denominator means a column with nothing left to solve, or an A so small that `AᵀA` underflows: there the
    step length `1/λ` is the exact solution. No epsilon is added, so the result does not depend on the scale of B.
    """
    return torch.where(denominator == 0, degenerate, numerator / denominator)


def normalize(B: Tensor, dims: tuple[int, ...], spare: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split B into columns of largest entry 1 and their scale, so that squares neither over- nor underflow."""
    scale = torch.abs(B, out=spare).amax(dims, keepdim=True)
    scale = scale.masked_fill_(scale == 0, 1.0)
    return B / scale, scale
