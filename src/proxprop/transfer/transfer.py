"""The interface of every transfer: the linear map `φ(·, a)` from a layer's parameters to its output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxprop.solvers import SPACES, Sizes
from proxprop.solvers.matmul import PendingProduct
from proxprop.solvers.rotation import rotate, rotate_both

Parameters = tuple[Tensor | None, ...]
"""One tensor for each of the layer's parameters, in its own shape; None for one that is not trained."""

Products = tuple[Tensor | PendingProduct | None, ...]
"""`Parameters`, some of which may be pending products."""

Shapes = Sequence[torch.Size | None]
"""The shape of each of the layer's parameters; None for one that is not trained."""


@dataclass(frozen=True)
class GramMethod:
    """A way of forming S.

    Attributes:
        name: its name in `summary`.
        reason: why it was chosen.
        gram: forms S from the input; None for the product of rows. See `conv_gram`.
        flops: its FLOPs; None for those of the product of rows.
        price: price of one of them, in FLOPs of a product with K or S.
    """

    name: str
    reason: str
    gram: Callable[..., Tensor] | None = None
    flops: float | None = None
    price: float = 1.0


ROWS = GramMethod("product of rows", "the layer has no other way")


class Layout(ABC):
    """How parameters lie in a system: as `V [groups, features, outputs]`.

    Attributes:
        spaces: where the system can be solved.
        sizes: the system's sizes.
    """

    spaces: ClassVar[tuple[str, ...]] = SPACES
    sizes: Sizes

    @abstractmethod
    def to_features(self, parameters: Parameters) -> Tensor:
        """Parameters as V `[groups, features, outputs]`."""

    @abstractmethod
    def from_features(self, V: Tensor) -> Parameters:
        """V as parameters; the inverse of `to_features`."""


class Transfer(Layout):
    """One call of a layer, seen as `Y = A V` with everything but the parameters V held fixed.

    Beside the layout of its parameters, a transfer knows that of the layer's output, `Y [groups, samples, outputs]` in
    the system. It implements the methods of the spaces that it names.

    Args:
        inputs: the tensors that the layer was called with, floating ones in the precision to solve in.
        like: a tensor of the output's shape in that precision.
        shapes: the parameters' shapes.
        *options: further arguments of this kind of layer.
    """

    takes_bfloat16: ClassVar[bool] = False
    """Whether bfloat16 tensors are taken as they are."""
    capturable: ClassVar[bool] = False
    """Whether equal calls launch the same kernels on a GPU and read no tensors but those they are given."""
    coarse: bool = False
    """Whether inputs and gradients come in bfloat16, so that a solve may be less precise."""

    @abstractmethod
    def __init__(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes, *options: Any) -> None:
        pass

    @classmethod
    def without_samples(cls, shapes: Shapes, *options: Any) -> "Transfer":
        """A transfer that knows the system's sizes and how parameters lie in it, and has no samples.

        Args:
            shapes: the parameters' shapes, or those of a share of the outputs.
            *options: as for the class.
        """
        raise NotImplementedError(f"{cls.__name__} has no layout without samples")

    @abstractmethod
    def output(self, parameters: Parameters) -> Tensor:
        """`φ`: the layer's output at these parameters, in the layer's layout."""

    @abstractmethod
    def gradient(self, G: Tensor) -> Parameters:
        """`φ*`: the parameters' gradient for the output gradient G; BackProp's own product."""

    def to_samples(self, G: Tensor) -> Tensor:
        """An array in the output's layout as `[groups, samples, outputs]`."""
        raise self._lacks("sample space")

    def from_samples(self, U: Tensor) -> Tensor:
        """The inverse of `to_samples`."""
        raise self._lacks("sample space")

    def sample_gram(self) -> Tensor:
        """`K = AAᵀ [groups, samples, samples]`, freshly made."""
        raise self._lacks("sample space")

    def rotated_sample_gram(self) -> Tensor:
        """K of rotated samples, see `rotation`."""
        return rotate_both(self.sample_gram())

    def rotated_gradient(self, U: Tensor) -> Parameters:
        """`AᵀU` in the layer's layout for a U of rotated samples `[groups, samples, outputs]`."""
        return self.gradient(self.from_samples(rotate(U)))

    def rotated_products(self, U: Tensor) -> Products:
        """`rotated_gradient`, but large products may be left for later."""
        return self.rotated_gradient(U)

    def gram(self) -> Tensor:
        """`S = AᵀA [groups, features, features]`, freshly made."""
        raise self._lacks("feature space")

    def normal_equations(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """`S` and `AᵀG [groups, features, outputs]`, together where that is less work."""
        gradient = self.gradient(G)
        return self.gram(), self.to_features(gradient)

    def gram_method(self) -> GramMethod:
        """How `gram` forms S."""
        return ROWS

    def own_price(self) -> float:
        """Price of a FLOP of φ and φ*, in FLOPs of a product with K or S."""
        return 1.0

    def diagonal(self) -> Tensor:
        """S's diagonal `[groups, features]`, where S is diagonal."""
        raise self._lacks("diagonal S")

    def divide(self, G: Tensor, damping: float, factor: float) -> Parameters:
        """`factor·(λI + S)⁻¹AᵀG` where S is diagonal."""
        raise self._lacks("diagonal S")

    def normal(self, V: Tensor) -> Tensor:
        """`AᵀAV` through φ and φ*, without forming A."""
        return self.to_features(self.gradient(self.output(self.from_features(V))))

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}")


def nothing(*shape: int, **options: Any) -> Tensor:
    """A tensor `[0, *shape]` without memory, for a transfer without samples."""
    return torch.empty(0, *shape, device="meta", **options)
