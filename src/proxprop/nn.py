"""Drop-in layers: torch's own forward, a proximal backward. And the one table of which class stands for which.

    torch class -> proxprop class -> transfer

A class that is not in the table can still be converted if its output is linear in its parameters: see
`proximal_class`.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from proxprop.backward import Build, Call, Failures, Observer, attach_direction
from proxprop.settings import Scaling, Settings
from proxprop.solve import CG, SPACES, Sizes, Solver
from proxprop.solve.plan import possible_spaces
from proxprop.transfer import AutogradTransfer, ConvGeometry, ConvTransfer, LinearTransfer, check_linear
from proxprop.transfer.autograd import twin


def _setting(name: str) -> Any:
    """A property that reads one setting, and checks what is written to it."""

    def read(layer: "ProximalLayer") -> Any:
        return getattr(layer._settings, name)

    def write(layer: "ProximalLayer", value: Any) -> None:
        settings = replace(layer._settings, **{name: value})
        layer.check(settings)
        layer._settings = settings

    return property(read, write, doc=f"`{name}` of `proxprop.Settings`; what is written to it is checked.")


class ProximalLayer(nn.Module):
    """What all proximal layers share: their settings, and how the direction is attached to an output.

    A subclass names in `plain` the class it stands for.
    """

    plain: ClassVar[type[nn.Module]]
    spaces: ClassVar[tuple[str, ...]] = SPACES

    _settings: Settings
    _failures: Failures
    _observer: Observer | None

    solver = _setting("solver")
    tau_theta = _setting("tau_theta")
    scaling = _setting("scaling")
    space = _setting("space")

    def __init__(
        self,
        *args: Any,
        solver: Solver = CG(),
        tau_theta: float = 1.0,
        scaling: Scaling = "paper",
        space: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings = Settings(solver, tau_theta, scaling, space)
        self.check(settings)
        super().__init__(*args, **kwargs)
        self._adopt(settings, f"{self.plain.__name__}({super().extra_repr()})")

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise ValueError unless a layer of this class can be solved with these settings."""
        try:
            possible_spaces(settings.solver, settings.space, cls.spaces)
        except ValueError as error:
            raise ValueError(f"{cls.plain.__name__}: {error}") from None

    def _adopt(self, settings: Settings, name: str) -> None:
        """Take on settings; `name` is how messages call this layer."""
        self._settings, self._failures, self._observer = settings, Failures(name), None

    def _abandon(self) -> None:
        """Become the plain class again, without what `_adopt` set."""
        for name in ("_settings", "_failures", "_observer", "_checked"):
            vars(self).pop(name, None)
        self.__class__ = self.plain  # type: ignore[assignment]

    def _trains(self) -> bool:
        """Whether this call needs a direction: gradients are on and there is something to train."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def _attach(
        self, output: Tensor, build: Build, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None]
    ) -> Tensor:
        call = Call(build, self._settings, self._failures, self._observer, len(inputs))
        return attach_direction(output, call, inputs, parameters)

    def sizes(self, inputs: Sequence[Any], output: Tensor) -> Sizes:
        """Sizes of the system that a call with these inputs and this output makes."""
        parameters = (self._parameters[name] for name in ("weight", "bias"))
        shapes = [p.shape if p is not None and p.requires_grad else None for p in parameters]
        return self._build()([inputs[0].detach()], output.shape, shapes).sizes

    def _build(self) -> Build:
        """How a call of this layer becomes a transfer."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The plain layer's line, and the settings that are not the default."""
        shown = [f"solver={self.solver}", f"tau_theta={self.tau_theta:g}"]
        if self.scaling != "paper":
            shown.append(f"scaling={self.scaling!r}")
        if self.space is not None:
            shown.append(f"space={self.space!r}")
        return ", ".join(filter(None, [super().extra_repr(), *shown]))


class Linear(ProximalLayer, nn.Linear):
    """`torch.nn.Linear` whose `.grad` after backward is the proximal direction.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`.
        solver, tau_theta, scaling, space: see `proxprop.Settings`.

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
        input = as_kernels_see(input)
        weight, bias = detached(self.weight, self.bias)
        output = functional.linear(input, weight, bias)
        return self._attach(output, linear_transfer, (input,), (self.weight, self.bias))

    def _build(self) -> Build:
        return linear_transfer


class ConvLayer(ProximalLayer):
    """What the convolutions share; mixed into torch's, whose attributes it reads."""

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        conv = cast(nn.Conv2d, self)
        if not self._trains():
            return cast(Tensor, super().forward(input))
        input = as_kernels_see(input)
        weight, bias = detached(conv.weight, conv.bias)
        output = conv._conv_forward(input, weight, bias)
        return self._attach(output, self._build(), (input,), (conv.weight, conv.bias))

    def _build(self) -> Build:
        return functools.partial(conv_transfer, geometry(cast(nn.Conv2d, self)))


