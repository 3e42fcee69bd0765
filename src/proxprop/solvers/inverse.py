"""Inverses of `λI + M`, to be multiplied with many times.

Large ones on a GPU come by blocks, in products on tensor cores that are as accurate as float32's. With `λI + M` in four
blocks `(M₁ M₂; M₂ᵀ M₃)`, A the inverse factor of M₁ and `P = A M₂`,

    C  is the inverse factor of  M₃ − PᵀP,      R = (A 0; −C PᵀA C),      (λI + M)⁻¹ = RᵀR,

each of A and C in the same way. Those are `2n³` FLOPs, nearly all in products of a quarter of the matrix or more.
`cholesky.LapackFactorization` is the plain twin.
"""

from functools import partial

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.device import is_traced, round_up
from proxprop.solvers.cholesky import divisor, factorize_whole, upper_bound
from proxprop.solvers.matmul import transposed_product

_product = partial(transposed_product, precise=True)


def inverted(M: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`(λI + M)⁻¹ [groups, size, size]`, and for each group whether it failed; M may be overwritten.

    Where it failed, it is the identity over `λ + trace M`.
    """
    if M.shape[-1] > tuning.INVERSE_BLOCK and M.is_cuda and not is_traced():
        return inverse_by_blocks(M, damping)
    factorization = factorize_whole(M, damping)
    return factorization.inverse(), factorization.failed


def inverse_by_blocks(M: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`inverted` in products of blocks, one matrix after the other."""
    size = M.shape[-1]
    count = -(-size // tuning.INVERSE_BLOCK)
    rows = round_up(size, count * tuning.ALIGNED) // count
    bound, X, failures = upper_bound(M, damping), torch.empty_like(M), []
    for matrix, out in zip(M, X, strict=True):
        left = M.new_zeros(count * rows, count * rows)
        left[:size, :size] = matrix
        left.diagonal().add_(damping)
        left.diagonal()[size:] = 1.0
        R = torch.zeros_like(left)
        failures.append(_invert_factor(left, R, rows))
        out.copy_(_square_of_lower(R, rows)[:size, :size])
    broken = torch.cat(failures)
    safe = torch.eye(size, dtype=M.dtype, device=M.device) / divisor(bound)[:, None, None]
    return torch.where(broken[:, None, None], safe, X), broken & bound.isnan().logical_not()


def _invert_factor(M: Tensor, R: Tensor, rows: int) -> Tensor:
    """Write `L⁻¹` of `M = LLᵀ` to R and say whether that failed `[1]`; both are of whole blocks, M is overwritten."""
    if len(M) == rows:
        whole = factorize_whole(M[None].clone(), 0.0)
        R.copy_(whole.inverse_factor()[0])
        return whole.failed
    half = len(M) // rows // 2 * rows
    A, C = R[:half, :half], R[half:, half:]
    failed = _invert_factor(M[:half, :half], A, rows)
    P = _product(A.mT, M[:half, half:])
    M[half:, half:] -= _product(P)
    failed = failed | _invert_factor(M[half:, half:], C, rows)
    R[half:, :half] = _product(C.mT, _product(P, A)).neg_()
    return failed


def _square_of_lower(R: Tensor, rows: int) -> Tensor:
    """`RᵀR` of a matrix that is lower triangular in blocks of so many rows."""
    X = torch.empty_like(R)
    for start in range(0, len(R), rows):
        end = start + rows
        X[:end, start:end] = _product(R[start:, :end], R[start:, start:end])
        X[start:end, :start] = X[:start, start:end].mT
    return X
