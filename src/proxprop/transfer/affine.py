"""The base of transfers with a weight and perhaps a bias: rows that hold the input, and a column of ones."""

from typing import Any

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.device import round_up
from proxprop.solvers.matmul import square, transposed_product, transposed_square, widened
from proxprop.solvers.rotation import rotate
from proxprop.transfer.transfer import Parameters, Shapes, Transfer


class Affine(Transfer):
    """A layer with a weight `[groups·outputs, ...]` and perhaps a bias `[groups·outputs]`.

    The bias is the coefficient of a column of ones behind the rows of the input. The ones are never stored: they add 1
    to every entry of K, and a border of column sums to S. A bias that is not trained has no column.
    """

    def __init__(self, like: Tensor, shapes: Shapes) -> None:
        weight, bias = shapes
        self.output_shape = like.shape
        self.weight_shape = weight or bias or torch.Size([0])
        self.bias = bias is not None
        self.ones = int(self.bias)  # number of columns of ones; a bool can't be added to a symbolic size
        self._rotated: Tensor | None = None

    @classmethod
    def channel_axis(cls, *options: Any) -> int | None:
        """The axis of the output that the bias belongs to."""
        return -1

    def rows(self) -> Tensor:
        """The input as rows `[groups, samples, features]`, the ones column left out."""
        raise NotImplementedError(f"{type(self).__name__} does not form its rows")

    def sample_gram(self) -> Tensor:
        """`K = AAᵀ`; the ones column adds 1 to every entry."""
        K = square(self._any_rows())
        return K.add_(1.0) if self.bias else K

    def rotated_sample_gram(self) -> Tensor:
        """K of rotated samples; the ones column adds N to its first entry.

        Rows that came in bfloat16 are multiplied as they are, which is exact, and K is rotated afterwards.
        """
        if self.coarse:
            return super().rotated_sample_gram()
        K = square(self._rotated_rows())
        if self.bias:
            K[:, 0, 0].add_(self.sizes.samples)
        return K

    def rotated_gradient(self, U: Tensor) -> Parameters:
        """`A'ᵀU`, whose first row holds the mean; the ones column is `√N` there and zero below.

        U may be far larger than D, and `AᵀHU` would round in proportion to U times the mean. Rows that came in bfloat16
        have larger rounding of their own.
        """
        if self.coarse:
            return super().rotated_gradient(U)
        return self._weight_of_rows(self._rotated_rows(), U), self._rotated_bias(U)

    def _weight_of_rows(self, A: Tensor, U: Tensor) -> Tensor:
        """`AᵀU` in the weight's layout, for rows A as those of `rows`."""
        if len(A) > 1:
            return self._weight(A.mT @ U)
        return self._weight(transposed_product(U[0], A[0]).mT[None])

    def _rotated_bias(self, U: Tensor) -> Tensor | None:
        """The bias of `A'ᵀU`."""
        return U[:, 0].reshape(-1) * self.sizes.samples**0.5 if self.bias else None

    def _rotated_rows(self) -> Tensor:
        """`HA` without the ones column, for rows that did not come in bfloat16.

        They are kept for the gradient, unless many layers are solved at once and their products are split into terms.
        """
        if self._rotated is not None:
            return self._rotated
        rotated = rotate(self.rows())
        if not device.is_traced() and (device.tf32_allowed() or not device.is_captured(rotated)):
            self._rotated = rotated
        return rotated

    def _any_rows(self) -> Tensor:
        """`rows`, perhaps with the features in another order."""
        return self.rows()

    def gram(self) -> Tensor:
        """`S = AᵀA`; the ones column adds the border `(Aᵀ1, samples)`."""
        return self.gram_of_rows(self.rows())

    def sampled_gram(self, index: Tensor) -> Tensor:
        """An unbiased estimate of S from a few rows, `N/rows·Σaaᵀ` over rows drawn without replacement.

        Args:
            index: which of the N samples, each drawn with the same probability.
        """
        return self.gram_of_rows(self.sampled_rows(index)).mul_(self.sizes.samples / len(index))

    def sampled_rows(self, index: Tensor) -> Tensor:
        """The rows of some samples."""
        return self.rows()[:, index]

    def to_samples(self, G: Tensor) -> Tensor:
        """The output's leading dimensions flattened, in the precision to solve in."""
        return widened(G).reshape(1, -1, G.shape[-1])

    def from_samples(self, U: Tensor) -> Tensor:
        """Samples with the leading dimensions of the output."""
        return U.view(*self.output_shape)

    def to_features(self, parameters: Parameters) -> Tensor:
        """Weight rows as columns, the bias as the last feature."""
        weight, bias = parameters
        assert weight is not None
        groups, _, _, outputs = self.sizes
        columns = self._columns(weight)
        if bias is None:
            return columns
        if columns.mT.is_contiguous() and columns.device.type == "cpu":  # kernels on a GPU take columns
            return torch.cat([columns.mT, bias.reshape(groups, outputs, 1)], dim=-1).mT
        return torch.cat([columns, bias.reshape(groups, 1, outputs)], dim=-2)

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`; views of V where possible."""
        inputs = V.shape[-2] - self.ones
        bias = V[:, inputs].reshape(-1).clone() if self.bias else None  # a view would keep all of V
        return self._weight(V[:, :inputs]), bias

    def _columns(self, weight: Tensor) -> Tensor:
        """A weight in its own layout as `[groups, features, outputs]`."""
        groups, _, features, outputs = self.sizes
        return weight.reshape(groups, outputs, features - self.ones).mT

    def _weight(self, columns: Tensor) -> Tensor:
        """The inverse of `_columns`."""
        return columns.mT.reshape(self.weight_shape)

    def gram_of_rows(self, A: Tensor, dense: bool = False) -> Tensor:
        """`AᵀA` of some rows, the ones column included; `dense` as in `transposed_square`."""
        return transposed_square(A, self.bias, dense)

    def _border(self, S: Tensor, sums: Tensor) -> Tensor:
        """S of the input rows, bordered by the row and the column that the ones add."""
        groups, samples, features, _ = self.sizes
        bordered = S.new_full((groups, features, round_up(features, tuning.ALIGNED)), float(samples))[
            ..., :features
        ]
        bordered[:, :-1, :-1] = S
        bordered[:, :-1, -1] = sums
        bordered[:, -1, :-1] = sums
        return bordered
