"""Batched products about as accurate as float32's, of matrices that are split once and multiplied many times.

A matrix has its float16 terms (`kernels/split_fp16.py`) stacked along the dimension that products sum over, as high,
low, high, high. The first three of these against the last three of another matrix are one product with float32 sums:
three times the work, at over ten times the rate. In float64, and anywhere but on a GPU with Triton, a matrix stands for
itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from proxprop import device


class Stack(NamedTuple):
    """A matrix as a factor of products.

    Attributes:
        first, last: the first three and the last three terms, or the matrix itself twice.
        scale: what the terms are multiples of.
    """

    first: Tensor
    last: Tensor
    scale: float

    @property
    def mT(self) -> "Stack":
        """The transposed matrix."""
        return Stack(self.first.mT, self.last.mT, self.scale)

    def columns(self, start: int, end: int | None = None) -> "Stack":
        """Some columns of a matrix that is stacked by rows."""
        return Stack(self.first[..., start:end], self.last[..., start:end], self.scale)


def by_rows(X: Tensor, scale: float) -> Stack:
    """Prepare X `[groups, rows, columns]` for products that sum over its rows."""
    return _stacked(X, 1, scale)


def by_columns(X: Tensor, scale: float) -> Stack:
    """Prepare X `[groups, rows, columns]` for products that sum over its columns."""
    return _stacked(X, 2, scale)


def product(left: Stack, right: Stack) -> Tensor:
    """`left·right`, of a matrix stacked by columns and one stacked by rows."""
    groups, rows, columns = len(left.first), left.first.shape[1], right.last.shape[2]
    total = left.first.new_empty(groups, rows, columns, dtype=device.precision(left.first))
    return _add(total, left, right, 0, 1.0)


def add_product(total: Tensor, left: Stack, right: Stack, sign: float = 1.0) -> None:
    """Add `left·right` to a total, in place, or subtract it."""
    _add(total, left, right, 1, sign)


def _stacked(X: Tensor, dim: int, scale: float) -> Stack:
    if not device.use_fp16_products(X):
        return Stack(X, X, 1.0)
    from proxprop.kernels import split_fp16

    terms, size = split_fp16.stack(X, dim, scale), X.shape[dim]
    return Stack(terms.narrow(dim, 0, 3 * size), terms.narrow(dim, size, 3 * size), scale)


def _add(total: Tensor, left: Stack, right: Stack, beta: int, alpha: float) -> Tensor:
    """`beta·total + alpha·left·right`, in place of the total."""
    alpha /= left.scale * right.scale
    if left.first.dtype != torch.float16:
        return total.baddbmm_(left.first, right.last, beta=beta, alpha=alpha)
    if not total.is_cuda:  # under Triton's interpreter
        return total.baddbmm_(left.first.float(), right.last.float(), beta=beta, alpha=alpha)
    return torch.baddbmm(
        total, left.first, right.last, out_dtype=torch.float32, beta=beta, alpha=alpha, out=total
    )
