"""The exact solution, by one Cholesky factorisation in sample or feature space."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxprop.solvers.cholesky import backend, factorize
from proxprop.solvers.solver import FEATURE, SAMPLE, PreparedSolve, Sizes, Solution, Solver


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
        return factorize(M, damping).prepared(outputs, rotated)

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return `U = (λI + K)⁻¹G`."""
        return self.prepared(SAMPLE, K, damping, G.shape[-1])(G)

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return `D = (λI + S)⁻¹B`."""
        return self.prepared(FEATURE, S, damping, B.shape[-1])(B)
