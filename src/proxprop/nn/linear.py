"""Linear and bilinear layers, and layers of other libraries that are linear ones by another name."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.layer import MixedLayer, Part, ProximalLayer, detached, parameter_views, under_autocast
from proxprop.transfer import BilinearCall, LinearCall


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
        if not self._solves():
            seen = self._as_seen(input)
            return self._tap(super().forward(seen), (seen,), of=input)
        input, parameters = under_autocast(input), parameter_views(self.weight, self.bias)
        weight, bias = detached(self.weight, self.bias)
        output = functional.linear(input, weight, bias)
        return self._attach(output, LinearCall(), (input,), parameters)

    def _parts(self) -> dict[str, Part]:
        return self._part(LinearCall(), "weight", "bias")


class Bilinear(ProximalLayer, nn.Bilinear):
    """`torch.nn.Bilinear` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Bilinear

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """torch's own forward."""
        if not self._solves():
            return self._tap(super().forward(input1, input2), (input1, input2))
        parameters = parameter_views(self.weight, self.bias)
        weight, bias = detached(self.weight, self.bias)
        output = functional.bilinear(input1, input2, weight, bias)
        return self._attach(output, BilinearCall(), (input1, input2), parameters)

    def _parts(self) -> dict[str, Part]:
        return self._part(BilinearCall(), "weight", "bias")


class RegisteredLinear(MixedLayer):
    """Mixed into a class of another library that computes `x Wᵀ + b`, or `x W + b` where `transposed`.

    That it really does is checked on the first training call.
    """

    weight: Tensor
    bias: Tensor | None
    transposed: ClassVar[bool]

    def forward(self, input: Tensor) -> Tensor:
        """The same product as the plain class's forward."""
        if not self._solves():
            input = self._as_seen(input)
            output = cast(Tensor, super().forward(input))
            if self._observed():
                self._check_once(input, output)
            return self._tap(output, (input,))
        input, parameters = under_autocast(input), parameter_views(self.weight, self.bias)
        output = self._product(input)
        self._check_once(input, output)
        return self._attach(output, LinearCall(self.transposed), (input,), parameters)

    def _parts(self) -> dict[str, Part]:
        return self._part(LinearCall(self.transposed), "weight", "bias")

    def _product(self, input: Tensor) -> Tensor:
        """What the class was registered for, with constant parameters."""
        weight, bias = detached(self.weight, self.bias)
        return functional.linear(input, weight.mT if self.transposed else weight, bias)

    def _check_once(self, input: Tensor, output: Tensor) -> None:
        """Compare the plain class's forward with what it was registered for; one of the two is the output."""
        if vars(self).get("_checked") or torch.compiler.is_compiling() or output.is_meta:
            return
        if not bool(output.isfinite().all()):
            return  # a later call will tell
        with torch.no_grad():
            expected = self._product(input) if self._attached else cast(Tensor, super().forward(input))
        tolerance = torch.finfo(expected.dtype).eps ** 0.5
        if expected.shape != output.shape or not torch.allclose(expected, output, tolerance, tolerance):
            product = "x W + b" if self.transposed else "x Wᵀ + b"
            raise ValueError(
                f"{self.plain.__name__} was registered as a layer that computes {product} but its forward "
                "gives something else; see proxprop.register"
            )
        self._checked = True
