"""What all proximal layers share: their settings, and how a direction is attached to an output."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from proxprop import side_streams
from proxprop.backward import (
    Build,
    Call,
    Failures,
    Observer,
    Sampling,
    Shapes,
    Summing,
    attach_direction,
    precision,
    refuse_transforms,
)
from proxprop.distributed import check_layer, several_ranks
from proxprop.settings import Scaling, Settings, Space
from proxprop.solvers import CG, SPACES, Plan, Solver
from proxprop.solvers.plan import possible_spaces
from proxprop.transfer import Transfer

Planned = Callable[[nn.Module, Plan], None]
"""Is told the module that owns the parameters of each system a forward pass sets up, and its plan."""


class Part(NamedTuple):
    """One of the systems that a layer sets up, as far as it is known without an input.

    Attributes:
        blocks: for each of the transfer's parameters its name in the layer and the rows that take part; None for
            one that the layer does not have.
        layout: makes a transfer without samples from the shapes of the parameters' blocks; it knows the system's
            sizes and how parameters lie in it. The shapes may also be those of a share of the outputs.
        usual: whether calls are expected to set it up, rather than another one about the same rows.
    """

    blocks: tuple[tuple[str, slice] | None, ...]
    layout: Callable[[Shapes], Transfer]
    usual: bool = True


class Attachment(Protocol):
    """A layer's tie to deferred mode."""

    def leaves(self, part: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The leaves that S of one of the layer's systems is summed in, and the number of samples."""

    def summing(self, part: str) -> Summing:
        """What those leaves belong to."""

    def sampling(self, part: str) -> Sampling | None:
        """Which rows S of a call is estimated from; None for all."""

    def explicit(self) -> bool:
        """Whether the layer keeps BackProp's gradient."""

    def observed(self) -> bool:
        """Whether S is summed in this step; else a call runs torch's own layer."""


COMPUTED = {"weight", "in_proj_weight"}
"""Parameters that, where found as plain attributes, are computed by a hook."""


_turns = count()
"""Numbers layers, so that neighbours are solved on different streams, and a layer always on the same one."""


def _setting(name: str) -> Any:
    """A property that reads one setting, and checks what is written to it."""

    def read(layer: "ProximalLayer") -> Any:
        return getattr(layer._settings, name)

    def write(layer: "ProximalLayer", value: Any) -> None:
        settings = replace(layer._settings, **{name: value})
        layer.check(settings)
        layer._settings = settings

    return property(read, write, doc=f"`{name}` of `proxprop.convert`; what is written to it is checked.")


class ProximalLayer(nn.Module):
    """A layer with torch's own forward, whose parameters receive their proximal direction in backward.

    A subclass names in `plain` the class it stands for and in `spaces` where its system can be solved.

    Args:
        *args, **kwargs: as for the plain class.
        solver, tau_theta, scaling, space: see `proxprop.convert`.
    """

    plain: ClassVar[type[nn.Module]]
    spaces: ClassVar[tuple[str, ...]] = SPACES
    _is_replica = False  # nn.DataParallel sets it

    _settings: Settings
    _failures: Failures
    _observer: Observer | None
    _planned: Planned | None
    _attached: Attachment | None
    _turn: int

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
        space: Space | None = None,
        **kwargs: Any,
    ) -> None:
        settings = Settings(solver, tau_theta, scaling, space)
        self.check(settings)
        super().__init__(*args, **kwargs)
        check_real(self, self.plain.__name__)
        if reason := self.refusal(self):
            raise ValueError(f"{self.plain.__name__} can't be proximal: {reason}")
        self._adopt(settings, f"{self.plain.__name__}({super().extra_repr()})")

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Raise ValueError unless a layer of this class can be solved with these settings."""
        try:
            possible_spaces(settings.solver, settings.space, cls.spaces)
        except ValueError as error:
            raise ValueError(f"{cls.plain.__name__}: {error}") from None

    @classmethod
    def refusal(cls, module: Any) -> str:
        """Why this module of the plain class can't be converted; empty if it can."""
        return ""

    @classmethod
    def derived(cls, plain: type[nn.Module]) -> type["MixedLayer"]:
        """The class for a subclass of the plain class, whose other attributes it keeps."""
        return _mix(cls, plain, {})

    def _adopt(self, settings: Settings, name: str) -> None:
        """Take on settings; `name` is how messages call this layer."""
        self._settings, self._failures = settings, Failures(name)
        self._observer = self._planned = self._attached = None
        self._turn = next(_turns)

    def _parts(self) -> dict[str, Part]:
        """The systems that calls can set up, by the name they give to `_attach`; none without a Gram matrix."""
        return {}

    def _part(self, layout: Callable[[Shapes], Transfer], *names: str) -> dict[str, Part]:
        """The only system of a layer, with its parameters `names` in whole."""
        present = [self._parameters.get(name) is not None for name in names]
        blocks = ((name, slice(None)) if there else None for name, there in zip(names, present, strict=True))
        return {"": Part(tuple(blocks), layout)}

    def _abandon(self) -> None:
        """Become the plain class again, without what `_adopt` set."""
        for name in ("_settings", "_failures", "_observer", "_planned", "_attached", "_turn", "_checked"):
            vars(self).pop(name, None)
        self.__class__ = self.plain  # type: ignore[assignment]

    def _trains(self) -> bool:
        """Whether this call needs a direction, or S: gradients are on and there is something to train."""
        if self._is_replica:
            raise RuntimeError(
                f"{self._failures.layer}: nn.DataParallel's replicas have no parameters to give a direction to. Use "
                "torch.nn.parallel.DistributedDataParallel"
            )
        if self._attached is not None and self._attached.explicit():
            return False
        own = self._parameters.values()  # asked first, because it takes longer to walk through submodules
        trains = torch.is_grad_enabled() and (_some_train(own) or _some_train(self.parameters()))
        if trains and several_ranks() and not torch.compiler.is_compiling():
            check_layer(self, self._failures.layer, self._attached is not None)
        if (
            self._attached is None or self._planned is not None
        ):  # a plan is asked for whether S is summed or not
            return trains
        return trains and self._attached.observed()

    def _attach(
        self,
        output: Tensor,
        build: Build,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
        owner: nn.Module | None = None,
        part: str = "",
        bfloat16: bool = False,
    ) -> Tensor:
        """Return the output with the direction of `parameters` attached.

        Args:
            output: computed from detached parameters.
            build: makes the transfer of this call.
            inputs: the tensors that backward needs, as the kernels saw them.
            parameters: None for one that the layer does not have.
            owner: the module they belong to, where it is not this one.
            part: which of the layer's systems this is.
            bfloat16: whether that transfer takes bfloat16 tensors as they are.
        """
        refuse_transforms(self._failures.layer)
        if not torch.compiler.is_compiling() and self._is_reparametrized():
            raise RuntimeError(
                f"{self._failures.layer}: its weight is computed by a hook or a parametrization that was added after "
                "convert, so its output is not linear in what is trained. Call proxprop.revert(model) before "
                "adding it; convert then leaves the layer explicit"
            )
        if not _some_train(parameters):
            return output
        _check_dense(self._failures.layer, inputs)
        if output.is_complex() or any(tensor.is_complex() for tensor in inputs):
            check_real(self, self._failures.layer)
            raise TypeError(
                f"{self._failures.layer}: input and output should be real but are complex; {LEAVE_OUT}"
            )
        sums: tuple[Tensor, ...] = ()
        mode: dict[str, Any] = {}
        if self._attached is not None:
            sums = self._attached.leaves(part, output.device, precision(output, *inputs))
            mode = {"summing": self._attached.summing(part), "sampling": self._attached.sampling(part)}
        elif self._observer is None and side_streams.pays(self.spaces, output, parameters):
            mode = {"aside": side_streams.Aside(self._turn)}
        call = Call(build, self._settings, self._failures, self._observer, len(inputs), bfloat16, **mode)
        if self._planned is not None:
            self._planned(owner or self, call.plan(inputs, output, parameters))
        return attach_direction(output, call, inputs, parameters, sums)

    def _is_reparametrized(self) -> bool:
        return "parametrizations" in self._modules or not COMPUTED.isdisjoint(vars(self))

    def extra_repr(self) -> str:
        """The plain layer's line, and the settings that are not the default."""
        shown = [f"solver={self.solver}", f"tau_theta={self.tau_theta:g}"]
        if self.scaling != "paper":
            shown.append(f"scaling={self.scaling!r}")
        if self.space is not None:
            shown.append(f"space={self.space!r}")
        return ", ".join(filter(None, [super().extra_repr(), *shown]))


