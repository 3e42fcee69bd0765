"""Bilinear layers: a row is the outer product of two inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import Sizes
from proxprop.solvers.rotation import rotate_both
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import Parameters, Shapes, nothing


class BilinearTransfer(Affine):
    """`Y[:, o] = xᵀ W[o] y + b[o]` for every pair of rows x, y.

    Args:
        inputs: `[*, features1]` and `[*, features2]`.
        like: `[*, outputs]`.
        shapes: of the weight, `[outputs, features1, features2]`, and the bias.
    """

    def __init__(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> None:
        super().__init__(like, shapes)
        self.left, self.right = (input.reshape(-1, input.shape[-1]) for input in inputs)
        features = self.left.shape[1] * self.right.shape[1] + self.ones
        self.sizes = Sizes(1, len(self.left), features, like.shape[-1])

    @classmethod
    def without_samples(cls, shapes: Shapes) -> "BilinearTransfer":
        """A transfer that has no samples."""
        assert shapes[0] is not None
        outputs, left, right = map(nothing, shapes[0])
        return cls([left, right], outputs, shapes)

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
