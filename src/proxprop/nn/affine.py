"""The base of layers with a weight and perhaps a bias: one forward for both modes."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from proxprop.nn.layer import ProximalLayer, under_autocast
from proxprop.transfer import LayerCall


class AffineLayer(ProximalLayer):
    """A layer whose output is a product of its inputs with a weight, plus perhaps a bias."""

    weight: Tensor
    bias: Any

    def _call(self) -> LayerCall:
        """How the layer is called."""
        raise NotImplementedError

    def _affine(
        self, function: Callable[..., Tensor], *inputs: Tensor, options: Sequence[Any] = ()
    ) -> Tensor:
        """The plain forward's output, with a direction attached to weight and bias, or S where that is deferred.

        Args:
            function: computes the plain forward from inputs, weight and bias.
            inputs: the layer's inputs.
            options: further arguments of the plain forward.
        """
        if self._solves():
            seen = [self._cast(tensor) for tensor in inputs]
            return self._product(function, self._call(), seen, self.weight, self.bias)
        seen = [self._cast(tensor) for tensor in inputs] if self._attached is not None else [*inputs]
        output = cast(Tensor, self.plain.forward(self, *seen, *options))
        return self._tap(output, seen, of=inputs[0])

    def _cast(self, input: Tensor) -> Tensor:
        """An input as the layer's product sees it."""
        return cast(Tensor, under_autocast(input))
