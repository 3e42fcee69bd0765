"""The interface of every solver, and the sizes of the system that it is given."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from proxprop.solvers.matmul import times
from proxprop.solvers.rotation import rotate

SAMPLE, FEATURE, MATRIX_FREE = "sample", "feature", "matrix_free"
SPACES = (SAMPLE, FEATURE, MATRIX_FREE)
DIAGONAL = "diagonal"
"""Where S is diagonal, as for an embedding, every solver's answer is the exact one, entry by entry."""


class Sizes(NamedTuple):
    """Sizes of one system `A [groups, samples, features]`, `G [groups, samples, outputs]`."""

    groups: int
    samples: int
    features: int
    outputs: int

    @property
    def backprop_flops(self) -> float:
        """FLOPs of BackProp's three products with this layer, `6·groups·samples·features·outputs`."""
        return 6.0 * self.groups * self.samples * self.features * self.outputs


class Solution(NamedTuple):
    """The result of a solve.

    `value` solves the system. `failed` is None where nothing can fail. Else it has at most one boolean per group, true
    where `value` is a safe substitute or may have lost much to rounding. It stays on the device: the caller decides
    whether to wait for it.
    """

    value: Tensor
    failed: Tensor | None = None

    def times(self, factor: float) -> "Solution":
        """The value multiplied in place; untouched where the factor is 1, as in the paper's scaling."""
        return self if factor == 1.0 else self._replace(value=self.value.mul_(factor))

    def plus(self, other: "Solution") -> "Solution":
        """The sum of two, the value in this one's place; it failed where either did."""
        flags = [failed for failed in (self.failed, other.failed) if failed is not None]
        return Solution(self.value.add_(other.value), torch.stack(flags).any(0) if flags else None)


PreparedSolve = Callable[[Tensor], Solution]
"""The rest of a solve once K or S is formed: from a right-hand side to the solution."""


@dataclass(frozen=True)
class ProductSolve:
    """A `PreparedSolve` that ends in a product with one matrix, so that `D = AᵀU` is also `(leftᵀA)ᵀ·right(G)`.

    Attributes:
        left: `[groups, size, size]`; the solution is `left·right(B)`.
        right: maps a right-hand side to the matrix that `left` multiplies, of the same shape.
    """

    left: Tensor
    right: PreparedSolve

    def __call__(self, B: Tensor) -> Solution:
        """The solution, with outputs as rows in memory, as a weight has them."""
        right, failed = self.right(B)
        return Solution(times(right.mT, self.left.mT).mT, failed)


class Solver(ABC):
    """A way to solve `(λI + AᵀA) D = AᵀG`. Subclass it to bring your own.

    A subclass names the spaces it can work in and implements one method for each.
    """

    spaces: ClassVar[tuple[str, ...]]
    capturable: ClassVar[bool] = False
    """Whether a solve on a GPU is the same kernels whatever the numbers are, so that eager steps may replay it."""
    failure: ClassVar[str] = "the solver could not solve its system in this precision"
    """Text of the warning where `Solution.failed` is true, with what happened, likely causes and remedies."""

    @abstractmethod
    def flops(self, sizes: Sizes, space: str) -> float:
        """FLOPs of the solve in `space`, once K or S is formed."""

    def backend(self, space: str, M: Tensor, outputs: int) -> str:
        """Name of the backend that solves in this space, given K or S; matrix-free, M is any tensor of the call."""
        return "torch"

    def prepared(
        self, space: str, M: Tensor, damping: float, outputs: int, rotated: bool = False
    ) -> PreparedSolve:
        """Prepare a solve in sample or feature space, given K or S, which may be overwritten.

        Override it to do all work that does not need the right-hand side.

        Args:
            space: which of the two.
            M: K or S.
            damping: λ.
            outputs: columns of the right-hand side.
            rotated: whether K is of rotated samples (see `rotation`). The solve then rotates G, and U is rotated.
        """
        method = self.samples if space == SAMPLE else self.features
        return lambda right: method(M, rotate(right) if rotated else right, damping)

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return U with `D = AᵀU`, given `K = AAᵀ`, which may be overwritten, and `G`."""
        raise NotImplementedError(f"{self!r} does not work in sample space")

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return D, given `S = AᵀA`, which may be overwritten, and `B = AᵀG`."""
        raise NotImplementedError(f"{self!r} does not work in feature space")

    def matrix_free(self, apply: Callable[[Tensor], Tensor], B: Tensor, damping: float) -> Solution:
        """Return D, given the product `V -> AᵀAV` and `B = AᵀG`."""
        raise NotImplementedError(f"{self!r} does not work matrix-free")
