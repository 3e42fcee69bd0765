"""Conjugate gradients in the eigenbasis of K or S, where an iteration multiplies numbers instead of matrices.

Conjugate gradients take the same steps in every orthonormal basis. The eigenbasis costs as much as some iterations and
two products with it as much as two; all others are then nearly free. That pays on a CPU of few cores, from three
iterations on where outputs are many. A GPU takes far longer for eigenvectors than for all the products they replace.
"""

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from proxprop.solve.solver import SAMPLE

BASIS_COLUMNS = 1300, 5
"""On two cores, eigenvectors of a matrix take about as long as a product with 1300 + 5·rows columns, in float32 and in
float64. More cores multiply faster, but hardly find eigenvectors faster."""


def pays(size: int, iterations: int, outputs: int) -> bool:
    """Whether products with a K or S of this size cost more than its eigenvectors and two products with them."""
    constant, slope = BASIS_COLUMNS
    cores = max(2, torch.get_num_threads())
    return (iterations - 2) * outputs > (constant + slope * size) * cores / 2


def eigenbasis(M: Tensor, space: str) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Eigenvalues and eigenvectors of K or S, and the weights of an inner product in that basis.

    In sample space a residual `r = Aᵀρ` has the square `⟨ρ, Kρ⟩`, in which an eigenvector counts by its eigenvalue. An
    eigenvalue that is zero comes out as some rounding of the largest: it must not count, or steps would be taken for
    what does not reach D. What such vectors have of U follows the others' steps.

    Args:
        M: K or S `[groups, size, size]`.
        space: which of the two.

    Returns:
        Eigenvalues `[groups, size]`, eigenvectors `[groups, size, size]` as columns, weights `[groups, size]` or None
        where all are 1. None where there are none to be found, as for NaN, or none that are accurate enough.
    """
    if not is_level(M):
        return None
    try:
        values, vectors = torch.linalg.eigh(M, UPLO="U")  # the upper half is the faster one
    except LinAlgError:
        return None
    if space != SAMPLE:
        return values.clamp_(min=0.0), vectors, None
    rounding = torch.finfo(M.dtype).eps * values[..., -1:] * M.shape[-1] ** 0.5
    weights = values.where(values > rounding, 0.0)
    return values.clamp_(min=0.0), vectors, weights


def is_level(M: Tensor) -> bool:
    """Whether rows of A (or columns, for S) are of similar size, or zero.

    Eigenvectors are accurate to the rounding of the largest row, products with K or S to that of each. Where G touches
    small rows alone, all of D would be within the rounding of others.
    """
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    least = diagonal.where(diagonal > 0, torch.inf).amin()
    return bool(diagonal.amax() * torch.finfo(M.dtype).eps ** 0.5 <= least)
