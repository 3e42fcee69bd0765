"""Bilinear layers: a row is the outer product of two inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import Sizes
from proxprop.solvers.rotation import rotate_both
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes


class BilinearTransfer(Affine):
    """`Y[:, o] = xᵀ W[o] y + b[o]` for every pair of rows x, y.

    Args:
        left: `[*, features1]`, in the precision to solve in.
        right: `[*, features2]`, likewise.
        output_shape: `[*, outputs]`.
        weight_shape: `[outputs, features1, features2]`, or None where the weight is not trained.
        bias: whether there is a bias to train.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        output_shape: torch.Size,
        weight_shape: torch.Size | None,
        bias: bool,
    ) -> None:
        super().__init__(weight_shape, bias)
        self.left = left.reshape(-1, left.shape[-1])
        self.right = right.reshape(-1, right.shape[-1])
        self.output_shape = output_shape
        inputs = left.shape[-1] * right.shape[-1] if weight_shape else 0
        self.sizes = Sizes(1, len(self.left), inputs + self.ones, output_shape[-1])

    def rows(self) -> Tensor:
        """Outer products `[1, samples, features1·features2]`."""
        if self.weight_shape is None:
            return self.left[None, :, :0]
        return (self.left[:, :, None] * self.right[:, None, :]).flatten(1)[None]

    def sample_gram(self) -> Tensor:
        """`K = (XXᵀ)∘(YYᵀ)`: products of inner products, without forming the rows."""
        if self.weight_shape is None:
            return super().sample_gram()
        K = (self.left @ self.left.mT).mul_(self.right @ self.right.mT)[None]
        return K.add_(1.0) if self.bias else K

    def rotated_sample_gram(self) -> Tensor:
        """K, rotated after it was formed: it does not come from rows."""
        return rotate_both(self.sample_gram())

    def output(self, parameters: Parameters) -> Tensor:
        """`xᵀ W y + b`."""
        weight, bias = parameters
        if weight is None:
            assert bias is not None
            return bias.expand(self.output_shape)
        return functional.bilinear(self.left, self.right, weight, bias).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """`Σ G[s, o]·x_s y_sᵀ` and the column sums of G."""
        G = G.reshape(-1, G.shape[-1])
        weight = None
        if self.weight_shape is not None:
            weight = torch.einsum("so,si,sj->oij", G, self.left, self.right)
        return weight, G.sum(0) if self.bias else None


@dataclass(frozen=True)
class BilinearCall(LayerCall):
    """A call of a bilinear layer."""

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> BilinearTransfer:
        """The transfer of this call."""
        (left, right), (weight, bias) = inputs, shapes
        return BilinearTransfer(left, right, like.shape, weight, bias is not None)

    def layout(self, shapes: Shapes) -> BilinearTransfer:
        """The transfer without samples."""
        weight, bias = shapes
        outputs, left, right = (bias[0] if bias else 0, 1, 1) if weight is None else weight
        meta = torch.empty(0, device="meta")
        return self.transfer((meta.view(0, left), meta.view(0, right)), meta.view(0, outputs), shapes)