class Conv1d(ConvLayer, nn.Conv1d):
    """`torch.nn.Conv1d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv1d


class Conv2d(ConvLayer, nn.Conv2d):
    """`torch.nn.Conv2d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv2d


class Conv3d(ConvLayer, nn.Conv3d):
    """`torch.nn.Conv3d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv3d


TENSOR = object()
"""Stands in a call's arguments where one of its saved tensors goes."""


class AnyLinearInParameters(ProximalLayer):
    """Mixed into any class whose output is one tensor, linear in its parameters; solved matrix-free.

    Linearity is checked on the first training call.
    """

    spaces = AutogradTransfer.spaces

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The plain class's own forward."""
        if not self._trains():
            return cast(Tensor, super().forward(*args, **kwargs))
        plain = twin(self, self.plain)
        if not vars(self).get("_checked"):
            check_linear(plain, *args, **kwargs)
            self._checked = True
        constants = {name: parameter.detach() for name, parameter in self.named_parameters()}
        output = cast(Tensor, torch.func.functional_call(plain, constants, args, kwargs))
        for module, copied in zip(self.modules(), plain.modules(), strict=True):
            module._buffers.update(copied._buffers)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        build = functools.partial(
            self._transfer, [TENSOR if isinstance(x, Tensor) else x for x in leaves], structure
        )
        return self._attach(output, build, tensors, list(self.parameters()))

    def _transfer(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        inputs: Sequence[Tensor],
        output_shape: torch.Size,
        shapes: Sequence[torch.Size | None],
    ) -> AutogradTransfer:
        """The transfer of one call; `leaves` are its arguments, with `TENSOR` for each of `inputs`."""
        following = iter(inputs)
        filled = [next(following) if leaf is TENSOR else leaf for leaf in leaves]
        arguments, keywords = pytree.tree_unflatten(filled, structure)
        named = dict(zip((name for name, _ in self.named_parameters()), shapes, strict=True))
        dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
        return AutogradTransfer(twin(self, self.plain), arguments, keywords, named, dtype)

    def sizes(self, inputs: Sequence[Any], output: Tensor) -> Sizes:
        """One column of all trained parameters, one row for each number of the output."""
        return Sizes(1, output.numel(), sum(p.numel() for p in self.parameters() if p.requires_grad), 1)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain class and this mix-in: the mixed class itself has no importable name."""
        state = cast(tuple[Any, ...], super().__reduce_ex__(2))[2]
        return _restore, (self.plain,), state


def _restore(plain: type[nn.Module]) -> nn.Module:
    mixed = proximal_class(plain)
    return cast(nn.Module, mixed.__new__(mixed))


TABLE: dict[type[nn.Module], type[ProximalLayer]] = {
    layer.plain: layer for layer in (Linear, Conv1d, Conv2d, Conv3d)
}
"""The one table: torch class -> proxprop class."""


_mixed: dict[type[nn.Module], type[ProximalLayer]] = {}


def proximal_class(plain: type[nn.Module]) -> type[ProximalLayer]:
    """The proximal class that stands for `plain`: the table's, or one solved matrix-free through autograd."""
    if plain in TABLE:
        return TABLE[plain]
    if plain not in _mixed:
        bases: tuple[type, ...] = (AnyLinearInParameters, plain)
        _mixed[plain] = type(f"Proximal{plain.__name__}", bases, {"plain": plain})
    return _mixed[plain]


def detached(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The parameters as constants, so that torch's backward computes no gradient for them."""
    return weight.detach(), bias.detach() if bias is not None else None


def as_kernels_see(input: Tensor) -> Tensor:
    """The input as autocast will hand it to the layer's kernel."""
    device = input.device.type
    castable = input.is_floating_point() and input.dtype != torch.float64
    if castable and torch.is_autocast_enabled(device):
        return input.to(torch.get_autocast_dtype(device))
    return input


def linear_transfer(
    inputs: Sequence[Tensor], output_shape: torch.Size, shapes: Sequence[torch.Size | None]
) -> LinearTransfer:
    """The transfer of one call of a linear layer."""
    (input,), (weight, bias) = inputs, shapes
    return LinearTransfer(input, output_shape, weight, bias is not None)


def conv_transfer(
    geometry: ConvGeometry,
    inputs: Sequence[Tensor],
    output_shape: torch.Size,
    shapes: Sequence[torch.Size | None],
) -> ConvTransfer:
    """The transfer of one call of a convolution."""
    (input,), (weight, bias) = inputs, shapes
    return ConvTransfer(input, output_shape, weight, bias is not None, geometry)


def geometry(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> ConvGeometry:
    """How a convolution module walks over its input."""
    return ConvGeometry(
        kernel=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        dilation=tuple(conv.dilation),
        padding=_padding(conv),
        mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode,
        groups=conv.groups,
    )


def _padding(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[tuple[int, int], ...]:
    """(before, after) for each spatial dimension; 'same' puts the odd one after."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [e * (k - 1) for e, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((width, width) for width in cast(tuple[int, ...], conv.padding))
