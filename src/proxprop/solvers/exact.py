"""The exact solution, by one Cholesky factorisation in sample or feature space."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proxprop.solvers.cholesky import backend, factorize
from proxprop.solvers.rotation import rotate
from proxprop.solvers.solver import FEATURE, SAMPLE, PreparedSolve, Sizes, Solution, Solver

NOISE = 10
"""Multiple of the rounding of K that `⟨U, KU⟩` must exceed; below it, D counts as noise."""


@dataclass(frozen=True)
class Exact(Solver):
    """Solve the proximal step exactly.

    `D = (λI + S)⁻¹B` in feature space; in sample space `U = (λI + K)⁻¹G` and `D = AᵀU`, the same D.

    Example:
        >>> import torch
        >>> A, G = torch.eye(2)[None], torch.ones(1, 2, 1)
        >>> Exact().features(A.mT @ A, A.mT @ G, damping=1.0).value.flatten()
        tensor([0.5000, 0.5000])
    """

    spaces: ClassVar[tuple[str, ...]] = (SAMPLE, FEATURE)
    capturable: ClassVar[bool] = True
    failure: ClassVar[str] = (
        "I/τ_θ + AᵀA is not positive definite in this precision, or nearly so. The step was replaced by a scaled "
        "gradient, may have lost all digits, or is not finite where AᵀA is not. Likely causes: tau_theta is too large "
        "for float32, inputs of very large or very different scale, or many repeated inputs. Try a smaller tau_theta, "
        "CG(iterations), normalised inputs or float64"
    )

    def flops(self, sizes: Sizes, space: str) -> float:
        """A Cholesky factor (`size³/3`) and two triangular solves (`2·size²·outputs`) for each group."""
        size = sizes.samples if space == SAMPLE else sizes.features
        return sizes.groups * (size**3 / 3 + 2.0 * size**2 * sizes.outputs)

    def backend(self, space: str, M: Tensor, outputs: int) -> str:
        """The backend of the factorisation: "triton", "blocks" or "lapack"."""
        return backend(M)

    def prepared(
        self, space: str, M: Tensor, damping: float, outputs: int, rotated: bool = False
    ) -> PreparedSolve:
        """Factorise, whatever the space."""
        factorization = factorize(M, damping)
        ready = factorization.prepared(outputs, rotated)
        if space != SAMPLE or M.dtype != torch.float32 or factorization.rank_is_full:
            return ready  # what float64 hides is too little to matter
        sizes = M.diagonal(dim1=-2, dim2=-1)[..., None]  # of λI + K by now

        def watched(G: Tensor) -> Solution:
            U = ready(G).value
            noise = is_noise(U, rotate(G) if rotated else G, damping, sizes)
            return Solution(U, factorization.failed | noise)

        return watched

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return `U = (λI + K)⁻¹G`."""
        return self.prepared(SAMPLE, K, damping, G.shape[-1])(G)

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return `D = (λI + S)⁻¹B`."""
        return self.prepared(FEATURE, S, damping, B.shape[-1])(B)


def is_noise(U: Tensor, G: Tensor, damping: float, diagonal: Tensor) -> Tensor:
    """Whether `D = AᵀU` is little but rounding for a column of each group, `[groups]`.

    Where K is nearly singular, most of U may be `G/λ` in its null space, and D the small rest. D's square is
    `⟨U, KU⟩ = ⟨U, G − λU⟩`.

    Args:
        U: `[groups, samples, outputs]`.
        G: likewise.
        damping: λ.
        diagonal: of `λI + K`, `[groups, samples, 1]`.
    """
    squared = (U * torch.sub(G, U, alpha=damping)).sum(-2)
    rounding = (U.square() * diagonal).sum(-2) * (NOISE * torch.finfo(U.dtype).eps)
    return (squared < rounding).any(-1)
