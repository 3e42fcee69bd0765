"""Exact solutions of large systems on a GPU, by blocks: nearly all is products, on tensor cores.

`λI + M = RᵀR` with R upper triangular in blocks. Of a diagonal block `LLᵀ` only `L⁻¹` is ever needed,

    Rₖⱼ = Lₖ⁻¹Mₖⱼ      Mᵢⱼ ← Mᵢⱼ − RₖᵢᵀRₖⱼ      (i, j > k)

and the solution takes two sweeps, down and up. Products are as accurate as float32's whatever is allowed: those that
are subtracted from M must not make it indefinite. `proxprop.solvers.exact.by_factor`, LAPACK's way, is the plain twin.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.device import has_fast_bfloat16, round_up
from proxprop.solvers.cholesky import inverse_factor, upper_bound
from proxprop.solvers.matmul import transposed_product
from proxprop.solvers.solver import Ready, Solution

_product = partial(transposed_product, precise=True)


def goes_by_blocks(M: Tensor) -> bool:
    """Whether a GPU solves systems with M, too large to be eliminated, in this way.

    Not in an eager step: it takes a GPU two thirds of the time of LAPACK's way, but a host two to four times as long.
    """
    return len(M) == 1 and has_fast_bfloat16(M) and device.is_captured(M)


def by_blocks(M: Tensor, damping: float, outputs: int) -> Ready:
    """Return `B -> (λI + M)⁻¹B` for positive semidefinite M `[1, size, size]`; where that fails, `B / (λ + trace M)`.

    Args:
        M: K or S.
        damping: λ.
        outputs: columns of B.
    """
    size = M.shape[-1]
    count = -(-size // tuning.CHOLESKY_BLOCK)
    rows = round_up(size, count * tuning.CHOLESKY_UNIT) // count
    bound = upper_bound(M, damping)
    left = M.new_zeros(count * rows, count * rows)
    left[:size, :size] = M[0]
    left.diagonal().add_(damping)
    left.diagonal()[size:] = 1.0
    corners, beside, failures = [], [], []
    for start in range(0, count * rows, rows):
        end = start + rows
        corner, failed = inverse_factor(left[None, start:end, start:end], 0.0)
        corners.append(corner[0])
        failures.append(failed)
        if end < len(left):
            beside.append(_product(corner[0].mT, left[start:end, end:]))
            left[end:, end:] -= _product(beside[-1])
    broken = torch.stack(failures).any(0)

    def solve(B: Tensor) -> Solution:
        right = B.new_zeros(count * rows, round_up(outputs, tuning.CHOLESKY_UNIT))
        right[:size, :outputs] = B[0]
        found = _sweeps(corners, beside, right)[None, :size, :outputs]
        return Solution(torch.where(broken, B / bound, found), broken & bound.isfinite())

    return solve


def _sweeps(corners: Sequence[Tensor], beside: Sequence[Tensor], right: Tensor) -> Tensor:
    """`(RᵀR)⁻¹·right`, in its place, given `L⁻¹` of diagonal blocks and what of R is beside them."""
    blocks = right.split(len(corners[0]))
    for k, corner in enumerate(corners):
        blocks[k].copy_(_product(corner.mT, blocks[k]))
        if k < len(beside):
            right[(k + 1) * len(corner) :] -= _product(beside[k], blocks[k])
    for k in reversed(range(len(corners))):
        if k < len(beside):
            blocks[k].sub_(_product(beside[k].mT, right[(k + 1) * len(corners[k]) :]))
        blocks[k].copy_(_product(corners[k], blocks[k]))
    return right
