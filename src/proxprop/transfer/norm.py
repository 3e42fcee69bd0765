"""Scale and shift after a normalisation: every channel is a group with two features and one output.

The normalised input x̂ does not depend on γ and β, so the layer is linear in them. It is computed again in
backward, from the input that BackProp saves as well. The bias of any layer whose weight is not trained is such a
shift.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.device import precision
from proxprop.solvers import FEATURE, MATRIX_FREE, Sizes
from proxprop.solvers.matmul import widened
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import Parameters, Shapes, nothing


class NormTransfer(Affine):
    """`Y = γ·X̂ + β`, channel by channel.

    Args:
        inputs: the tensors that x̂ is computed from; none where there are no samples or γ is not trained.
        like: a tensor of the output's shape.
        shapes: of γ and β.
        normalize: from inputs to x̂, as one of `torch.nn.functional` with its options.
        axis: the axis that holds channels, counted from the last where it is negative; None where γ has the shape of
            the last axes.
    """

    spaces = (FEATURE, MATRIX_FREE)

    def __init__(
        self,
        inputs: Sequence[Tensor],
        like: Tensor,
        shapes: Shapes,
        normalize: Callable[..., Tensor] | None = None,
        axis: int | None = None,
    ) -> None:
        super().__init__(like, shapes)
        self.normalized = normalize(*inputs) if normalize is not None else like
        self.scale = shapes[0] is not None
        first = (-len(self.weight_shape) if axis is None else axis) % like.dim()
        channels = range(first, first + len(self.weight_shape))
        self.broadcast = [size if i in channels else 1 for i, size in enumerate(like.shape)]
        self.sums = [i for i in range(like.dim()) if i not in channels]
        samples = prod([like.shape[i] for i in self.sums])
        self.sizes = Sizes(self.weight_shape.numel(), samples, int(self.scale) + self.ones, 1)

    @classmethod
    def without_samples(cls, shapes: Shapes, *options: Any) -> "NormTransfer":
        """A transfer that has no samples."""
        return cls([], nothing(*(shapes[0] or shapes[1] or [0])), shapes)

    @classmethod
    def channel_axis(cls, normalize: Callable[..., Tensor], axis: int | None = None) -> int | None:
        """The axis that holds channels, as given to the class."""
        return axis

    def gram(self) -> Tensor:
        """`[[Σx̂², Σx̂], [Σx̂, N]]` for every channel, by sums in place."""
        if not self.scale:
            return self.normalized.new_full(
                (self.sizes.groups, 1, 1), self.sizes.samples, dtype=precision(self.normalized)
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
        return values.sum(self.sums, dtype=precision(values)) if self.sums else widened(values)


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
