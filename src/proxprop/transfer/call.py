"""How a layer was called, so that backward can make its transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxprop.solvers.matmul import cast
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

    def without_weight(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What backward needs of the inputs where the weight is not trained: of a shift, their precision alone."""
        return [tensor.new_zeros(1) for tensor in inputs] if issubclass(self.kind, Affine) else inputs

    def layout(self, shapes: Shapes) -> Transfer:
        """The transfer without samples; see `Transfer.without_samples`."""
        if issubclass(self.kind, Affine) and shapes[0] is None:
            return NormTransfer.without_samples(shapes)
        return self.kind.without_samples(shapes, *self.options)

    def in_precision(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Tensors of this call in the precision to solve in; a GPU keeps bfloat16 where nothing else came."""
        short = dtype == torch.float32 and tensors[0].is_cuda and self.kind.takes_bfloat16
        if short and all(tensor.dtype == torch.bfloat16 for tensor in tensors):
            return tensors
        return in_precision(tensors, dtype)

    def transfer_for_sums(
        self, inputs: Sequence[Tensor], output: torch.Size, shapes: Shapes, dtype: torch.dtype
    ) -> Transfer:
        """The transfer of this call with an output of this shape, for S in this precision."""
        inputs = self.in_precision(inputs, dtype)
        dtype = torch.bfloat16 if inputs[0].dtype == torch.bfloat16 else dtype
        return self.transfer(inputs, inputs[0].new_empty((), dtype=dtype).expand(output), shapes)


def in_precision(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating tensors in this precision, others as they are."""
    return [cast(tensor, dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
