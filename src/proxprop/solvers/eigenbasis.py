"""Conjugate gradients in the eigenbasis of K or S, where an iteration multiplies numbers instead of matrices.

Conjugate gradients take the same steps in every orthonormal basis. The eigenbasis costs as much as some iterations and
two products with it as much as two; all others are then nearly free. That pays on a CPU of few cores, from three
iterations on where outputs are many. A GPU takes far longer for eigenvectors than for all the products they replace.

Few iterations need not be taken at all there. k of them end at the best point of the Krylov space, which is the
right-hand side times some polynomial of the eigenvalues of degree below k. The coefficients are the solution of k
equations for each column, and what these are made of is one product with the squares of its entries.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from proxprop.solvers.solver import SAMPLE

BASIS_COLUMNS = 1300, 5
"""On two cores, eigenvectors of a matrix take about as long as a product with 1300 + 5·rows columns, in float32 and in
float64. More cores multiply faster, but hardly find eigenvectors faster."""

MOST_POLYNOMIALS = 12
"""With more, forming and solving the equations takes as long as the iterations."""

LEAST_PIVOT = 1e-6
"""Share of a polynomial's square that has to be its own, and not that of those before it."""

LEAST_SQUARE = 1e-150
"""Below it, a float64 sum of squares may have lost summands."""

LARGEST_VALUE = 1e6
"""Of a polynomial at eigenvalues that do not count, where its mean square at the others is 1: beyond it, the rounding
of coefficients would."""


class Polynomials(NamedTuple):
    """A basis of those of low degree, by their values at the eigenvalues.

    Attributes:
        values: `[groups, degrees, size]`.
        moments: what squares of a right-hand side's entries are multiplied by and summed for its equations, one matrix
            with its right-hand side for each column, `[groups, degrees·(degrees + 1), size]` in float64: there squares
            do not overflow, and equations lose few of float32's digits.
    """

    values: Tensor
    moments: Tensor


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
        Eigenvalues `[groups, size]`, eigenvectors `[groups, size, size]` as columns, weights `[groups, size]` up
        to 1, or None where all are 1. None where there are none to be found, as for NaN, or none that are accurate
        enough.
    """
    if not is_level(M):
        return None
    try:
        values, vectors = torch.linalg.eigh(M, UPLO="U")  # the upper half is the faster one
    except LinAlgError:
        return None
    if space != SAMPLE:
        return values.clamp_(min=0.0), vectors, None
    precision = torch.finfo(M.dtype)
    shares = values / values[..., -1:].clamp(min=precision.tiny)
    weights = shares.where(shares > precision.eps * M.shape[-1] ** 0.5, 0.0)
    return values.clamp_(min=0.0), vectors, weights


def is_level(M: Tensor) -> bool:
    """Whether rows of A (or columns, for S) are of similar size, or zero.

    Eigenvectors are accurate to the rounding of the largest row, products with K or S to that of each. Where G touches
    small rows alone, all of D would be within the rounding of others.
    """
    diagonal = M.diagonal(dim1=-2, dim2=-1)
    least = diagonal.where(diagonal > 0, torch.inf).amin()
    return bool(diagonal.amax() * torch.finfo(M.dtype).eps ** 0.5 <= least)


def polynomials(
    diagonal: Tensor, weights: Tensor | None, squares: Tensor, degrees: int
) -> Polynomials | None:
    """Those that are orthonormal for what some columns have of the eigenvectors, on average.

    Columns that are not far from that have well-conditioned equations.

    Args:
        diagonal: of the matrix to solve with, in its eigenbasis, `[groups, size]`.
        weights: of an inner product's summands, `[groups, size]`; None where all are 1.
        squares: of the columns' entries, `[groups, size, columns]` in float64.
        degrees: how many polynomials.

    Returns:
        The basis; None where there are not so many, or where eigenvalues are too close together to tell them apart.
    """
    exact = diagonal.double()
    weighted = torch.ones_like(exact) if weights is None else weights.double()
    curved = weighted * exact
    energy = curved.unsqueeze(-2) @ squares
    density = curved * (squares @ energy.reciprocal().masked_fill_(energy == 0, 0.0).mT).squeeze(-1)
    density /= density.sum(-1, keepdim=True)
    values = exact.new_ones(len(exact), degrees, exact.shape[-1])
    for i in range(1, degrees):
        new = exact * values[:, i - 1]
        shares = values[:, :i] @ (density * new).unsqueeze(-1)
        new -= (values[:, :i].mT @ shares).squeeze(-1)
        values[:, i] = new / (density * new.square()).sum(-1, keepdim=True).sqrt()
    largest = torch.full_like(curved, torch.finfo(diagonal.dtype).max).masked_fill_(
        curved == 0, LARGEST_VALUE
    )
    if not (values.abs() <= largest.unsqueeze(-2)).all():  # or NaN
        return None
    matrix = (values * curved.unsqueeze(-2)).unsqueeze(-2) * values.unsqueeze(-3)
    right = (values * weighted.unsqueeze(-2)).unsqueeze(-2)
    return Polynomials(values.to(diagonal.dtype), torch.cat((matrix, right), dim=-2).flatten(-3, -2))


def coefficients(sums: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """Solve the equations of each column.

    Args:
        sums: `moments` times squares `[groups, degrees·(degrees + 1), columns]`, which is overwritten.
        degrees: how many polynomials.

    Returns:
        `[groups, degrees, columns]`, zero where the equations are too close to singular, as where a column has
        converged in fewer steps or is zero, and where that is not so `[groups, columns]`.
    """
    system = sums.unflatten(1, (degrees, degrees + 1))
    pivots = system.diagonal(dim1=1, dim2=2)
    squares = pivots.clone()
    for i in range(degrees):
        rest = system[:, :, i + 1 :]
        row = rest[:, i] / system[:, i, i].unsqueeze(1)
        rest.addcmul_(system[:, :, i : i + 1], row.unsqueeze(1), value=-1)
        rest[:, i] = row
    safe = (pivots > LEAST_PIVOT * squares).all(-1) & (squares[..., 0] > LEAST_SQUARE)
    return system[:, :, -1].masked_fill(safe.logical_not().unsqueeze(1), 0.0), safe
