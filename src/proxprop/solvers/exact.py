"""The exact solution, by one Cholesky factorisation in sample or feature space."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxprop.solvers.block_cholesky import by_blocks, goes_by_blocks
from proxprop.solvers.cholesky import Factor, eliminates, factorize, inverse, substitute
from proxprop.solvers.matmul import transposed_product
from proxprop.solvers.solver import FEATURE, SAMPLE, Factored, Ready, Sizes, Solution, Solver


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

    def flops(self, sizes: Sizes, space: str) -> float:
        """A Cholesky factor (`size³/3`) and two triangular solves (`2·size²·outputs`) for each group."""
        size = sizes.samples if space == SAMPLE else sizes.features
        return sizes.groups * (size**3 / 3 + 2.0 * size**2 * sizes.outputs)

    def prepared(self, space: str, M: Tensor, damping: float, outputs: int) -> Ready:
        """Factorise, whatever the space."""
        return prepared(M, damping, outputs)

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return `U = (λI + K)⁻¹G`."""
        return solve(K, G, damping)

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return `D = (λI + S)⁻¹B`."""
        return solve(S, B, damping)


def solve(M: Tensor, B: Tensor, damping: float) -> Solution:
    """Return `(λI + M)⁻¹B` for positive semidefinite M `[groups, size, size]`, which is overwritten."""
    return prepared(M, damping, B.shape[-1])(B)


def prepared(M: Tensor, damping: float, outputs: int) -> Ready:
    """Return `B -> (λI + M)⁻¹B` for B with so many columns; M is overwritten."""
    if eliminates(M):
        return by_elimination(M, damping, outputs)
    if goes_by_blocks(M):
        return by_blocks(M, damping, outputs)
    return by_factor(factorize(M, damping), outputs)


def by_factor(factor: Factor, outputs: int) -> Ready:
    """Return `B -> (λI + M)⁻¹B`; where the factorisation failed, `B / (λ + trace M)` instead.

    The substitute is the gradient at a step that cannot overshoot: a descent direction that is linear in B
    and costs no synchronisation to choose. Non-finite entries of M or B make non-finite entries here.
    """
    intact = factor.info.logical_not()
    divisor = factor.bound.masked_fill(intact, 1.0).view(-1, 1, 1)  # L is the identity elsewhere
    failed = (intact | factor.bound.isnan()).logical_not()
    if outputs >= factor.L.shape[-1] and not factor.L.is_cuda:
        return Factored(inverse(factor.L).div_(divisor), right=lambda B: B, failed=failed)
    return lambda B: Solution(substitute(factor.L, B).div_(divisor), failed)


def by_elimination(M: Tensor, damping: float, outputs: int) -> Ready:
    """`prepared` by a GPU kernel of our own for small systems.

    A failure is substituted in the factor, where there is less of it: `L⁻¹ = I/√bound` gives `B / bound`.
    """
    from proxprop.kernels import cholesky

    inverse_L, failed = cholesky.inverse_factor(M, damping)
    size = M.shape[-1]
    rows = inverse_L[..., :size]
    if outputs < size:
        return lambda B: Solution(rows.mT @ (rows @ B), failed)
    if len(M) == 1:
        padded = rows[0].mT @ inverse_L[0]  # padded columns, as tensor cores want them
        # With outputs as rows, U is read faster by the product with the layer's input.
        return lambda B: Solution(transposed_product(B[0], padded).mT[None, :size], failed)
    inverse = rows.mT @ rows
    return lambda B: Solution(inverse @ B, failed)
