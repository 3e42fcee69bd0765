"""The eigenbasis of K or S, in which an iteration of conjugate gradients multiplies numbers instead of matrices.

Conjugate gradients take the same steps in every orthonormal basis. The eigenbasis costs as much as some iterations, and
two products with it as much as two; all others are then nearly free. That pays on a CPU of few cores, from three
iterations on, for layers of many outputs. A GPU takes far longer for eigenvectors than for the products they replace.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from proxprop import tuning
from proxprop.device import is_transformed
from proxprop.solvers.solver import SAMPLE

MOST_HIDDEN = 0.1
"""Largest share of D that may be hidden."""


class Basis(NamedTuple):
    """Eigenvalues and eigenvectors of K or S.

    Attributes:
        values: `[groups, size]`; zero where rounding could have made them.
        vectors: `[groups, size, size]`, as columns.
        noisy: in sample space the eigenvalues that weigh rounding of K, `[groups, size]`; None in feature space.
        zeroed: in sample space what those that are zero may be at most, and zero for the others; None for none.
    """

    values: Tensor
    vectors: Tensor
    noisy: Tensor | None = None
    zeroed: Tensor | None = None

    def over(self, unit: float) -> "Basis":
        """That of the matrix over a unit."""
        noisy, zeroed = (array / unit if array is not None else None for array in self[2:])
        return Basis(self.values / unit, self.vectors, noisy, zeroed)


def pays(M: Tensor, iterations: int, outputs: int) -> bool:
    """Whether products with M cost a CPU more than its eigenvectors and two products with them."""
    if M.device.type != "cpu" or is_transformed(M):
        return False
    constant, slope = tuning.EIGENBASIS_COLUMNS
    cores = max(2, torch.get_num_threads())
    return (iterations - 2) * outputs > (constant + slope * M.shape[-1]) * cores / 2


def find(M: Tensor, space: str) -> Basis | None:
    """The eigenbasis of K or S `[groups, size, size]`; None where it can't be found or is not accurate enough.

    In sample space a residual `r = Aᵀρ` has the square `⟨ρ, Kρ⟩`, in which an eigenvector counts by its eigenvalue. A
    zero eigenvalue comes out as some rounding of the largest. It must not count, or steps would be taken for parts
    of ρ that do not reach D.
    """
    if not is_level(M):
        return None
    try:
        values, vectors = torch.linalg.eigh(M, UPLO="U")  # LAPACK is faster on the upper half
    except LinAlgError:
        return None
    values = values.clamp_(min=0.0)
    if space != SAMPLE:
        return Basis(values, vectors)
    size, largest = M.shape[-1], values[..., -1:]
    rounding = torch.finfo(M.dtype).eps * size**0.5 * largest
    null = values <= rounding
    least = values.where(~null, torch.inf).amin(-1, keepdim=True)
    # Rounding mixes other vectors into a null vector: the larger their eigenvalue, the less of them.
    noisy = size**0.5 * largest * (rounding / least)
    zeroed = torch.where(null, rounding, 0.0) if bool(null.any()) else None
    return Basis(values.masked_fill(null, 0.0), vectors, values.where(~null, noisy), zeroed)


def is_hidden(U: Tensor, G: Tensor, basis: Basis, damping: float) -> Tensor:
    """Whether `D = AᵀU` may lack a part because an eigenvalue was taken for zero, `[groups]`.

    With `ρ = G − (λI + K)U`, that part is at most `√eigenvalue/λ` times ρ along the eigenvector, and D's square is
    `⟨U, KU⟩`. More steps would have found it unless all else that is left of ρ counts for less.

    Args:
        U: in the basis, `[groups, outputs, size]`.
        G: likewise.
        basis: in which eigenvalues were taken for zero.
        damping: λ.
    """
    assert basis.zeroed is not None
    values, zeroed = basis.values.unsqueeze(-1), basis.zeroed.unsqueeze(-1)
    scale = G.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(G.dtype).tiny)
    U = U / scale
    left = torch.sub(G / scale, U * (values.mT + damping)).square_()
    hidden = left @ zeroed
    lacks = hidden > (U.square() @ values) * (MOST_HIDDEN * damping) ** 2
    return (lacks & (left @ values <= hidden)).any(-1).any(-1)


def is_level(M: Tensor) -> bool:
    """Whether rows of A (columns, for S) are of similar size, or zero, and none overflows.

    Eigenvectors are accurate to the rounding of the largest row, products with K or S to the rounding of each row. If
    G touched only small rows, all of D would be within the rounding of the large ones.
    """
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    least = diagonal.where(diagonal > 0, torch.inf).amin()
    largest = diagonal.amax()
    return bool((largest * torch.finfo(M.dtype).eps ** 0.5 <= least) & (largest < torch.inf))
