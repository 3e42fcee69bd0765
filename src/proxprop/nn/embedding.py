"""Embedding tables: a lookup is a product with rows that hold a single 1."""

from typing import Any

from torch import Tensor, nn

from proxprop.nn.layer import ProximalLayer, parameter_views
from proxprop.transfer import EmbeddingBagTransfer, EmbeddingTransfer, LayerCall


class Embedding(ProximalLayer, nn.Embedding):
    """`torch.nn.Embedding` whose `.grad` after backward is the proximal direction.

    `AᵀA` is the diagonal of how often each entry occurs, so every solver gives the exact direction
    `B[v] / (λ + count[v])` in closed form. Sparse gradients stay sparse; `padding_idx` receives none.
    """

    names = ("weight",)
    spaces = EmbeddingTransfer.spaces

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._solves():
            return self._tap(super().forward(input), (input,))
        return self._attach(self._plain_forward(input), self._call(), (input,), (self.weight,))

    def _call(self) -> LayerCall:
        return LayerCall(EmbeddingTransfer, (self.padding_idx, self.sparse))

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Layers that divide gradients by frequency are refused: that is another method."""
        return "scale_grad_by_freq=True rescales its gradient already" if module.scale_grad_by_freq else ""


class EmbeddingBag(ProximalLayer, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` (sum or mean) whose `.grad` after backward is the proximal direction.

    Entries that share a bag are coupled, so `AᵀA` is not diagonal; the system is solved in sample space, with
    one sample a bag.
    """

    spaces = EmbeddingBagTransfer.spaces

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """torch's own forward."""
        if not self._solves():
            return super().forward(input, offsets, per_sample_weights)
        # A view takes no sparse gradient.
        parameters = [self.weight] if self.sparse else parameter_views(self.weight)
        output = self._plain_forward(input, offsets, per_sample_weights)
        given = offsets is not None, per_sample_weights is not None
        options = *given, self.mode == "mean", self.padding_idx, self.sparse
        call = LayerCall(EmbeddingBagTransfer, options)
        tensors = [t for t in (input, offsets, per_sample_weights) if t is not None]
        return self._attach(output, call, tensors, parameters)

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Bags with a maximum, which is not linear in the table, and gradients divided by frequency are refused."""
        if module.mode == "max":
            return "mode='max' is not linear in its parameters"
        return Embedding.refusal(module)
