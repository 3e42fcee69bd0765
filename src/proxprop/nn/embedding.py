"""Embedding tables: a lookup is a product with rows that hold a single 1."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.backward import Shapes
from proxprop.nn.layer import Part, ProximalLayer, handles
from proxprop.transfer import EmbeddingBagTransfer, EmbeddingTransfer


class Embedding(ProximalLayer, nn.Embedding):
    """`torch.nn.Embedding` whose `.grad` after backward is the proximal direction.

    `AᵀA` is the diagonal of how often each entry occurs, so every solver gives the exact direction
    `B[v] / (λ + count[v])` in closed form. Sparse gradients stay sparse; `padding_idx` receives none.
    """

    plain = nn.Embedding
    spaces = EmbeddingTransfer.spaces

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._trains():
            return super().forward(input)
        output = functional.embedding(
            input, self.weight.detach(), self.padding_idx, self.max_norm, self.norm_type
        )
        build = functools.partial(_embedding_transfer, self.padding_idx, self.sparse)
        return self._attach(output, build, (input,), (self.weight,))

    def _parts(self) -> dict[str, Part]:
        return self._part(functools.partial(_embedding_layout, self.sparse), "weight")

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Gradients divided by frequency are already another method."""
        return "scale_grad_by_freq=True rescales its gradient already" if module.scale_grad_by_freq else ""


class EmbeddingBag(ProximalLayer, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` (sum or mean) whose `.grad` after backward is the proximal direction.

    Entries that share a bag are coupled, so `AᵀA` is not diagonal; the system is solved in sample space, with
    one sample a bag.
    """

    plain = nn.EmbeddingBag
    spaces = EmbeddingBagTransfer.spaces

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """torch's own forward."""
        if not self._trains():
            return super().forward(input, offsets, per_sample_weights)
        parameters = [self.weight] if self.sparse else handles(self.weight)  # a view takes no sparse gradient
        output = functional.embedding_bag(
            input, self.weight.detach(), offsets, self.max_norm, self.norm_type, False, self.mode,
            False, per_sample_weights, self.include_last_offset, self.padding_idx,
        )  # fmt: skip
        given = [offsets is not None, per_sample_weights is not None]
        build = functools.partial(_embedding_bag_transfer, given, self.mode, self.padding_idx, self.sparse)
        tensors = [t for t in (input, offsets, per_sample_weights) if t is not None]
        return self._attach(output, build, tensors, parameters)

    @classmethod
    def refusal(cls, module: Any) -> str:
        """A maximum is not linear in the table; gradients divided by frequency are another method."""
        if module.mode == "max":
            return "mode='max' is not linear in its parameters"
        return "scale_grad_by_freq=True rescales its gradient already" if module.scale_grad_by_freq else ""


def _embedding_transfer(
    padding: int | None, sparse: bool, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes
) -> EmbeddingTransfer:
    (index,), (weight,) = inputs, shapes
    assert weight is not None
    return EmbeddingTransfer(index, like, weight, padding, sparse)


def _embedding_layout(sparse: bool, shapes: Shapes) -> EmbeddingTransfer:
    (weight,) = shapes
    assert weight is not None
    index = torch.empty(0, dtype=torch.long, device="meta")
    return EmbeddingTransfer(index, torch.empty(0, weight[1], device="meta"), weight, None, sparse)


def _embedding_bag_transfer(
    given: list[bool],
    mode: str,
    padding: int | None,
    sparse: bool,
    inputs: Sequence[Tensor],
    like: Tensor,
    shapes: Shapes,
) -> EmbeddingBagTransfer:
    following = iter(inputs)
    index = next(following)
    offsets, weights = (next(following) if present else None for present in given)
    (table,) = shapes
    assert table is not None
    return EmbeddingBagTransfer(index, offsets, weights, like, table, mode == "mean", padding, sparse)
