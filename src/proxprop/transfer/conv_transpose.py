"""Transposed convolutions: a convolution of the input with zeros between its entries."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.transfer.conv import ConvTransfer
from proxprop.transfer.conv_gram import from_patches
from proxprop.transfer.transfer import GramMethod


class ConvTransposeTransfer(ConvTransfer):
    """`Y = conv_transpose(X, W) + b`.

    Output position p sees input u through tap `i = p + padding − stride·u` (a multiple of the dilation), so the
    patches are cut at stride 1 from the input spread out by the stride, with the taps in reverse order.

    Args:
        inputs, like, geometry: as for `ConvTransfer`.
        shapes: of the weight, `[channels, outputs, *filter_size]`, and the bias.
    """

    transposed = True

    @staticmethod
    def _channels(weight: torch.Size, groups: int) -> tuple[int, int]:
        return weight[0], weight[1] * groups

    def _takes_patches(self) -> bool:
        """Whether gradients may come from patches: never, because a weight is laid out differently here."""
        return False

    def _choose(self) -> GramMethod:
        return from_patches("most of the spread-out input is zeros")

    def _padded(self, images: slice) -> Tensor:
        """The input spread out by the stride, with the border that makes every output position a patch."""
        g, batched = self.geometry, self.batched[images]
        space = batched.shape[2:]
        spread = [(size - 1) * step + 1 for size, step in zip(space, g.stride, strict=True)]
        result = batched.new_zeros(*batched.shape[:2], *spread)
        result[:, :, *[slice(None, None, step) for step in g.stride]] = batched
        borders = []
        for axis in reversed(range(self.dimensions)):
            reach = g.dilation[axis] * (g.filter_size[axis] - 1)
            before, after = (reach - width for width in g.padding[axis])
            borders += [before, after + self._extra()[axis]]
        return functional.pad(result, borders)

    def _extra(self) -> list[int]:
        """The output padding that the call took, read off its output's shape."""
        g, sizes = self.geometry, (self.batched_shape[2:], self.batched.shape[2:])
        walks = zip(*sizes, g.stride, g.padding, g.dilation, g.filter_size, strict=True)
        return [n - (m - 1) * step + sum(pad) - e * (k - 1) - 1 for n, m, step, pad, e, k in walks]

    def _windows(self, padded: Tensor) -> Tensor:
        """Views as of a convolution, with the taps in reverse order."""
        return super()._windows(padded).flip(list(range(2 + self.dimensions, 2 + 2 * self.dimensions)))

    def _steps(self) -> tuple[int, ...]:
        """How far apart patches are: every position of the spread-out input is an output's."""
        return (1,) * self.dimensions

    def _columns(self, weight: Tensor) -> Tensor:
        groups, _, _, outputs = self.sizes
        split = weight.reshape(groups, -1, outputs, prod(self.geometry.filter_size))
        return split.transpose(2, 3).flatten(1, 2)

    def _weight(self, columns: Tensor) -> Tensor:
        groups, _, _, outputs = self.sizes
        split = columns.reshape(groups, -1, prod(self.geometry.filter_size), outputs)
        return split.transpose(2, 3).reshape(self.weight_shape)
