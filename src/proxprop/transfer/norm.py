"""Scale and shift after a normalisation: every channel is a group with two features and one output.

The normalised input x̂ does not depend on γ and β, so the layer is linear in them. It is computed again in
backward, from the input that BackProp saves as well. A bias of any layer whose weight is not trained is such a shift.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import FEATURE, MATRIX_FREE, Sizes
from proxprop.solvers.matmul import wide
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes, without_samples


class NormTransfer(Affine):
    """`Y = γ·X̂ + β`, channel by channel.

    Args:
        normalized: x̂, in the layer's layout and the precision to solve in.
        axis: the axis of x̂ that is the first of γ and β.
        shape: the shape of γ and β.
        scale: whether γ is trained.
        bias: whether there is a β to train.
    """

    spaces = (FEATURE, MATRIX_FREE)

    def __init__(self, normalized: Tensor, axis: int, shape: torch.Size, scale: bool, bias: bool) -> None:
        super().__init__(shape, bias)
        self.normalized, self.scale = normalized, scale
        first = axis % normalized.dim()
        channels = range(first, first + len(shape))
        self.broadcast = [size if i in channels else 1 for i, size in enumerate(normalized.shape)]
        self.sums = [i for i in range(normalized.dim()) if i not in channels]
        samples = prod(normalized.shape[i] for i in self.sums)
        self.sizes = Sizes(shape.numel(), samples, int(scale) + self.ones, 1)

    def gram(self) -> Tensor:
        """`[[Σx̂², Σx̂], [Σx̂, N]]` for every channel, by sums in place."""
        if not self.scale:
            return self.normalized.new_full(
                (self.sizes.groups, 1, 1), self.sizes.samples, dtype=wide(self.normalized)
            )
        S = self._sum(self.normalized.square()).reshape(-1, 1, 1)
        return self._border(S, self._sum(self.normalized).reshape(-1, 1)) if self.bias else S

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
        weight = self._sum(G * self.normalized) if self.scale else None
        return weight, self._sum(G) if self.bias else None

    def to_features(self, parameters: Parameters) -> Tensor:
        """Scale and shift of each channel as its features."""
        return torch.stack([p.reshape(-1, 1) for p in parameters if p is not None], dim=1)

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        weight = V[:, 0].reshape(self.weight_shape) if self.scale else None
        return weight, V[:, -1].reshape(self.weight_shape) if self.bias else None

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over everything but channels."""
        return values.sum(self.sums, dtype=wide(values)) if self.sums else values.to(wide(values))


def bias_alone(bias: torch.Size | None, output: Tensor | None = None, axis: int = -1) -> NormTransfer:
    """The transfer of a layer whose weight is not trained.

    Args:
        bias: the bias's shape; None where nothing is trained.
        output: a tensor of the output's shape; None for a transfer without samples.
        axis: the output's axis that is the bias's.
    """
    shape = bias or torch.Size([0])
    if output is None:
        output, axis = without_samples(*shape), 1
    return NormTransfer(output, axis, shape, scale=False, bias=True)


@dataclass(frozen=True)
class NormCall(LayerCall):
    """A call of a normalisation layer.

    Attributes:
        normalize: from the saved tensors to x̂, as one of `torch.nn.functional` with its options.
        axis: the axis that holds channels, counted from the last where it is negative; None where γ has the shape of
            the last axes.
    """

    normalize: Callable[..., Tensor]
    axis: int | None = None

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> NormTransfer:
        """The transfer of this call."""
        weight, bias = shapes
        shape = weight or bias
        assert shape is not None
        axis = -len(shape) if self.axis is None else self.axis
        return NormTransfer(self.normalize(*inputs), axis, shape, weight is not None, bias is not None)

    def layout(self, shapes: Shapes) -> NormTransfer:
        """The transfer without samples."""
        weight, bias = shapes
        shape = weight or bias
        assert shape is not None
        return NormTransfer(without_samples(*shape), 1, shape, weight is not None, bias is not None)


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