class MixedLayer(ProximalLayer):
    """Base of layers for classes that are not known ahead; `mixed` and `derived` make the class for one of them."""

    mixin: ClassVar[type[ProximalLayer]]
    options: ClassVar[dict[str, Any]]

    @classmethod
    def mixed(cls, plain: type[nn.Module], **options: Any) -> type["MixedLayer"]:
        """The class that mixes `cls` into `plain`, with class attributes `options`; the same one every time."""
        return _mix(cls, plain, options)

    @classmethod
    def derived(cls, plain: type[nn.Module]) -> type["MixedLayer"]:
        """The class for a subclass of what this one was mixed into."""
        return _mix(cls.mixin, plain, cls.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by what it was mixed from: the mixed class itself has no importable name."""
        state = cast(tuple[Any, ...], super().__reduce_ex__(2))[2]
        return _remake, (self.mixin, self.plain, self.options), state


_mixed: dict[tuple[Any, ...], type[MixedLayer]] = {}


def _mix(mixin: type[ProximalLayer], plain: type[nn.Module], options: dict[str, Any]) -> type[MixedLayer]:
    key = (mixin, plain, *options.items())
    if key not in _mixed:
        bases = (mixin, plain) if issubclass(mixin, MixedLayer) else (mixin, MixedLayer, plain)
        attributes = {"plain": plain, "mixin": mixin, "options": options, **options}
        _mixed[key] = type(f"Proximal{plain.__name__}", bases, attributes)
    return _mixed[key]


def _remake(mixin: type[ProximalLayer], plain: type[nn.Module], options: dict[str, Any]) -> nn.Module:
    kind = _mix(mixin, plain, options)
    return kind.__new__(kind)


def _some_train(parameters: Iterable[Tensor | None]) -> bool:
    return any(p is not None and p.requires_grad for p in parameters)


def detached(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The parameters as constants, so that torch's backward computes no gradient for them."""
    return weight.detach(), bias.detach() if bias is not None else None


def handles(*parameters: Tensor | None) -> list[Tensor | None]:
    """Views to attach a direction to, to be made before the layer's forward runs.

    Autograd runs later nodes first. Through a view that is older than the forward's node, the direction reaches
    the parameter after that node has used the parameter for the input's gradient, so that an optimizer may
    step as soon as a gradient is there. A compiled backward is one node, and an exported program should show
    no more than the plain layer's.
    """
    if torch.compiler.is_compiling():
        return list(parameters)
    return [parameter.view_as(parameter) if parameter is not None else None for parameter in parameters]


def check_real(layer: nn.Module, name: str) -> None:
    """Raise TypeError if the layer has complex parameters."""
    for key, parameter in layer.named_parameters():
        if parameter.is_complex():
            raise TypeError(
                f"{name}: {key} should be real (float16, bfloat16, float32 or float64) but is "
                f"{str(parameter.dtype).removeprefix('torch.')}; {LEAVE_OUT}"
            )


LEAVE_OUT = "leave the layer out with exclude=[...]"


def _check_dense(name: str, inputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        if tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: input should be dense but is {tensor.layout}; hand it over as input.to_dense(), or as a "
                "padded tensor, or leave the layer out with exclude=[...]"
            )


def as_kernels_see(input: Any) -> Any:
    """The input as autocast will hand it to the kernel of a matrix product."""
    if not isinstance(input, Tensor):
        return input  # torch's own kernel says what is wrong
    device = input.device.type
    castable = input.is_floating_point() and input.dtype != torch.float64 and not input.is_meta
    if castable and torch.is_autocast_enabled(device):
        return input.to(torch.get_autocast_dtype(device))
    return input
