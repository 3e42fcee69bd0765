"""Scale and shift after a normalisation: every channel is a group with two features and one output.

The normalised input x̂ does not depend on γ and β, so the layer is linear in them. It is computed again in
backward, from the input that BackProp saves as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import FEATURE, MATRIX_FREE, Sizes
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes


class NormTransfer(Affine):
    """`Y = γ·X̂ + β`, channel by channel.

    Args:
        normalized: x̂, in the layer's layout and the precision to solve in.
        axis: the axis that holds channels, counted from the last where it is negative; None where γ has the shape
            of the last axes.
        weight_shape: γ's shape, or None where it is not trained.
        bias_shape: β's shape, or None where it is not trained or not there.
    """

    spaces = (FEATURE, MATRIX_FREE)

    def __init__(
        self,
        normalized: Tensor,
        axis: int | None,
        weight_shape: torch.Size | None,
        bias_shape: torch.Size | None,
    ) -> None:
        super().__init__(weight_shape, bias_shape is not None)
        self.normalized = normalized
        shape = weight_shape or bias_shape
        assert shape is not None
        trailing = (-len(shape) if axis is None else axis) % normalized.dim()
        self.channels = shape
        self.broadcast = [1] * trailing + list(shape) + [1] * (normalized.dim() - trailing - len(shape))
        self.sums = [i for i in range(normalized.dim()) if not trailing <= i < trailing + len(shape)]
        samples = normalized.numel() // shape.numel()
        self.sizes = Sizes(shape.numel(), samples, int(weight_shape is not None) + self.ones, 1)

    def gram(self) -> Tensor:
        """`[[Σx̂², Σx̂], [Σx̂, N]]` for every channel, by sums in place."""
        squares = self._sum(self.normalized.square()).reshape(-1, 1, 1) if self.weight_shape else None
        if not self.bias:
            assert squares is not None
            return squares
        if squares is None:
            return self.normalized.new_full((self.sizes.groups, 1, 1), float(self.sizes.samples))
        return self._border(squares, self._sum(self.normalized).reshape(-1, 1))

    def sampled_gram(self, index: Tensor) -> Tensor:
        """S itself: sums over all samples cost no more than choosing among them."""
        return self.gram()

    def output(self, parameters: Parameters) -> Tensor:
        """`γ·x̂ + β`."""
        weight, bias = (p.view(self.broadcast) if p is not None else None for p in parameters)
        if weight is None:
            assert bias is not None
            return bias.expand_as(self.normalized)
        scaled = self.normalized * weight
        return scaled if bias is None else scaled + bias

    def gradient(self, G: Tensor) -> Parameters:
        """`Σ G·x̂` and `ΣG`."""
        weight = self._sum(G * self.normalized) if self.weight_shape else None
        return weight, self._sum(G) if self.bias else None

    def from_features(self, V: Tensor) -> Parameters:
        """Scale and shift in their own shape."""
        return tuple(p.view(self.channels) if p is not None else None for p in super().from_features(V))

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over everything but channels."""
        return values.sum(self.sums).view(self.channels) if self.sums else values.view(self.channels)


@dataclass(frozen=True)
class NormCall(LayerCall):
    """A call of a normalisation layer.

    Attributes:
        normalize: from the saved tensors to x̂, as one of `torch.nn.functional` with its options.
        axis: as in `NormTransfer`.
    """

    normalize: Callable[..., Tensor]
    axis: int | None = None

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> NormTransfer:
        """The transfer of this call."""
        return NormTransfer(self.normalize(*inputs), self.axis, *shapes)

    def layout(self, shapes: Shapes) -> NormTransfer:
        """The transfer without samples."""
        weight, bias = shapes
        channels = weight or bias
        assert channels is not None
        return NormTransfer(torch.empty(0, *channels, device="meta"), None, weight, bias)


def batch_norm(
    input: Tensor, mean: Tensor | None = None, variance: Tensor | None = None, *, eps: float
) -> Tensor:
    """Normalise by the running statistics where they are given, else by the batch's."""
    return functional.batch_norm(input, mean, variance, training=mean is None, eps=eps)


def instance_norm(
    input: Tensor, mean: Tensor | None = None, variance: Tensor | None = None, *, eps: float, dimensions: int
) -> Tensor:
    """Normalise by the running statistics where they are given, else by each image's."""
    batched = input if input.dim() == dimensions + 2 else input[None]
    found = functional.instance_norm(batched, mean, variance, use_input_stats=mean is None, eps=eps)
    return found.view_as(input)
