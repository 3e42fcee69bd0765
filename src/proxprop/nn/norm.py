"""Scale and shift of normalisation layers: `y = γ·x̂ + β`, a system of two features for every channel."""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.layer import ProximalLayer, parameter_views
from proxprop.transfer import LayerCall, NormTransfer
from proxprop.transfer.norm import batch_norm, instance_norm


class NormLayer(ProximalLayer):
    """The base of normalisation layers. A subclass says how it normalises and which axis holds channels."""

    spaces = NormTransfer.spaces

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._solves():
            statistics = self._statistics()
            return self._tap(cast(Tensor, super().forward(input)), (input, *statistics))
        parameters = parameter_views(*(self._parameters.get(name) for name in self.names))
        output = self._plain_forward(input)
        return self._attach(output, self._call(), (input, *self._statistics()), parameters)

    def _call(self) -> LayerCall:
        """How the layer normalises. It holds no reference to the layer's tensors."""
        raise NotImplementedError

    def _statistics(self) -> tuple[Tensor, ...]:
        """Tensors beside the input that x̂ depends on: running statistics, in evaluation."""
        running = [self._buffers.get(name) for name in ("running_mean", "running_var")]
        return () if self.training else tuple(buffer for buffer in running if buffer is not None)

    @classmethod
    def refusal(cls, module: Any) -> str:
        """A layer without scale and shift is refused: it has nothing to solve."""
        return "it has no scale to train" if module.weight is None else ""


class LayerNorm(NormLayer, nn.LayerNorm):
    """`torch.nn.LayerNorm` whose scale and shift receive their proximal direction; see `Linear`."""

    def _call(self) -> LayerCall:
        shape, eps = self.normalized_shape, self.eps
        return LayerCall(NormTransfer, (partial(functional.layer_norm, normalized_shape=shape, eps=eps),))


class RMSNorm(NormLayer, nn.RMSNorm):
    """`torch.nn.RMSNorm` whose scale receives its proximal direction; see `Linear`."""

    def _call(self) -> LayerCall:
        shape, eps = self.normalized_shape, self.eps
        return LayerCall(NormTransfer, (partial(functional.rms_norm, normalized_shape=shape, eps=eps),))


class GroupNorm(NormLayer, nn.GroupNorm):
    """`torch.nn.GroupNorm` whose scale and shift receive their proximal direction; see `Linear`."""

    def _call(self) -> LayerCall:
        groups, eps = self.num_groups, self.eps
        return LayerCall(NormTransfer, (partial(functional.group_norm, num_groups=groups, eps=eps), 1))


class _BatchNorm(NormLayer):
    """Batch normalisation, with the batch's statistics in training and the running ones in evaluation."""

    def _call(self) -> LayerCall:
        return LayerCall(NormTransfer, (partial(batch_norm, eps=cast(nn.BatchNorm2d, self).eps), 1))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose scale and shift receive their proximal direction; see `Linear`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose scale and shift receive their proximal direction; see `Linear`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose scale and shift receive their proximal direction; see `Linear`."""


class _InstanceNorm(NormLayer):
    """Instance normalisation; unbatched inputs have their channels first."""

    dimensions: int

    def _call(self) -> LayerCall:
        normalize = partial(instance_norm, eps=cast(nn.InstanceNorm2d, self).eps, dimensions=self.dimensions)
        return LayerCall(NormTransfer, (normalize, -1 - self.dimensions))


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` whose scale and shift receive their proximal direction; see `Linear`."""

    dimensions = 1


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` whose scale and shift receive their proximal direction; see `Linear`."""

    dimensions = 2


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` whose scale and shift receive their proximal direction; see `Linear`."""

    dimensions = 3
