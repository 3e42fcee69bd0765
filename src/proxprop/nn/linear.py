"""Linear and bilinear layers, and layers of other libraries that are linear ones by another name."""

import functools
from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.backward import Shapes
from proxprop.nn.layer import MixedLayer, Part, ProximalLayer, as_kernels_see, detached, handles
from proxprop.transfer import BilinearTransfer, LinearTransfer


def linear_transfer(
    inputs: Sequence[Tensor], like: Tensor, shapes: Shapes, transposed: bool = False
) -> LinearTransfer:
    """The transfer of one call of a linear layer."""
    (input,), (weight, bias) = inputs, shapes
    return LinearTransfer(input, like.shape, weight, bias is not None, transposed)


def linear_layout(shapes: Shapes, transposed: bool = False) -> LinearTransfer:
    """The transfer of a linear layer without samples."""
    weight, bias = shapes
    inputs, outputs = 1, bias[0] if bias else 0
    if weight is not None:
        inputs, outputs = weight if transposed else weight[::-1]
    meta = torch.empty(0, device="meta")
    return linear_transfer((meta.view(0, inputs),), meta.view(0, outputs), shapes, transposed)


class Linear(ProximalLayer, nn.Linear):
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

    plain = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._trains():
            return super().forward(input)
        input, parameters = as_kernels_see(input), handles(self.weight, self.bias)
        weight, bias = detached(self.weight, self.bias)
        output = functional.linear(input, weight, bias)
        return self._attach(output, linear_transfer, (input,), parameters, bfloat16=True)

    def _parts(self) -> dict[str, Part]:
        return self._part(linear_layout, "weight", "bias")


class Bilinear(ProximalLayer, nn.Bilinear):
    """`torch.nn.Bilinear` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Bilinear

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._trains():
            return super().forward(input1, input2)
        parameters = handles(self.weight, self.bias)
        weight, bias = detached(self.weight, self.bias)
        output = functional.bilinear(input1, input2, weight, bias)
        return self._attach(output, _bilinear_transfer, (input1, input2), parameters)

    def _parts(self) -> dict[str, Part]:
        return self._part(_bilinear_layout, "weight", "bias")


def _bilinear_transfer(inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> BilinearTransfer:
    (left, right), (weight, bias) = inputs, shapes
    return BilinearTransfer(left, right, like.shape, weight, bias is not None)


def _bilinear_layout(shapes: Shapes) -> BilinearTransfer:
    weight, bias = shapes
    outputs, left, right = (bias[0] if bias else 0, 1, 1) if weight is None else weight
    meta = torch.empty(0, device="meta")
    return _bilinear_transfer((meta.view(0, left), meta.view(0, right)), meta.view(0, outputs), shapes)


class RegisteredLinear(MixedLayer):
    """Mixed into a class of another library that computes `x Wᵀ + b`, or `x W + b` where `transposed`.

    That it really does is checked on the first training call.
    """

    weight: Tensor
    bias: Tensor | None
    transposed: ClassVar[bool]

    def forward(self, input: Tensor) -> Tensor:
        """The same product as the plain class's forward."""
        if not self._trains():
            return cast(Tensor, super().forward(input))
        input, parameters = as_kernels_see(input), handles(self.weight, self.bias)
        weight, bias = detached(self.weight, self.bias)
        output = functional.linear(input, weight.mT if self.transposed else weight, bias)
        self._check_once(input, output)
        build = functools.partial(linear_transfer, transposed=self.transposed)
        return self._attach(output, build, (input,), parameters, bfloat16=True)

    def _parts(self) -> dict[str, Part]:
        return self._part(functools.partial(linear_layout, transposed=self.transposed), "weight", "bias")

    def _check_once(self, input: Tensor, output: Tensor) -> None:
        if vars(self).get("_checked") or torch.compiler.is_compiling() or output.is_meta:
            return
        if not bool(output.isfinite().all()):
            return  # a later call will tell
        with torch.no_grad():
            expected = cast(Tensor, super().forward(input))
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        if expected.shape != output.shape or not torch.allclose(expected, output, tolerance, tolerance):
            product = "x W + b" if self.transposed else "x Wᵀ + b"
            raise ValueError(
                f"{self.plain.__name__} was registered as a layer that computes {product} but its forward "
                "gives something else; see proxprop.register"
            )
        self._checked = True
