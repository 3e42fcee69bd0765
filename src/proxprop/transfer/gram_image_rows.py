"""Exact Gram matrices of small two-dimensional convolutions from products of image rows.

Two taps of a kernel see image rows at most `kernel − 1` apart, so S is made of the products

    Z[u, (c, w), (d, c', w')] = Σ_b x[b, c, u, w]·x[b, c', u + d, w'],     0 ≤ d < kernel

summed over the rows u that tap i sees, which then stand at tap `j = i + d`, and over the column pairs (w, w') that an
output position brings together. That is one batched product `[channels·width, batch] × [batch, kernel·channels·width]`
for each image row and two small products with matrices of zeros and ones, whatever the stride and the padding: few
launches where `autocorrelation` needs many, and `width / kernel³` of the FLOPs of unfolding.

Shapes: input `[batch, channels, height, width]`; S `[channels·kernel, channels·kernel]`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from proxprop import tuning
from proxprop.solvers.matmul import in_parts, multiply, wide


@dataclass(frozen=True)
class Axis:
    """How a convolution walks along one dimension, with zeros beyond the border."""

    size: int
    kernel: int
    stride: int
    padding: int

    @property
    def outputs(self) -> int:
        """How many output positions there are."""
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def windows(self) -> Tensor:
        """Which entry each tap sees from each output position, `[positions, entries, taps]`."""
        o, u = torch.arange(self.outputs)[:, None, None], torch.arange(self.size)[:, None]
        return (self.stride * o + torch.arange(self.kernel) - self.padding == u).double()

    def pairs(self) -> Tensor:
        """Whether an output position brings entries u, v together at taps i, j, `[u, v, i, j]`."""
        seen = self.windows()
        return torch.einsum("oui,ovj->uvij", seen, seen)


def flops(height: Axis, width: Axis, batch: int, channels: int) -> float:
    """FLOPs of the products of rows."""
    return 2.0 * batch * height.size * height.kernel * (channels * width.size) ** 2


def gram(x: Tensor, height: Axis, width: Axis) -> Tensor:
    """`S = AᵀA` of the patches of x, the ones column left out.

    Args:
        x: input `[batch, channels, height, width]`, not padded.
        height: how the convolution walks down.
        width: how it walks across.

    Returns:
        S `[channels·kernel, channels·kernel]`.
    """
    batch, channels = x.shape[:2]
    lags, row = height.kernel, channels * width.size
    numbers = max(tuning.IMAGE_ROWS_BLOCK_NUMBERS, x.numel())
    at_once = max(1, numbers // (height.size * width.size * lags * row))

    def product(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
        """S above its diagonal, from each row of the images and those that follow it, a few channels at a time."""
        left = left[:, : height.size * row].view(-1, height.size, channels, width.size).permute(1, 2, 3, 0)
        right = right.as_strided((height.size, len(right), lags * row), (row, right.stride(0), 1))
        blocks = [_block(some, right, height, width, numbers) for some in left.split(at_once, dim=1)]
        S = torch.cat(blocks).reshape(channels * lags * width.kernel, -1)
        return S if total is None else total.add_(S)

    S = in_parts(product, [_rows(x, lags)], flops(height, width, batch, channels))
    return torch.where(_upper(channels, lags, width.kernel, x.device), S, S.mT)


def _rows(x: Tensor, lags: int) -> Tensor:
    """The rows of each image one after the other, and zeros for those that follow the last."""
    return functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, lags - 1)).flatten(1).contiguous()


def _block(left: Tensor, right: Tensor, height: Axis, width: Axis, numbers: int) -> Tensor:
    """Rows of S that belong to some of the channels; taps `j < i` hold nothing of use.

    Args:
        left: rows of these channels `[height, c, width, batch]`.
        right: rows of all channels that follow `[height, batch, d·c'·width]`.
        height: how the convolution walks down.
        width: how it walks across.
        numbers: most products that exist at a time.

    Returns:
        `[c, i, i across, c', j, j across]`.
    """
    here, lags, across = left.shape[1], height.kernel, width.kernel
    seen = _seen(height, wide(left), left.device).mT
    together = _together(width, wide(left), left.device)
    Z = _summed_over_rows(left.flatten(1, 2), right, seen, numbers)
    Z = Z.view(lags, here, width.size, lags, -1, width.size).permute(0, 3, 1, 4, 2, 5)
    S = Z.reshape(-1, width.size**2) @ together
    S = S.view(lags, lags, here, -1, across, across)
    skewed = (lags - 1) * S.stride(1), *S.stride()[1:]  # what stands at (i, d) is found at (i, i + d)
    return S.as_strided(S.shape, skewed).permute(2, 0, 4, 3, 1, 5)


def _summed_over_rows(left: Tensor, right: Tensor, seen: Tensor, numbers: int) -> Tensor:
    """`Σ_u seen[i, u]·left[u]·right[u]`, flattened but for i; of so many rows at a time that products stay few."""
    rows = max(1, numbers // (left.shape[1] * right.shape[2]))
    total: Tensor | None = None
    for taps, some, others in zip(seen.split(rows, dim=1), left.split(rows), right.split(rows), strict=True):
        products = multiply(some, others).flatten(1)
        total = taps @ products if total is None else total.addmm_(taps, products)
        del products  # before there are the next
    assert total is not None
    return total


def sums(x: Tensor, height: Axis, width: Axis) -> Tensor:
    """Column sums of the patches `[channels·kernel]`."""
    total = x.sum(0, dtype=wide(x))
    down, across = (_seen(axis, total.dtype, x.device) for axis in (height, width))
    return (down.mT @ total @ across).flatten()


@lru_cache(maxsize=tuning.GEOMETRIES)
def _together(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which pairs of entries each pair of taps sees `[entries·entries, taps·taps]`; on the device once."""
    return axis.pairs().flatten(2).flatten(0, 1).to(device, dtype)


@lru_cache(maxsize=tuning.GEOMETRIES)
def _seen(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which entries each tap sees `[entries, taps]`."""
    return axis.windows().sum(0).to(device, dtype)


@lru_cache(maxsize=tuning.GEOMETRIES)
def _upper(channels: int, lags: int, across: int, device: torch.device) -> Tensor:
    """Entries of S whose first tap is not below the second; the others are their mirror images."""
    tap = torch.arange(lags).repeat_interleave(across).repeat(channels)
    return (tap[:, None] <= tap).to(device)
