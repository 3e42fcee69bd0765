"""Embedding tables: a row of A holds the coefficients of the entries that were looked up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.solvers import DIAGONAL, SAMPLE, Sizes
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes, Transfer, without_samples


class Table(Transfer):
    """What lookups share: one parameter `[entries, outputs]`, whose gradient may be sparse.

    Args:
        index: the entries that were looked up, of any shape.
        coefficients: what each is multiplied by, in the shape of index.
        shape: the table's.
        padding: an entry that is not trained.
        sparse: whether the gradient is to be sparse.
    """

    def __init__(
        self, index: Tensor, coefficients: Tensor, shape: torch.Size, padding: int | None, sparse: bool
    ) -> None:
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
        """The table's gradient: values `[items, outputs]`, multiplied and summed into the entries they belong to."""
        values = values * coefficients[:, None]
        if self.sparse:
            index = self.index[None]
            return (torch.sparse_coo_tensor(index, values, self.shape, check_invariants=False),)
        return (values.new_zeros(self.shape).index_add_(0, self.index, values),)


class EmbeddingTransfer(Table):
    """`Y = W[index]`; `AᵀA` is the diagonal of how often each entry occurs.

    Args:
        index, shape, padding, sparse: as for `Table`.
        like: a tensor of the output's shape in the precision to solve in.
    """

    spaces = (DIAGONAL,)

    def __init__(
        self, index: Tensor, like: Tensor, shape: torch.Size, padding: int | None, sparse: bool
    ) -> None:
        super().__init__(index, torch.ones_like(index, dtype=like.dtype), shape, padding, sparse)
        self.output_shape = like.shape
        self.sizes = Sizes(1, self.index.numel(), *shape)

    def output(self, parameters: Parameters) -> Tensor:
        """The entries looked up; zero at padding."""
        return self._lookup(parameters).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """G summed into the entries it came from."""
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
        index: entries `[bags, items]`, or `[items]` with offsets.
        offsets: where each bag starts; None for two-dimensional indices.
        weights: per-sample weights, in the shape of index.
        like: a tensor of the output's shape, `[bags, outputs]`, in the precision to solve in.
        mean: whether a bag is averaged rather than summed.
        padding: an entry that is left out of every bag.
        shape, sparse: as for `Table`.
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
        ones = torch.ones_like(index, dtype=like.dtype)
        super().__init__(index, ones if weights is None else weights, shape, padding, sparse)
        self.bags = like.shape[0]
        self.bag = self._bag_of_each_item(index, offsets)
        if mean:
            size = self.coefficients.new_zeros(self.bags).index_add_(0, self.bag, self.coefficients)
            self.coefficients = self.coefficients / size.clamp(min=1.0)[self.bag]
        self.sizes = Sizes(1, self.bags, *shape)

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
        return self.transfer([without_samples(dtype=torch.long)], without_samples(table[1]), shapes)


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
