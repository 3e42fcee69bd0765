"""Inverses of large positive definite matrices on a GPU, several at a time, nearly all of it products on tensor cores.

`λI + M = RᵀR` with R upper triangular, by blocks of rows,

    Wₖⱼ = Mₖⱼ − Σᵢ RᵢₖᵀRᵢⱼ  (i < k ≤ j)      Wₖₖ = LₖLₖᵀ      Rₖⱼ = Lₖ⁻¹Wₖⱼ

then `U = R⁻¹` by blocks of columns, and then the inverse `UUᵀ`:

    Uₖₖ = Lₖ⁻ᵀ      Uᵢₖ = −(Σⱼ UᵢⱼRⱼₖ) Uₖₖ  (i ≤ j < k)

Products are about as accurate as float32's, even where TF32 is allowed, because they are taken in float16 terms
(`stacked_terms.py`). For these, M is scaled by powers of two to a diagonal between 1/4 and 1.
`cholesky.LapackFactorization` is the plain twin.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.solvers.cholesky import (
    TriangularFactorization,
    divisor,
    factorize_whole,
    least_share,
    upper_bound,
)
from proxprop.solvers.stacked_terms import (
    Stack,
    add_product,
    by_columns,
    by_rows,
    product,
)

BLOCK_SCALE = 2.0**14
"""Multiplier of terms of M and R, whose entries are at most 1: it brings them near the top of float16's range."""

INVERSE_SCALE = 1.0
"""Multiplier of terms of U, whose entries may be as large as the root of the condition number."""


class BlockInverse(TriangularFactorization):
    """The blocks of R for M `[groups, size, size]`.

    Attributes:
        sides: what rows and columns of M are multiplied by, `[groups, size]`.
        corners: Lₖ⁻¹, and its terms by columns.
        beside: Rₖⱼ for all j > k as one matrix, by its terms.
    """

    def __init__(self, M: Tensor, damping: float) -> None:
        self.size = M.shape[-1]
        count = -(-self.size // tuning.CHOLESKY_BLOCK)
        self.rows = device.round_up(-(-self.size // count), tuning.CHOLESKY_UNIT)
        self.bound = upper_bound(M, damping)
        diagonal = M.diagonal(dim1=-2, dim2=-1) + damping
        self.sides = _sides(diagonal)
        W = M.new_zeros(len(M), count * self.rows, count * self.rows)
        inside = W[:, : self.size, : self.size]
        torch.mul(M, self.sides[:, :, None], out=inside)
        inside.mul_(self.sides[:, None, :])
        scaled = torch.ones_like(W[:, 0])
        scaled[:, : self.size] = diagonal * self.sides.square()
        W.diagonal(dim1=-2, dim2=-1).copy_(scaled)
        self.corners: list[tuple[Tensor, Stack]] = []
        self.beside: list[Stack] = []
        with device.float32_products("ieee", M):
            broken = torch.stack([self._eliminate(W, k) for k in range(count)]).any(0)
        roots = torch.cat([corner.diagonal(dim1=-2, dim2=-1) for corner, _ in self.corners], -1)
        pivots_suffice = (roots.square() * scaled * least_share(M) < 1).all(-1)
        self._judge(pivots_suffice & broken.logical_not())

    def _judge(self, sound: Tensor) -> None:
        self.broken = sound.logical_not()
        self.failed = self.broken & self.bound.isnan().logical_not()

    def _eliminate(self, W: Tensor, k: int) -> Tensor:
        """Make a row of blocks of R; returns for each group whether its diagonal block could not be factorised."""
        start, end = k * self.rows, (k + 1) * self.rows
        rest = W[:, start:end, start:]
        for j, R in enumerate(self.beside):
            before = (k - 1 - j) * self.rows
            add_product(rest, R.columns(before, before + self.rows).mT, R.columns(before), sign=-1.0)
        factorization = factorize_whole(rest[..., : self.rows].contiguous(), 0.0)
        corner = factorization.inverse_factor()
        terms = by_columns(corner, INVERSE_SCALE)
        self.corners.append((corner, terms))
        if end < W.shape[-1]:
            right = product(terms, by_rows(rest[..., self.rows :], BLOCK_SCALE))
            self.beside.append(by_rows(right, BLOCK_SCALE))
        return factorization.broken

    def _columns(self) -> Iterator[tuple[Tensor, Stack]]:
        """The blocks of columns of U, each down to the diagonal and with its terms by columns."""
        done: list[Stack] = []
        for k, (corner, terms) in enumerate(self.corners):
            column = corner.new_zeros(len(corner), (k + 1) * self.rows, self.rows)
            above = column[:, : k * self.rows]
            for j, U in enumerate(done):
                place = (k - 1 - j) * self.rows
                R = self.beside[j].columns(place, place + self.rows)
                add_product(above[:, : (j + 1) * self.rows], U, R, sign=-1.0)
            if k:
                above.copy_(product(by_columns(above, INVERSE_SCALE), terms.mT))
            column[:, k * self.rows :] = corner.mT
            done.append(by_columns(column, INVERSE_SCALE))
            yield column, done[-1]

    def inverse(self) -> Tensor:
        """The sum of products of U's columns."""
        padded = len(self.corners) * self.rows
        X = self.bound.new_zeros(len(self.bound), padded, padded)
        with device.float32_products("ieee", X):
            for column, U in self._columns():
                rows = column.shape[1]
                add_product(X[:, :rows, :rows], U, U.mT)
        diagonal = X.diagonal(dim1=-2, dim2=-1)
        self._judge(self.broken.logical_not() & diagonal.isfinite().all(-1))
        inside = X[:, : self.size, : self.size] * self.sides[:, :, None]
        inside.mul_(self.sides[:, None, :])
        return self._mended(inside, 1 / divisor(self.bound))

    def inverse_factor(self) -> Tensor:
        """The transpose of U."""
        padded = len(self.corners) * self.rows
        factor = self.bound.new_zeros(len(self.bound), padded, padded)
        with device.float32_products("ieee", factor):
            for k, (column, _) in enumerate(self._columns()):
                factor[:, k * self.rows : (k + 1) * self.rows, : column.shape[1]] = column.mT
        factor = factor[:, : self.size, : self.size] * self.sides[:, None, :]
        self._judge(self.broken.logical_not() & factor.sum((-2, -1)).isfinite())
        return self._mended(factor, divisor(self.bound).rsqrt())

    def _mended(self, X: Tensor, instead: Tensor) -> Tensor:
        """X, or a multiple of the identity where the factorisation failed."""
        identity = torch.eye(self.size, dtype=X.dtype, device=X.device)
        return torch.where(self.broken.view(-1, 1, 1), identity * instead.view(-1, 1, 1), X)


def _sides(diagonal: Tensor) -> Tensor:
    """Powers of two that scale rows and columns of a matrix to a diagonal between 1/4 and 1."""
    _, exponent = torch.frexp(diagonal.clamp(min=0).sqrt())
    usable = diagonal.isfinite() & (diagonal > 0)
    return torch.where(usable, torch.exp2(-exponent.to(diagonal.dtype)), 1.0)
