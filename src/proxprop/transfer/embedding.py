"""Embedding tables: a row of A holds the coefficients of the entries that were looked up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import DIAGONAL, SAMPLE, Sizes
from proxprop.transfer.transfer import Parameters, Shapes, Transfer, nothing


class Table(Transfer):
    """The base of lookups: one parameter `[entries, outputs]`, whose gradient may be sparse.

    Args:
        index: the entries that were looked up, of any shape.
        coefficients: the factor of each, in the shape of index.
        shapes: of the table.
        padding: an entry that is not trained.
        sparse: whether the gradient is to be sparse.
    """

    def __init__(
        self, index: Tensor, coefficients: Tensor, shapes: Shapes, padding: int | None, sparse: bool
    ) -> None:
        (shape,) = shapes
        assert shape is not None
        self.index, self.coefficients = index.reshape(-1), coefficients.reshape(-1)
        if padding is not None:
            self.coefficients = self.coefficients * (self.index != padding)
        self.shape, self.sparse = shape, sparse

    def to_features(self, parameters: Parameters) -> Tensor:
        """The table itself, dense."""
        (table,) = parameters
        assert table is not None
        return (table.to_dense() if table.is_sparse else table)[None]

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        return (V[0],)

    def _lookup(self, parameters: Parameters) -> Tensor:
        """The entries `[items, outputs]`, each multiplied by its coefficient."""
        (table,) = parameters
        assert table is not None
        return functional.embedding(self.index, table) * self.coefficients[:, None]

    def _scatter(self, values: Tensor, coefficients: Tensor) -> Parameters:
        """The table's gradient: values `[items, outputs]`, multiplied and summed into their entries."""
        values = values * coefficients[:, None]
        if self.sparse:
            index = self.index[None]
            return (torch.sparse_coo_tensor(index, values, self.shape, check_invariants=False),)
        return (values.new_zeros(self.shape).index_add_(0, self.index, values),)


class EmbeddingTransfer(Table):
    """`Y = W[index]`; `AᵀA` is the diagonal of how often each entry occurs.

    Args:
        inputs: the index.
        like: a tensor of the output's shape in the precision to solve in.
        shapes, padding, sparse: as for `Table`.
    """

    spaces = (DIAGONAL,)

    def __init__(
        self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes, padding: int | None, sparse: bool
    ) -> None:
        (index,) = inputs
        super().__init__(index, torch.ones_like(index, dtype=like.dtype), shapes, padding, sparse)
        self.output_shape = like.shape
        self.sizes = Sizes(1, self.index.numel(), *self.shape)

    @classmethod
    def without_samples(cls, shapes: Shapes, *options: Any) -> "EmbeddingTransfer":
        """A transfer that has no samples."""
        assert shapes[0] is not None
        return cls([nothing(dtype=torch.long)], nothing(shapes[0][1]), shapes, *options)

    def output(self, parameters: Parameters) -> Tensor:
        """The entries looked up; zero at padding."""
        return self._lookup(parameters).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """G summed by entry."""
        return self._scatter(G.reshape(-1, self.shape[1]), self.coefficients)

    def diagonal(self) -> Tensor:
        """How often each entry occurs `[1, entries]`."""
        return self.coefficients.new_zeros(self.shape[0]).index_add_(0, self.index, self.coefficients)[None]

    def divide(self, G: Tensor, damping: float, factor: float) -> Parameters:
        """`factor·B / (λ + count)`, in the entries that occur."""
        scale = factor / (self.diagonal()[0] + damping)
        return self._scatter(G.reshape(-1, self.shape[1]), scale[self.index] * self.coefficients)


class EmbeddingBagTransfer(Table):
    """`Y[b] = Σ c_i·W[index_i]` over the items i of bag b; the coefficient c_i is a weight, or 1 over the bag's size.

    Args:
        inputs: entries `[bags, items]`, or `[items]` and offsets where each bag starts; and perhaps a weight for each.
        like: a tensor of the output's shape, `[bags, outputs]`, in the precision to solve in.
        has_offsets: whether there are offsets.
        has_weights: whether there are weights.
        mean: whether a bag is averaged rather than summed.
        padding: an entry that is left out of every bag.
        shapes, sparse: as for `Table`.
    """

    spaces = (SAMPLE,)

    def __init__(
        self,
        inputs: Sequence[Tensor],
        like: Tensor,
        shapes: Shapes,
        has_offsets: bool,
        has_weights: bool,
        mean: bool,
        padding: int | None,
        sparse: bool,
    ) -> None:
        index = inputs[0].long()
        weights = inputs[-1] if has_weights else torch.ones_like(index, dtype=like.dtype)
        super().__init__(index, weights, shapes, padding, sparse)
        self.bags = like.shape[0]
        self.bag = self._bag_of_each_item(index, inputs[1] if has_offsets else None)
        if mean:
            size = self.coefficients.new_zeros(self.bags).index_add_(0, self.bag, self.coefficients)
            self.coefficients = self.coefficients / size.clamp(min=1.0)[self.bag]
        self.sizes = Sizes(1, self.bags, *self.shape)

    def output(self, parameters: Parameters) -> Tensor:
        """Each bag's weighted sum."""
        items = self._lookup(parameters)
        return items.new_zeros(self.bags, self.shape[1]).index_add_(0, self.bag, items)

    def gradient(self, G: Tensor) -> Parameters:
        """Each bag's G, weighted, summed into its items' entries."""
        return self._scatter(G[self.bag], self.coefficients)

    def sample_gram(self) -> Tensor:
        """`K = AAᵀ` from the columns of A that are not zero: no more than there are items."""
        order = self.index.argsort()
        ranked = self.index[order]
        # Equal entries get equal columns; numbered without asking the device how many there are.
        column = torch.zeros_like(self.index)
        column[order[1:]] = (ranked[1:] != ranked[:-1]).cumsum(0)
        A = self.coefficients.new_zeros(self.bags, self.index.numel())
        A.index_put_((self.bag, column), self.coefficients, accumulate=True)
        return (A @ A.mT)[None]

    def to_samples(self, G: Tensor) -> Tensor:
        """One sample a bag."""
        return G[None]

    def from_samples(self, U: Tensor) -> Tensor:
        """The inverse of `to_samples`."""
        return U[0]

    def _bag_of_each_item(self, index: Tensor, offsets: Tensor | None) -> Tensor:
        if offsets is None:
            return torch.arange(self.bags, device=index.device).repeat_interleave(index.shape[1])
        items = torch.arange(index.numel(), device=index.device)
        return torch.searchsorted(offsets[: self.bags].long().contiguous(), items, right=True) - 1
