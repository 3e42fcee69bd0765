"""Exact Gram matrices of small two-dimensional convolutions from products of image rows.

Two taps of a filter see image rows at most `taps − 1` apart, so S is made of the products

    Z[u, (c, w), (d, c', w')] = Σ_b x[b, c, u, w]·x[b, c', u + d, w'],     0 ≤ d < taps

summed over the rows u that tap i sees, which then stand at tap `j = i + d`, and over the column pairs (w, w') that an
output position brings together. That is one batched product `[channels·width, batch] × [batch, taps·channels·width]`
for each image row and two small products with matrices of zeros and ones, whatever the stride and the padding: few
launches where `autocorrelation` needs many, and `width / taps³` of the FLOPs of unfolding.

Shapes: input `[batch, 1, channels, height, width]`; S `[1, channels·taps, channels·taps]` for all taps of a filter.
"""

import torch
from torch import Tensor
from torch.nn import functional

from proxprop import tuning
from proxprop.device import precision
from proxprop.solvers.matmul import in_terms, multiply
from proxprop.transfer.conv_geometry import Axis, kept, seen


def flops(axes: list[Axis], batch: int, channels: int) -> float:
    """FLOPs of the products of rows."""
    height, width = axes
    return 2.0 * batch * height.size * height.taps * (channels * width.size) ** 2


def gram(x: Tensor, axes: list[Axis], most: int = tuning.IMAGE_ROWS_BLOCK_NUMBERS) -> Tensor:
    """`S = AᵀA` of the patches of x, the ones column left out.

    Args:
        x: input `[batch, 1, channels, height, width]`, not padded.
        axes: how the convolution walks down and across.
        most: products of image rows that exist at a time, unless the input has more numbers.

    Returns:
        S `[1, channels·taps, channels·taps]`.
    """
    x, (height, width) = x.squeeze(1), axes
    batch, channels = x.shape[:2]
    lags, row = height.taps, channels * width.size
    numbers = max(most, x.numel())
    at_once = max(1, numbers // (height.size * width.size * lags * row))

    def product(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
        """S above its diagonal, from each row of the images and those that follow it, a few channels at a time."""
        left = left[:, : height.size * row].view(-1, height.size, channels, width.size).permute(1, 2, 3, 0)
        right = right.as_strided((height.size, len(right), lags * row), (row, right.stride(0), 1))
        blocks = [_block(some, right, height, width, numbers) for some in left.split(at_once, dim=1)]
        S = torch.cat(blocks).reshape(channels * lags * width.taps, -1)
        return S if total is None else total.add_(S)

    S = in_terms(product, [_rows(x, lags)], flops(axes, batch, channels))
    return torch.where(_upper(channels, lags, width.taps, x.device), S, S.mT)[None]


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
    here, lags, across = left.shape[1], height.taps, width.taps
    down = seen(height, precision(left), left.device).mT
    together = _together(width, precision(left), left.device)
    Z = _summed_over_rows(left.flatten(1, 2), right, down, numbers)
    Z = Z.view(lags, here, width.size, lags, -1, width.size).permute(0, 3, 1, 4, 2, 5)
    S = Z.reshape(-1, width.size**2) @ together
    S = S.view(lags, lags, here, -1, across, across)
    skewed = (lags - 1) * S.stride(1), *S.stride()[1:]  # what stands at (i, d) is found at (i, i + d)
    return S.as_strided(S.shape, skewed).permute(2, 0, 4, 3, 1, 5)


def _summed_over_rows(left: Tensor, right: Tensor, seen: Tensor, numbers: int) -> Tensor:
    """`Σ_u seen[i, u]·left[u]·right[u]`, flattened except for i, with at most `numbers` products at a time."""
    rows = max(1, numbers // (left.shape[1] * right.shape[2]))
    total: Tensor | None = None
    for taps, some, others in zip(seen.split(rows, dim=1), left.split(rows), right.split(rows), strict=True):
        products = multiply(some, others).flatten(1)
        total = taps @ products if total is None else total.addmm_(taps, products)
        del products  # before the next ones are made
    assert total is not None
    return total


@kept
def _together(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whether taps see entries from the same output position, `[entries·entries, taps·taps]`; on the device once."""
    at, sees = axis.positions(), axis.seen()
    together = at[:, None, :, None] == at[:, None, :]
    together &= sees[:, None, :, None] & sees[:, None, :]
    return together.flatten(2).flatten(0, 1).to(device, dtype)


@kept
def _upper(channels: int, lags: int, across: int, device: torch.device) -> Tensor:
    """Entries of S whose first tap is not below the second; the others are their mirror images."""
    tap = torch.arange(lags).repeat_interleave(across).repeat(channels)
    return (tap[:, None] <= tap).to(device)
