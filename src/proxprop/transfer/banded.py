"""Exact Gram matrices of small two-dimensional convolutions from products of image rows.

Two taps of a kernel see image rows at most `kernel − 1` apart, so S is made of the products

    Z[u, (c, w), (d, c', w')] = Σ_b x[b, c, u, w]·x[b, c', u + d, w'],     0 ≤ d < kernel

summed over the rows u and the column pairs (w, w') that an output position brings together. That is one batched product
`[channels·width, batch] × [batch, kernel·channels·width]` for each image row and two small products with matrices of
zeros and ones, whatever the stride and the padding: few launches where `autocorrelation` needs many, and
`width / kernel³` of the FLOPs of unfolding.

Shapes: input `[batch, channels, height, width]`; S `[channels·kernel, channels·kernel]`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solve.products import in_parts, multiply


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

    def lags(self) -> Tensor:
        """The same for `v = u + d` with `d = j − i ≥ 0`, `[u, d, i, j]`; zeros elsewhere."""
        d = torch.arange(self.kernel)
        ahead = functional.pad(self.pairs(), (0, 0, 0, 0, 0, self.kernel))
        u = torch.arange(self.size)[:, None]
        return ahead[u, u + d] * (d - d[:, None] == d[:, None, None])


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
    channels, lags, across = x.shape[1], height.kernel, width.kernel
    Z = _products(x, lags).view(height.size, channels, width.size, lags, channels, width.size)
    together, lagged = _sums(height, width, x.dtype, x.device)
    Z = Z.permute(0, 3, 1, 4, 2, 5).reshape(-1, width.size**2) @ together
    S = lagged @ Z.view(height.size * lags, -1)
    S = S.view(lags, lags, channels, channels, across, across).permute(2, 0, 4, 3, 1, 5)
    S = S.reshape(channels * lags * across, -1)
    return torch.where(_upper(channels, lags, across, x.device), S, S.mT)


def _products(x: Tensor, lags: int) -> Tensor:
    """Z `[height, channels·width, lags·channels·width]`."""
    batch, channels, height, width = x.shape
    row = channels * width
    rows = functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, lags - 1)).reshape(batch, -1)

    def product(left: Tensor, right: Tensor) -> Tensor:
        """For each row of the image: it, and those that follow it."""
        left = left[:, : height * row].view(-1, height, row).permute(1, 2, 0)
        return multiply(left, right.as_strided((height, len(right), lags * row), (row, right.stride(0), 1)))

    return in_parts(product, rows, rows, flops=2.0 * batch * height * lags * row**2)


def sums(x: Tensor, height: Axis, width: Axis) -> Tensor:
    """Column sums of the patches `[channels·kernel]`."""
    down, across = _seen(height, x.dtype, x.device), _seen(width, x.dtype, x.device)
    return (down.mT @ x.sum(0) @ across).flatten()


@lru_cache(maxsize=32)
def _sums(height: Axis, width: Axis, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which products of columns each pair of taps takes `[u·v, i·j]`, and of rows `[i·j, u·d]`; on the device once."""
    together = width.pairs().flatten(2).flatten(0, 1)
    lagged = height.lags().permute(2, 3, 0, 1).flatten(2).flatten(0, 1)
    return together.to(device, dtype), lagged.to(device, dtype)


@lru_cache(maxsize=32)
def _seen(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which entries each tap sees `[entries, taps]`."""
    return axis.windows().sum(0).to(device, dtype)


@lru_cache(maxsize=32)
def _upper(channels: int, lags: int, across: int, device: torch.device) -> Tensor:
    """Entries of S whose first tap is not below the second; the others are their mirror images."""
    tap = torch.arange(lags).repeat_interleave(across).repeat(channels)
    return (tap[:, None] <= tap).to(device)
