"""Layouts that no layer has by itself: features in blocks, and a weight that layers share."""

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import FEATURE, Sizes
from proxprop.solvers.matmul import transposed_square
from proxprop.transfer.linear import LinearTransfer
from proxprop.transfer.transfer import Layout, Parameters, Transfer


class BlockLayout(Layout):
    """A layer's features in blocks of neighbours, between which S is taken to be zero; the bias is in the last.

    Blocks are groups of the system. They are equally wide: the last one is padded with features that are always zero.

    Args:
        whole: the layer's own layout.
        width: most features of a block.
    """

    spaces = (FEATURE,)

    def __init__(self, whole: Layout, width: int) -> None:
        groups, samples, features, outputs = whole.sizes
        self.whole, self.count = whole, -(-features // width)
        self.width = -(-features // self.count)
        self.sizes = Sizes(groups * self.count, samples, self.width, outputs)

    @property
    def behind(self) -> int:
        """Number of features that pad the last block."""
        return self.count * self.width - self.whole.sizes.features

    def to_features(self, parameters: Parameters) -> Tensor:
        """The layer's features, block by block."""
        return functional.pad(self.whole.to_features(parameters), (0, 0, 0, self.behind)).reshape(
            self.sizes.groups, self.width, -1
        )

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        groups, _, features, outputs = self.whole.sizes
        return self.whole.from_features(V.reshape(groups, -1, outputs)[:, :features])

    def blocks_of(self, S: Tensor) -> Tensor:
        """The blocks on the diagonal of `S [groups, features, features]`."""
        padded = functional.pad(S, (0, self.behind, 0, self.behind))
        blocks: Tensor = padded.view(-1, self.count, self.width, self.count, self.width).diagonal(0, 1, 3)
        return blocks.movedim(-1, 1).flatten(0, 1)

    def gram_of(self, transfer: Transfer) -> Tensor:
        """The blocks of a call's S; those of a linear layer are all that is formed."""
        if not isinstance(transfer, LinearTransfer):
            return self.blocks_of(transfer.gram())
        (A,) = transfer.rows()
        ones = [A.new_ones(len(A), 1)] if transfer.bias else []
        A = functional.pad(torch.cat([A, *ones], 1), (0, self.behind))
        return transposed_square(A.view(len(A), self.count, self.width).transpose(0, 1))


class JointLayout(Layout):
    """A weight shared by layers that have biases of their own: features are the weight's, then a bias each.

    Args:
        weight: the layout of the weight alone.
        biases: how many biases there are.
    """

    spaces = (FEATURE,)

    def __init__(self, weight: Layout, biases: int) -> None:
        groups, samples, features, outputs = weight.sizes
        self.weight, self.biases = weight, biases
        self.sizes = Sizes(groups, samples, features + biases, outputs)

    def to_features(self, parameters: Parameters) -> Tensor:
        """The weight's features, then one for each bias."""
        weight, *biases = parameters
        groups, _, _, outputs = self.sizes
        rows = [bias.reshape(groups, 1, outputs) for bias in biases if bias is not None]
        return torch.cat([self.weight.to_features((weight, None)), *rows], dim=-2)

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        features = V.shape[-2] - self.biases
        weight, _ = self.weight.from_features(V[:, :features])
        return weight, *(V[:, features + i].reshape(-1).clone() for i in range(self.biases))
