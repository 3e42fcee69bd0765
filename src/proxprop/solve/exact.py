"""The exact solution, by one Cholesky factorisation in sample or feature space."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from proxprop import kernels
from proxprop.solve.products import transposed_product
from proxprop.solve.solver import FEATURE, SAMPLE, Ready, Sizes, Solution, Solver

ELIMINATED_ROWS = 768
"""Most rows of a system that the GPU kernel of our own factorises faster than cuSOLVER."""


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
    linear: ClassVar[bool] = True

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
    return by_factor(factorize(M, damping), outputs)


def eliminates(M: Tensor) -> bool:
    """Whether a GPU kernel of our own factorises `λI + M`."""
    return M.shape[-1] <= ELIMINATED_ROWS and kernels.take(M)


@dataclass(frozen=True)
class Factor:
    """A factorised `λI + M`.

    Attributes:
        L: lower Cholesky factor `[groups, size, size]`; the identity where `info` is not zero.
        info: LAPACK's, `[groups]`; not zero where `λI + M` was not positive definite in this precision.
        bound: `λ + trace M`, no smaller than the largest eigenvalue, `[groups]`; NaN where M overflowed.
    """

    L: Tensor
    info: Tensor
    bound: Tensor


def factorize(M: Tensor, damping: float) -> Factor:
    """Factorise `λI + M` for positive semidefinite M `[groups, size, size]`, which is overwritten."""
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    bound = diagonal.sum(-1).add_(damping)
    bound.masked_fill_(bound == torch.inf, torch.nan)  # because `B / inf` would hide it
    diagonal.add_(damping)
    L, info = torch.linalg.cholesky_ex(M)
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    L = torch.where(info.view(-1, 1, 1).logical_not(), L, identity)  # its inverse must not meet a zero pivot
    return Factor(L, info, bound)


def inverse_factor(K: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`L⁻¹` with `LLᵀ = λI + K`, and for each group whether that failed; K is overwritten.

    Two products with `L⁻¹` are as accurate as two triangular solves; one with `(LLᵀ)⁻¹` is not always.

    Returns:
        `L⁻¹ [groups, samples, samples]`, the identity over `√(λ + trace K)` where it failed, NaN where K is not finite.
    """
    size = K.shape[-1]
    if eliminates(K):
        from proxprop.kernels import cholesky

        inverse, failed = cholesky.inverse_factor(K, damping)
        return inverse[:, :size, :size], failed
    factor = factorize(K, damping)
    eye = torch.eye(size, dtype=K.dtype, device=K.device).expand_as(K)
    broken, bound = factor.info != 0, factor.bound[:, None, None]
    solved = torch.linalg.solve_triangular(factor.L, eye, upper=False)
    return torch.where(broken[:, None, None], eye / bound.sqrt(), solved), broken & factor.bound.isfinite()


def inverse(L: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹`: with as many right-hand sides as rows, one product with it beats two triangular solves."""
    if L.is_cuda:  # cholesky_inverse's GPU kernel can't be captured in a CUDA graph
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
        halfway: Tensor = torch.linalg.solve_triangular(L, eye, upper=False)
        return halfway.mT @ halfway
    return torch.cholesky_inverse(L)


def _triangular_solves(L: Tensor, B: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹B` by two triangular solves; cholesky_solve's GPU kernel can't be captured in a CUDA graph."""
    halfway = torch.linalg.solve_triangular(L, B, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(L.mT, halfway, upper=True)
    return solved


def by_factor(factor: Factor, outputs: int) -> Ready:
    """Return `B -> (λI + M)⁻¹B`; where the factorisation failed, `B / (λ + trace M)` instead.

    The substitute is the gradient at a step that cannot overshoot: a descent direction that is linear in B
    and costs no synchronisation to choose. Non-finite entries of M or B make non-finite entries here.
    """
    many = outputs >= factor.L.shape[-1]
    multiply = inverse(factor.L).bmm if many else partial(_triangular_solves, factor.L)
    intact = factor.info.logical_not()
    divisor = factor.bound.masked_fill(intact, 1.0).view(-1, 1, 1)  # L is the identity elsewhere
    failed = (intact | factor.bound.isnan()).logical_not()
    return lambda B: Solution(multiply(B).div_(divisor), failed)


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
        return lambda B: Solution(transposed_product(padded, B[0])[None, :size], failed)
    inverse = rows.mT @ rows
    return lambda B: Solution(inverse @ B, failed)
