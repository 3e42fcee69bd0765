"""The one conjugate-gradient loop: given a product and an inner product, the same iterates in every space.

In feature space and matrix-free this is the textbook's iteration on `(λI + S) D = B`. In sample space it runs on
coefficients: residual `r = Aᵀρ`, search direction `p = Aᵀπ`, solution `D = AᵀU`. Every inner product of the textbook
becomes one with `K = AAᵀ`,

    ⟨r, r⟩ = ⟨ρ, Kρ⟩        ⟨p, (λI + AᵀA)p⟩ = ⟨Kπ, λπ + Kπ⟩

and Kπ follows π's own recurrence, so a step takes one product with K. Conjugate gradients on `(λI + K) U = G` in the
Euclidean inner product would be another method with other iterates.

`watching.py` says where and how the loop departs from the textbook because of rounding.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from proxprop import device
from proxprop.solvers.watching import FEW, Bounds, Calm, Start, Watch


class Iterate(NamedTuple):
    """Where an iteration ended.

    Attributes:
        solution: in the shape of the right-hand side.
        lost: for each column whether rounding of W, if it was formed as a matrix, may have spoilt it; None for none.
        stuck: for each column whether it took no step, or its first alone, because a product overflowed or rounding
            turned the others uphill; None for none.
    """

    solution: Tensor
    lost: Tensor | None = None
    stuck: Tensor | None = None


class ConjugateGradients:
    """Up to `iterations` steps on `(λI + W) X = B` from `X = 0`.

    For a small layer the calls of torch cost more than the arithmetic, so this takes few of them.

    Args:
        multiply: the product `V -> WV`, freshly made.
        B: right-hand side.
        damping: λ.
        iterations: how many steps.
        dims: the dimensions an inner product sums over; each index of the others is a column with its own steps.
        diagonal: in sample space K's diagonal, which broadcasts against B. None takes the Euclidean inner product.
        out: where to write the solution, of B's shape.
        bounds: how large W is, where a CPU knows, to watch for rounding only where it can matter. None in a transform.
    """

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        B: Tensor,
        damping: float | Tensor,
        iterations: int,
        dims: tuple[int, ...],
        diagonal: Tensor | None = None,
        out: Tensor | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        if not isinstance(damping, Tensor):
            damping = max(damping, torch.finfo(B.dtype).tiny)  # so that 1/λ is finite
        self.multiply, self.damping, self.iterations, self.diagonal = multiply, damping, iterations, diagonal
        self.spare = torch.empty_like(B) if bounds is not None or not device.is_transformed(B) else None
        self.can_look = self.spare is not None and B.device.type == "cpu"
        # A bound method would make a reference cycle with `Watch`, which keeps all arrays until garbage is collected.
        self._inner = partial(inner_product, dims, self.spare)
        self.first, self.scale = normalize(B, dims, self.spare)
        self.residual = self.search = self.first
        self.W_search = multiply(self.first)
        self.dual_first = self.first if diagonal is None else self.W_search
        self.squared = self._inner(self.first, self.dual_first)
        epsilon = device.product_rounding(B)
        self.start = Start(self.first, self.squared, self._inner, damping, epsilon, diagonal)
        calm = Calm(self.start, bounds) if bounds is not None else None
        self.calm = calm if calm is not None and calm.holds(self.squared, 0) else None
        self.watch = Watch(self.start) if self.calm is None else None
        orthogonalizes = iterations > (FEW if self.calm is not None else 1)
        self.over_first = self._over_first() if orthogonalizes else None
        self.image, self.length = self._measure(None)
        if diagonal is not None and self.watch is not None:
            # this step leads along the gradient, but its length may be rounding
            self.length = self.length.maximum(1 / (diagonal.sum(dims, keepdim=True) + damping))
        self.solution = torch.mul(self.length, self.search, out=out)
        self.steps: list[tuple[Tensor, Tensor]] = []
        self._count()

    def solve(self) -> Iterate:
        """Take all steps."""
        for _ in range(1, self.iterations):
            self._advance()
        return self._end()

    def _advance(self) -> None:
        """Find the next search direction and take the step along it."""
        # The first residual is needed to the end. All else is written over, unless a transform keeps track of it.
        residual, search = (
            (self.residual, self.search) if self.spare is not None and self.steps[1:] else (None, None)
        )
        self.residual = torch.addcmul(self.residual, self.length, self.image, value=-1, out=residual)
        if self.over_first is not None:
            self._orthogonalize(self.over_first)
        dual = self.residual if self.diagonal is None else self.multiply(self.residual)
        ratio = self._compare(dual)
        self.search = torch.addcmul(self.residual, ratio, self.search, out=search)
        if self.diagonal is None:
            self.W_search = self.multiply(self.search)
        else:
            self.W_search = torch.addcmul(
                dual, ratio, self.W_search, out=dual if self.spare is not None else None
            )
        self.image, self.length = self._measure(self.image if self.spare is not None else None)
        self.solution.addcmul_(self.length, self.search)
        self._count()

    def _end(self) -> Iterate:
        """The solution, replaced by its first step where rounding turned it uphill or made it overflow."""
        if self.watch is None:
            return Iterate(self.solution.mul_(self.scale))
        lost, stuck = self.watch.lost(), self.watch.stuck
        if len(self.steps) > 1:
            slope, (length, squared) = self._inner(self.solution, self.dual_first), self.steps[0]
            uphill = (slope < 0) | (slope.isnan() & squared.isfinite())
            if not self.can_look or uphill.any():
                self.solution.copy_(torch.where(uphill, length * self.first, self.solution))
                lost, stuck = uphill if lost is None else lost | uphill, stuck | uphill
        if self.can_look and lost is not None and not lost.any():
            lost = None
        return Iterate(self.solution.mul_(self.scale), lost, stuck)

    def _over_first(self) -> Tensor:
        """Factor for inner products with the first residual, to orthogonalise."""
        return self.start.squared.reciprocal().nan_to_num_(torch.nan, 0.0)

    def _orthogonalize(self, over_first: Tensor, dual: Tensor | None = None) -> None:
        """Make the residual, and its product with K if there is one, orthogonal to the first."""
        share = self._inner(self.residual, self.dual_first).mul_(over_first)
        self.residual.addcmul_(share, self.first, value=-1)
        if dual is not None and dual is not self.residual:
            dual.addcmul_(share, self.dual_first, value=-1)

    def _count(self) -> None:
        """Keep the length of the last step and the square that it was taken for."""
        self.steps.append((self.length, self.squared))
        if self.watch is not None:
            self.watch.took(*self.steps[-1])

    def _compare(self, dual: Tensor) -> Tensor:
        """The ratio of the new residual's square to the one before, which is zero where a column has stopped."""
        before, squared = self.squared, self._inner(self.residual, dual)
        if self.watch is None and not self._is_calm(squared):
            squared = self._begin_to_watch(dual, squared)
        if self.watch is not None:
            self.watch.stop(self.residual, squared)
        self.squared = squared
        return self._quotient(squared, before)

    def _is_calm(self, squared: Tensor) -> bool:
        """Whether to go on without watching."""
        assert self.calm is not None
        growing = self.iterations - len(self.steps) if self.over_first is None else 0
        return self.calm.holds(squared, growing)

    def _begin_to_watch(self, dual: Tensor, squared: Tensor) -> Tensor:
        """Catch up on all steps so far, and return the square of the residual, now orthogonal to the first one."""
        self.watch = Watch(self.start)
        for step in self.steps:
            self.watch.took(*step)
        if self.over_first is not None:
            return squared
        self.over_first = self._over_first()
        self._orthogonalize(self.over_first, dual)
        return self._inner(self.residual, dual)

    def _measure(self, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The image `λp + Wp` of the search direction, and the length of the step along it.

        The curvature is zero where a column has nothing left to solve. Where rounding makes it negative, no step is
        taken; none is longer than `1/λ`. In a calm iteration neither can happen.
        """
        if isinstance(self.damping, Tensor):
            image = torch.addcmul(self.W_search, self.search, self.damping, out=out)
        else:
            image = torch.add(self.W_search, self.search, alpha=self.damping, out=out)
        curvature = self._inner(self.search if self.diagonal is None else self.W_search, image)
        length = self._quotient(self.squared, curvature)
        if self.watch is not None:
            length.clamp_(0 * self.damping, 1 / self.damping)  # type: ignore[arg-type]
        return image, length

    def _quotient(self, above: Tensor, below: Tensor) -> Tensor:
        """`above / below`, which may be overwritten; zero where both are, as for an output that has no gradient."""
        if self.watch is None:  # all numbers are finite
            return (above / below).nan_to_num_(0.0)
        return above / below.add_(torch.finfo(below.dtype).tiny)


def inner_product(
    dims: tuple[int, ...], spare: Tensor | None, left: Tensor, right: Tensor, weights: Tensor | None = None
) -> Tensor:
    """The inner product of each column, perhaps weighted; `spare` is an array that may be overwritten."""
    product = torch.mul(left, right, out=spare)
    if weights is not None:
        product.mul_(weights)
    return product.sum(dims, keepdim=True)


def normalize(B: Tensor, dims: tuple[int, ...], spare: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split B into columns of largest entry 1 and their scale, so that squares neither over- nor underflow."""
    scale = torch.abs(B, out=spare).amax(dims, keepdim=True).clamp_(min=torch.finfo(B.dtype).tiny)
    return B / scale, scale
