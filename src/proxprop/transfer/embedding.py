"""Embedding tables: a row of A holds a 1 at the entry that was looked up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import DIAGONAL, SAMPLE, Sizes
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes, Transfer


class Table(Transfer):
    """What lookups share: one parameter `[entries, outputs]`, whose gradient may be sparse."""

    def __init__(self, shape: torch.Size, sparse: bool) -> None:
        self.shape, self.sparse = shape, sparse

    def to_features(self, parameters: Parameters) -> Tensor:
        """The table itself, dense."""
        (table,) = parameters
        assert table is not None
        return (table.to_dense() if table.is_sparse else table)[None]

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        return (V[0],)

    def _scatter(self, index: Tensor, values: Tensor) -> Tensor:
        """Sum rows of values into the table's gradient."""
        if self.sparse:
            return torch.sparse_coo_tensor(index[None], values, self.shape, check_invariants=False)
        return values.new_zeros(self.shape).index_add_(0, index, values)


class EmbeddingTransfer(Table):
    """`Y = W[index]`; `AᵀA` is the diagonal of how often each entry occurs.

    Args:
        index: entries, of any shape.
        like: a tensor of the output's shape in the precision to solve in.
        shape: the table's, `[entries, outputs]`.
        padding: an entry that is not trained.
        sparse: whether the gradient is to be sparse.
    """

    spaces = (DIAGONAL,)

    def __init__(
        self, index: Tensor, like: Tensor, shape: torch.Size, padding: int | None, sparse: bool
    ) -> None:
        super().__init__(shape, sparse)
        self.index, self.output_shape = index.reshape(-1), like.shape
        self.trained = torch.ones_like(self.index, dtype=like.dtype)
        if padding is not None:
            self.trained *= self.index != padding
        self.sizes = Sizes(1, self.index.numel(), shape[0], shape[1])

    def output(self, parameters: Parameters) -> Tensor:
        """The entries looked up; zero at padding."""
        (table,) = parameters
        assert table is not None
        found = functional.embedding(self.index, table) * self.trained[:, None]
        return found.view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """G summed into the entries it came from."""
        return (self._scatter(self.index, G.reshape(-1, self.shape[1]) * self.trained[:, None]),)

    def diagonal(self) -> Tensor:
        """How often each entry occurs `[1, entries]`."""
        return self.trained.new_zeros(self.shape[0]).index_add_(0, self.index, self.trained)[None]

    def divide(self, G: Tensor, damping: float, factor: float) -> Parameters:
        """`factor·B / (λ + count)`, in the entries that occur."""
        scale = factor / (self.diagonal()[0] + damping)
        values = G.reshape(-1, self.shape[1]) * (scale[self.index] * self.trained)[:, None]
        return (self._scatter(self.index, values),)


class EmbeddingBagTransfer(Table):
    """`Y[b] = Σ c_i·W[index_i]` over the items i of bag b; the coefficient c_i is a weight, or 1 over the bag's size.

    Args:
        index: entries `[bags, items]`, or `[items]` with offsets.
        offsets: where each bag starts; None for two-dimensional indices.
        weights: per-sample weights, in the shape of index.
        like: a tensor of the output's shape, `[bags, outputs]`, in the precision to solve in.
        shape: the table's, `[entries, outputs]`.
        mean: whether a bag is averaged rather than summed.
        padding: an entry that is left out of every bag.
        sparse: whether the gradient is to be sparse.
    """

    spaces = (SAMPLE,)

    def __init__(
        self,
        index: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        like: Tensor,
        shape: torch.Size,
        mean: bool,
        padding: int | None,
        sparse: bool,
    ) -> None:
        super().__init__(shape, sparse)
        self.index, self.bags = index.reshape(-1), like.shape[0]
        self.bag = self._bag_of_each_item(index, offsets)
        self.coefficients = like.new_ones(self.index.shape) if weights is None else weights.reshape(-1)
        if padding is not None:
            self.coefficients = self.coefficients * (self.index != padding)
        if mean:
            size = self.coefficients.new_zeros(self.bags).index_add_(0, self.bag, self.coefficients)
            self.coefficients = self.coefficients / size.clamp(min=1.0)[self.bag]
        self.sizes = Sizes(1, self.bags, shape[0], shape[1])

    def output(self, parameters: Parameters) -> Tensor:
        """Each bag's weighted sum."""
        (table,) = parameters
        assert table is not None
        items = functional.embedding(self.index, table) * self.coefficients[:, None]
        return items.new_zeros(self.bags, self.shape[1]).index_add_(0, self.bag, items)

    def gradient(self, G: Tensor) -> Parameters:
        """Each bag's G, weighted, summed into its items' entries."""
        return (self._scatter(self.index, G[self.bag] * self.coefficients[:, None]),)

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
        return torch.searchsorted(offsets[: self.bags].contiguous(), items, right=True) - 1


@dataclass(frozen=True)
class EmbeddingCall(LayerCall):
    """A call of an embedding; `padding` and `sparse` as in `EmbeddingTransfer`."""

    padding: int | None
    sparse: bool

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> EmbeddingTransfer:
        """The transfer of this call."""
        (index,), (table,) = inputs, shapes
        assert table is not None
        return EmbeddingTransfer(index, like, table, self.padding, self.sparse)

    def layout(self, shapes: Shapes) -> EmbeddingTransfer:
        """The transfer without samples."""
        (table,) = shapes
        assert table is not None
        index = torch.empty(0, dtype=torch.long, device="meta")
        return self.transfer((index,), torch.empty(0, table[1], device="meta"), shapes)


@dataclass(frozen=True)
class EmbeddingBagCall(LayerCall):
    """A call of an embedding of bags; `mean`, `padding` and `sparse` as in `EmbeddingBagTransfer`.

    Attributes:
        has_offsets: whether offsets come behind the index.
        has_weights: whether weights of samples come last.
    """

    has_offsets: bool
    has_weights: bool
    mean: bool
    padding: int | None
    sparse: bool

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> EmbeddingBagTransfer:
        """The transfer of this call."""
        index, *others = inputs
        offsets = others[0] if self.has_offsets else None
        weights = others[-1] if self.has_weights else None
        (table,) = shapes
        assert table is not None
        return EmbeddingBagTransfer(
            index, offsets, weights, like, table, self.mean, self.padding, self.sparse
        )
