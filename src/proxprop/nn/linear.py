"""Linear and bilinear layers, and layers of other libraries that are linear ones by another name."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.affine import AffineLayer
from proxprop.transfer import BilinearTransfer, LayerCall, LinearTransfer


class Linear(AffineLayer, nn.Linear):
    """`torch.nn.Linear` whose `.grad` after backward is the proximal direction.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`.
        solver, tau_theta, scaling, space: see `proxprop.convert`.

    Example:
        >>> from proxprop import Exact
        >>> layer = Linear(2, 1, bias=False, solver=Exact(), tau_theta=1.0)
        >>> layer(torch.eye(2)).sum().backward()  # S = I and AᵀG = (1, 1)
        >>> layer.weight.grad
        tensor([[0.5000, 0.5000]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        return self._affine(functional.linear, input)

    def _call(self) -> LayerCall:
        return LayerCall(LinearTransfer)


class Bilinear(AffineLayer, nn.Bilinear):
    """`torch.nn.Bilinear` whose `.grad` after backward is the proximal direction; see `Linear`."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """torch's own forward."""
        return self._affine(functional.bilinear, input1, input2)

    def _call(self) -> LayerCall:
        return LayerCall(BilinearTransfer)

    def _cast(self, input: Tensor) -> Tensor:
        """The input as it is: autocast leaves bilinear products alone."""
        return input


class RegisteredLinear(AffineLayer):
    """Mixed into a class of another library that computes `x Wᵀ + b`.

    The first training call checks that it does.
    """

    product: ClassVar[str] = "x Wᵀ + b"
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:
        """The same product as the plain class's forward."""
        output = self._affine(self._linear, input)
        if not vars(self).get("_checked") and (self._solves() or self._observed()):
            self._check_product(input, output)
        return output

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, weight.mT if self.transposed else weight, bias)

    def _call(self) -> LayerCall:
        return LayerCall(LinearTransfer, (self.transposed,))

    def _check_product(self, input: Tensor, output: Tensor) -> None:
        """Compare the plain class's forward with what it was registered for; one of the two is the output."""
        if torch.compiler.is_compiling() or output.is_meta or not bool(output.isfinite().all()):
            return  # a later call will tell
        with torch.no_grad():
            expected = (
                self._linear(input, self.weight, self.bias)
                if self._attached is not None
                else cast(Tensor, super().forward(input))
            )
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        if expected.shape != output.shape or not torch.allclose(expected, output, tolerance, tolerance):
            raise ValueError(
                f"{self.plain.__name__} was registered as a layer that computes {self.product} but its forward "
                "gives something else; see proxprop.register"
            )
        self._checked = True


class RegisteredTransposed(RegisteredLinear):
    """Mixed into a class of another library that computes `x W + b`."""

    product, transposed = "x W + b", True
