"""How a layer was called, so that backward can make its transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from proxprop.transfer.affine import Affine
from proxprop.transfer.norm import NormTransfer
from proxprop.transfer.transfer import Shapes, Transfer


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer, without the tensors, so that it keeps no memory alive.

    Attributes:
        kind: the transfer's class.
        options: its arguments beside tensors and shapes.
    """

    kind: type[Transfer]
    options: tuple[Any, ...] = ()

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> Transfer:
        """The transfer of this call; see `Transfer`.

        A bias whose weight is not trained is a shift, whatever the layer.
        """
        if issubclass(self.kind, Affine) and shapes[0] is None:
            return NormTransfer([], like, shapes, axis=self.kind.channel_axis(*self.options))
        return self.kind(inputs, like, shapes, *self.options)

    def layout(self, shapes: Shapes) -> Transfer:
        """The transfer without samples; see `Transfer.without_samples`."""
        if issubclass(self.kind, Affine) and shapes[0] is None:
            return NormTransfer.without_samples(shapes)
        return self.kind.without_samples(shapes, *self.options)
