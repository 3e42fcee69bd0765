"""Bilinear layers: a row is the outer product of two inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import Sizes
from proxprop.solvers.rotation import rotate_both
from proxprop.transfer.affine import Affine
from proxprop.transfer.norm import bias_alone
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes, without_samples


class BilinearTransfer(Affine):
    """`Y[:, o] = xᵀ W[o] y + b[o]` for every pair of rows x, y.

    Args:
        left: `[*, features1]`, in the precision to solve in.
        right: `[*, features2]`, likewise.
        output_shape: `[*, outputs]`.
        weight_shape: `[outputs, features1, features2]`.
        bias: whether there is a bias to train.
    """

    def __init__(
        self, left: Tensor, right: Tensor, output_shape: torch.Size, weight_shape: torch.Size, bias: bool
    ) -> None:
        super().__init__(weight_shape, bias)
        self.left = left.reshape(-1, left.shape[-1])
        self.right = right.reshape(-1, right.shape[-1])
        self.output_shape = output_shape
        features = left.shape[-1] * right.shape[-1] + self.ones
        self.sizes = Sizes(1, len(self.left), features, output_shape[-1])

    def rows(self) -> Tensor:
        """Outer products `[1, samples, features1·features2]`."""
        return (self.left[:, :, None] * self.right[:, None, :]).flatten(1)[None]

    def sample_gram(self) -> Tensor:
        """`K = (XXᵀ)∘(YYᵀ)`: products of inner products, without forming the rows."""
        K = (self.left @ self.left.mT).mul_(self.right @ self.right.mT)[None]
        return K.add_(1.0) if self.bias else K

    def rotated_sample_gram(self) -> Tensor:
        """K, rotated after it was formed: it does not come from rows."""
        return rotate_both(self.sample_gram())

    def output(self, parameters: Parameters) -> Tensor:
        """`xᵀ W y + b`."""
        weight, bias = parameters
        assert weight is not None
        return functional.bilinear(self.left, self.right, weight, bias).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """`Σ G[s, o]·x_s y_sᵀ` and the column sums of G."""
        G = G.reshape(-1, G.shape[-1])
        weight = torch.einsum("so,si,sj->oij", G, self.left, self.right)
        return weight, G.sum(0) if self.bias else None


@dataclass(frozen=True)
class BilinearCall(LayerCall):
    """A call of a bilinear layer."""

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> Affine:
        """The transfer of this call."""
        (left, right), (weight, bias) = inputs, shapes
        if weight is None:
            return bias_alone(bias, like)
        return BilinearTransfer(left, right, like.shape, weight, bias is not None)

    def layout(self, shapes: Shapes) -> Affine:
        """The transfer without samples."""
        weight, bias = shapes
        if weight is None:
            return bias_alone(bias)
        outputs, left, right = map(without_samples, weight)
        return self.transfer([left, right], outputs, shapes)
