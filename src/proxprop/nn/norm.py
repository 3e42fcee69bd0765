"""Scale and shift of normalisation layers: `y = γ·x̂ + β`, a system of two features for every channel.

The normalised input x̂ does not depend on γ and β, so the layer is linear in them. It is computed again in
backward, from the input that BackProp saves as well.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.backward import Shapes
from proxprop.nn.layer import Part, ProximalLayer, handles
from proxprop.transfer import NormTransfer


class NormLayer(ProximalLayer):
    """What the normalisation layers share. A subclass says how it normalises and which axis holds channels."""

    spaces = NormTransfer.spaces

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._trains():
            return cast(Tensor, super().forward(input))
        parameters = handles(*(self._parameters.get(name) for name in ("weight", "bias")))
        output = cast(Tensor, self.plain.forward(constant(self, self.plain), input))
        build = functools.partial(_norm_transfer, self._normalize(), self._channel_axis(input))
        return self._attach(output, build, (input, *self._statistics()), parameters)

    def _parts(self) -> dict[str, Part]:
        return self._part(_norm_layout, "weight", "bias")

    def _normalize(self) -> Any:
        """A function from the saved inputs to x̂; holds no reference to this layer's tensors."""
        raise NotImplementedError

    def _statistics(self) -> tuple[Tensor, ...]:
        """Tensors beside the input that x̂ depends on: running statistics, in evaluation."""
        running = [self._buffers.get(name) for name in ("running_mean", "running_var")]
        return () if self.training else tuple(buffer for buffer in running if buffer is not None)

    def _channel_axis(self, input: Tensor) -> int | None:
        """The axis whose entries have a γ each; None where γ has the shape of the last axes."""
        return None

    @classmethod
    def refusal(cls, module: Any) -> str:
        """A layer without scale and shift has nothing to solve."""
        return "it has no scale to train" if module.weight is None else ""


class LayerNorm(NormLayer, nn.LayerNorm):
    """`torch.nn.LayerNorm` whose scale and shift receive their proximal direction; see `Linear`."""

    plain = nn.LayerNorm

    def _normalize(self) -> Any:
        return functools.partial(_layer_norm, self.normalized_shape, self.eps)


class RMSNorm(NormLayer, nn.RMSNorm):
    """`torch.nn.RMSNorm` whose scale receives its proximal direction; see `Linear`."""

    plain = nn.RMSNorm

    def _normalize(self) -> Any:
        return functools.partial(_rms_norm, self.normalized_shape, self.eps)


class GroupNorm(NormLayer, nn.GroupNorm):
    """`torch.nn.GroupNorm` whose scale and shift receive their proximal direction; see `Linear`."""

    plain = nn.GroupNorm

    def _normalize(self) -> Any:
        return functools.partial(_group_norm, self.num_groups, self.eps)

    def _channel_axis(self, input: Tensor) -> int | None:
        return 1


class _BatchNorm(NormLayer):
    """Batch normalisation, with the batch's statistics in training and the running ones in evaluation."""

    def _normalize(self) -> Any:
        norm = cast(nn.BatchNorm2d, self)
        return functools.partial(_batch_norm, norm.eps)

    def _channel_axis(self, input: Tensor) -> int | None:
        return 1


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain = nn.BatchNorm3d


class _InstanceNorm(NormLayer):
    """Instance normalisation; unbatched inputs have their channels first."""

    dimensions: int

    def _normalize(self) -> Any:
        norm = cast(nn.InstanceNorm2d, self)
        return functools.partial(_instance_norm, norm.eps, self.dimensions)

    def _channel_axis(self, input: Tensor) -> int | None:
        return input.dim() - self.dimensions - 1


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain, dimensions = nn.InstanceNorm1d, 1


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain, dimensions = nn.InstanceNorm2d, 2


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` whose scale and shift receive their proximal direction; see `Linear`."""

    plain, dimensions = nn.InstanceNorm3d, 3


def constant(layer: nn.Module, plain: type[nn.Module]) -> nn.Module:
    """The layer as its plain class with detached parameters; buffers and everything else are the layer's own."""
    copied = plain.__new__(plain)
    parameters = {name: p.detach() if p is not None else None for name, p in layer._parameters.items()}
    vars(copied).update(vars(layer), _parameters=parameters)
    return copied


def _norm_transfer(
    normalize: Any, axis: int | None, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes
) -> NormTransfer:
    weight, bias = shapes
    return NormTransfer(normalize(*inputs), axis, weight, bias)


def _norm_layout(shapes: Shapes) -> NormTransfer:
    weight, bias = shapes
    channels = weight or bias
    assert channels is not None
    return NormTransfer(torch.empty(0, *channels, device="meta"), None, weight, bias)


def _layer_norm(shape: tuple[int, ...], eps: float, input: Tensor) -> Tensor:
    return functional.layer_norm(input, shape, eps=eps)


def _rms_norm(shape: tuple[int, ...], eps: float | None, input: Tensor) -> Tensor:
    return functional.rms_norm(input, shape, eps=eps)


def _group_norm(groups: int, eps: float, input: Tensor) -> Tensor:
    return functional.group_norm(input, groups, eps=eps)


def _batch_norm(
    eps: float, input: Tensor, mean: Tensor | None = None, variance: Tensor | None = None
) -> Tensor:
    return functional.batch_norm(input, mean, variance, training=mean is None, eps=eps)


def _instance_norm(
    eps: float, dimensions: int, input: Tensor, mean: Tensor | None = None, variance: Tensor | None = None
) -> Tensor:
    batched = input if input.dim() == dimensions + 2 else input[None]
    result = functional.instance_norm(batched, mean, variance, use_input_stats=mean is None, eps=eps)
    return result.view_as(input)
