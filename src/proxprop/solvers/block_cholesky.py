"""Exact solutions of large systems on a GPU, by blocks: nearly all the work is products on tensor cores.

`λI + M = RᵀR` with R upper triangular in blocks. Only `L⁻¹` of each diagonal block `LLᵀ` is needed,

    Rₖⱼ = Lₖ⁻¹Mₖⱼ      Mᵢⱼ ← Mᵢⱼ − RₖᵢᵀRₖⱼ      (i, j > k)

and a solution takes two sweeps, down and up. Products are as accurate as float32's even where TF32 is allowed, because
subtracting less accurate ones could make M indefinite. `cholesky.LapackFactorization` is the plain twin.
"""

from functools import partial

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.device import round_up
from proxprop.solvers.cholesky import Factorization, divisor, factorize_whole, upper_bound
from proxprop.solvers.matmul import transposed_product

_product = partial(transposed_product, precise=True)


class BlockFactorization(Factorization):
    """The blocks of R for M `[1, size, size]`.

    Attributes:
        corners: the inverses of the diagonal blocks.
        beside: the blocks to the right of each diagonal block, as one matrix.
    """

    def __init__(self, M: Tensor, damping: float) -> None:
        self.size = M.shape[-1]
        count = -(-self.size // tuning.CHOLESKY_BLOCK)
        rows = round_up(self.size, count * tuning.CHOLESKY_UNIT) // count
        self.bound = upper_bound(M, damping)
        rest = M.new_zeros(count * rows, count * rows)
        rest[: self.size, : self.size] = M[0]
        rest.diagonal().add_(damping)
        rest.diagonal()[self.size :] = 1.0
        self.corners: list[Tensor] = []
        self.beside: list[Tensor] = []
        failures = []
        for start in range(0, count * rows, rows):
            end = start + rows
            corner = factorize_whole(rest[None, start:end, start:end].clone(), 0.0)
            self.corners.append(corner.inverse_factor()[0])
            failures.append(corner.failed)
            if end < len(rest):
                self.beside.append(_product(self.corners[-1].mT, rest[start:end, end:]))
                rest[end:, end:] -= _product(self.beside[-1])
        self.broken = torch.stack(failures).any(0)
        self.failed = self.broken & self.bound.isnan().logical_not()

    def solve(self, B: Tensor) -> Tensor:
        """Two sweeps over the blocks."""
        outputs = B.shape[-1]
        right = B.new_zeros(len(self.corners) * len(self.corners[0]), round_up(outputs, tuning.CHOLESKY_UNIT))
        right[: self.size, :outputs] = B[0]
        self._sweep(right)
        return torch.where(self.broken, B / divisor(self.bound), right[None, : self.size, :outputs])

    def _sweep(self, right: Tensor) -> None:
        """Replace `right` by `(RᵀR)⁻¹·right`."""
        blocks = right.split(len(self.corners[0]))
        for k, corner in enumerate(self.corners):
            blocks[k].copy_(_product(corner.mT, blocks[k]))
            if k < len(self.beside):
                right[(k + 1) * len(corner) :] -= _product(self.beside[k], blocks[k])
        for k in reversed(range(len(self.corners))):
            if k < len(self.beside):
                blocks[k].sub_(_product(self.beside[k].mT, right[(k + 1) * len(self.corners[k]) :]))
            blocks[k].copy_(_product(self.corners[k], blocks[k]))
