"""Linear layers: every leading dimension of the input is samples."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from proxprop import tuning
from proxprop.device import precision
from proxprop.solvers import Sizes
from proxprop.solvers.matmul import pending_product, transposed_product, transposed_square
from proxprop.transfer.affine import Affine
from proxprop.transfer.transfer import Parameters, Products, Shapes, nothing


class LinearTransfer(Affine):
    """`Y = X Wᵀ + b`.

    Args:
        inputs: one `[*, features]`, in the precision to solve in, or in bfloat16 if it came so: products of bfloat16
            numbers are exact in float32, so a float32 copy would gain nothing.
        like: `[*, outputs]`.
        shapes: of the weight, `[outputs, features]`, and the bias.
        transposed: whether the weight is stored as `[features, outputs]` instead.
    """

    takes_bfloat16 = capturable = True

    def __init__(
        self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes, transposed: bool = False
    ) -> None:
        super().__init__(like, shapes)
        (input,), self.transposed = inputs, transposed
        self.input = input.reshape(-1, input.shape[-1])
        self.coarse = input.dtype == torch.bfloat16
        self.sizes = Sizes(1, self.input.shape[0], input.shape[-1] + self.ones, like.shape[-1])

    @classmethod
    def without_samples(cls, shapes: Shapes, transposed: bool = False) -> "LinearTransfer":
        """A transfer that has no samples."""
        assert shapes[0] is not None
        features, outputs = shapes[0] if transposed else shapes[0][::-1]
        return cls([nothing(features)], nothing(outputs), shapes, transposed)

    def with_rows(self, A: Tensor) -> "LinearTransfer":
        """A call of the same layer with the rows `A [samples, features]`, the ones column left out."""
        outputs = self.sizes.outputs
        like, bias = A.new_empty(()).expand(len(A), outputs), torch.Size([outputs]) if self.bias else None
        return LinearTransfer([A], like, [self.weight_shape, bias], self.transposed)

    def own_price(self) -> float:
        """Price of a FLOP of φ and φ*; higher on a GPU, whose tensor cores make products with K and S cheap."""
        if not self.input.is_cuda:
            return 1.0
        return tuning.OWN_PRICE_IN_BFLOAT16 if self.coarse else tuning.OWN_PRICE_ON_A_GPU

    def rows(self) -> Tensor:
        """The input, its leading dimensions flattened."""
        return self.input[None]

    def output(self, parameters: Parameters) -> Tensor:
        """`X Wᵀ + b`."""
        weight, bias = parameters
        assert weight is not None
        weight = weight.mT if self.transposed else weight
        return functional.linear(self.input.to(weight.dtype), weight, bias).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """`GᵀX` and the column sums of G. G is freed before the product if the caller does not keep it."""
        G = G.reshape(-1, G.shape[-1])
        bias = G.sum(0, dtype=precision(G)) if self.bias else None
        given = [G]
        del G
        return self._weight_product(self.input, given.pop()), bias

    def normal_equations(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """S and `AᵀG`; a CPU takes both from one copy of rows and ones where there are few numbers: fewer calls."""
        on_cpu = not self.input.is_cuda and not torch.compiler.is_compiling()
        if not (self.bias and on_cpu and self.input.numel() <= tuning.CPU_ROWS_MOST_NUMBERS):
            return super().normal_equations(G)
        A = torch.constant_pad_nd(self.input, (0, 1), 1.0)
        B = self._weight_product(A, G.reshape(-1, G.shape[-1]))
        return transposed_square(A)[None], (B if self.transposed else B.mT)[None]

    def rotated_products(self, U: Tensor) -> Products:
        """`AᵀU`, with the weight's product left for later because it is often far larger than both factors."""
        if self.coarse:
            return self.rotated_gradient(U)
        factors = [U[0], self._rotated_rows()[0]]
        return pending_product(*(reversed(factors) if self.transposed else factors)), self._rotated_bias(U)

    def _weight_of_rows(self, A: Tensor, U: Tensor) -> Tensor:
        return self._weight_product(A[0], U[0])

    def _weight_product(self, X: Tensor, G: Tensor) -> Tensor:
        """`GᵀX` in the weight's layout; factors that the caller does not keep are freed before the product."""
        factors = [X, G] if self.transposed else [G, X]
        del X, G
        return transposed_product(factors.pop(0), factors.pop())

    def is_narrow(self) -> bool:
        """Whether multiplying a sample-space matrix by the input is less work than multiplying it by G."""
        inputs = self.sizes.features - self.ones
        return not self.coarse and 0 < inputs < self.sizes.outputs

    def direction(self, left: Tensor, right: Tensor) -> Parameters:
        """`Aᵀ·left·right` as `(leftᵀA)ᵀ·right`, for a narrow input.

        Args:
            left: `[1, samples, samples]`.
            right: `[1, samples, outputs]`.
        """
        weight = self._weight_product(left[0].mT @ self.input, right[0])
        return weight, left[0].sum(0) @ right[0] if self.bias else None

    def _columns(self, weight: Tensor) -> Tensor:
        return weight[None] if self.transposed else super()._columns(weight)

    def _weight(self, columns: Tensor) -> Tensor:
        return columns[0] if self.transposed else super()._weight(columns)
