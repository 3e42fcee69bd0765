"""Factors of `λI + M`, and what becomes of those that fail."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxprop import device, tuning


def eliminates(M: Tensor) -> bool:
    """Whether a GPU kernel of our own factorises `λI + M`."""
    return M.shape[-1] <= tuning.TRITON_CHOLESKY_MOST_ROWS and device.use_triton(M)


@dataclass(frozen=True)
class Factor:
    """A factorised `λI + M`.

    Attributes:
        L: lower Cholesky factor `[groups, size, size]`; the identity where `info` is not zero.
        info: LAPACK's, `[groups]`; not zero where `λI + M` was not positive definite in this precision.
        bound: `upper_bound`, `[groups]`.
    """

    L: Tensor
    info: Tensor
    bound: Tensor


def upper_bound(M: Tensor, damping: float) -> Tensor:
    """`λ + trace M`, no smaller than the largest eigenvalue, `[groups]`; NaN where M overflowed."""
    bound = M.diagonal(dim1=-2, dim2=-1).sum(-1).add_(damping)
    return bound.masked_fill_(bound == torch.inf, torch.nan)  # because `B / inf` would hide it


def factorize(M: Tensor, damping: float) -> Factor:
    """Factorise `λI + M` for positive semidefinite M `[groups, size, size]`, which is overwritten."""
    bound = upper_bound(M, damping)
    M.diagonal(dim1=-2, dim2=-1).add_(damping)
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


def substitute(L: Tensor, B: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹B` by two triangular solves.

    Those of cuBLAS are rounded to TF32 where products may be, which a solve magnifies; those of cuSOLVER are not, but
    can't be captured in a CUDA graph.
    """
    eager = not (torch.compiler.is_compiling() or device.is_captured(L))
    if L.is_cuda and len(L) == 1 and eager:
        return torch.cholesky_solve(B, L)
    halfway = torch.linalg.solve_triangular(L, B, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(L.mT, halfway, upper=True)
    return solved


def inverse(L: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹`: with as many right-hand sides as rows, a CPU multiplies by it faster than it substitutes."""
    if L.is_cuda:  # cholesky_inverse's GPU kernel can't be captured in a CUDA graph
        return substitute(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L))
    return torch.cholesky_inverse(L)
