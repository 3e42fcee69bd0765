"""The base of all proximal layers: their settings, and how a direction is attached to an output."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from proxprop import device
from proxprop.backward import Observer, Task, attach_direction, refuse_transforms
from proxprop.compiled import CompiledTask, can_be_described
from proxprop.distributed import check_layer, several_ranks
from proxprop.failures import FailureWarner
from proxprop.settings import Scaling, Settings, Space
from proxprop.side_streams import pays, side_streams
from proxprop.solvers import CG, SPACES, Plan, Solver
from proxprop.solvers.plan import possible_spaces
from proxprop.torch_internals import has_hooks, in_transform
from proxprop.transfer import LayerCall

if TYPE_CHECKING:
    from proxprop.deferred.observing import Attachment

Planned = Callable[[nn.Module, Plan], None]
"""A callback for each system that a forward pass sets up, given the module that owns its parameters and its plan."""


class Part(NamedTuple):
    """One of a layer's systems, as far as it is known without an input.

    Attributes:
        blocks: for each of the transfer's parameters its name in the layer and the rows that take part; None for
            a parameter that the layer lacks.
        call: how the layer is called.
        usual: whether calls are expected to set it up, rather than another system with the same rows.
    """

    blocks: tuple[tuple[str, slice] | None, ...]
    call: LayerCall
    usual: bool = True


COMPUTED = {
    "weight",
    "bias",
    "in_proj_weight",
    "in_proj_bias",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
}
"""Parameters that a hook computes if they are found as plain attributes."""


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook computes a parameter, as pruning and the older weight and spectral norm do."""
    own = vars(module)
    return any(isinstance(own.get(name), Tensor) for name in COMPUTED)


_turns = count()
"""Numbers layers, so that neighbours are solved on different streams and a layer always on the same one."""


def _setting(name: str) -> Any:
    """A property that reads one setting, and checks what is written to it."""

    def read(layer: "ProximalLayer") -> Any:
        return getattr(layer._settings, name)

    def write(layer: "ProximalLayer", value: Any) -> None:
        settings = replace(layer._settings, **{name: value})
        layer.check(settings)
        layer._settings = settings

    return property(read, write, doc=f"`{name}` of `proxprop.convert`; new values are checked.")


class ProximalLayer(nn.Module):
    """A layer with torch's own forward, whose parameters receive their proximal direction in backward.

    A subclass stands for the torch class that is the last of its bases. It names in `spaces` where its system can be
    solved, and in `names` the parameters of that system. One that is mixed into classes not known ahead has no such
    base; `derived` makes its subclasses.

    Args:
        *args: as for the plain class.
        **kwargs: as for the plain class.
        solver, tau_theta, scaling, space: see `proxprop.convert`.
    """

    plain: ClassVar[type[nn.Module]]
    mixin: ClassVar[type["ProximalLayer"] | None] = None
    spaces: ClassVar[tuple[str, ...]] = SPACES
    names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    _is_replica = False  # nn.DataParallel sets it

    _settings: Settings
    _layer_name: str
    _failures: FailureWarner
    _observer: Observer | None
    _planned: Planned | None
    _attached: "Attachment | None"
    _turn: int
    _rests: bool
    _checked: bool

    solver = _setting("solver")
    tau_theta = _setting("tau_theta")
    scaling = _setting("scaling")
    space = _setting("space")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        last: Any = cls.__bases__[-1]
        if not (hasattr(cls, "plain") or issubclass(last, ProximalLayer)):
            cls.plain = last

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
    def derived(cls, plain: type[nn.Module]) -> type["ProximalLayer"]:
        """The class that stands for `plain`, whose other attributes it keeps; the same one every time."""
        mixin = cls.mixin or cls
        if (mixin, plain) not in _derived:
            attributes = {"plain": plain, "mixin": mixin}
            _derived[mixin, plain] = type(f"Proximal{plain.__name__}", (mixin, plain), attributes)
        return _derived[mixin, plain]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy a resting layer awake, and a derived class, which has no name, by what it was made from."""
        kind = self._awake()
        made_of = (kind.mixin, kind.plain) if "mixin" in vars(kind) else (kind, None)
        if made_of == (type(self), None):
            return super().__reduce_ex__(protocol)
        return _empty, made_of, cast(tuple[Any, ...], super().__reduce_ex__(2))[2]

    @classmethod
    def _convert(cls, module: nn.Module, settings: Settings, name: str) -> None:
        """Make a module of the plain class, or of another class that stands for it, one of this class."""
        module.__class__ = cls
        cast(ProximalLayer, module)._adopt(settings, name)

    def _adopt(self, settings: Settings, name: str) -> None:
        """Take on settings; `name` is how messages call this layer.

        Each layer has settings of its own. Dynamo makes a number a symbol where it is read first, and if that is in a
        checkpoint, layers outside of it can't share the number.
        """
        self._settings, self._layer_name, self._failures = replace(settings), name, FailureWarner()
        self._observer = self._planned = self._attached = None
        self._turn, self._rests = next(_turns), False

    def _call(self) -> LayerCall | None:
        """How the layer is called; None if that depends on the input, or if there is no Gram matrix to sum."""
        return None

    def _parts(self) -> dict[str, Part]:
        """The systems that calls can set up, by the names that `_tap` is given; none without a Gram matrix."""
        call = self._call()
        if call is None:
            return {}
        there = [(name, self._parameters.get(name) is not None) for name in self.names]
        return {"": Part(tuple((name, slice(None)) if has else None for name, has in there), call)}

    def _tie(self, attachment: "Attachment | None") -> None:
        """Switch to deferred mode, or back to immediate mode if there is no attachment."""
        self._rest(False)
        self._attached = attachment

    @contextmanager
    def _watched(self, observer: Observer | None = None, planned: Planned | None = None) -> Iterator[None]:
        """Within this context the observer receives the solves of calls, and `planned` their plans."""
        before, rests = (self._observer, self._planned), self._awake() is not type(self)
        self._rest(False)
        self._observer, self._planned = observer, planned
        try:
            yield
        finally:
            self._observer, self._planned = before
            self._rest(rests)

    def _rest(self, resting: bool) -> None:
        """Run only the plain class's own forward from now on, or wake up again."""
        awake = self._awake()
        self.__class__ = _resting(awake) if resting else awake
        self._rests = resting  # torch 2.11's Dynamo checks a module again only if an attribute changed

    @classmethod
    def _awake(cls) -> Any:
        """This class, or the one that it rests for."""
        return vars(cls).get("awake", cls)

    def _note_failure(self, failed: Tensor | None) -> None:
        """Warn once if a solve of this layer failed."""
        self._failures.note(self._layer_name, failed, self._settings.solver.failure)

    def _abandon(self) -> None:
        """Become the plain class again, without the attributes declared above."""
        for name in ProximalLayer.__annotations__:
            vars(self).pop(name, None)
        self.__class__ = self.plain  # type: ignore[assignment]

    def _solves(self) -> bool:
        """Whether this call is solved inside backward, or has to report its plan."""
        return (self._attached is None or self._planned is not None) and self._trains()

    def _observed(self) -> bool:
        """Whether deferred mode sums S of this call."""
        if self._attached is None or self._planned is not None:
            return False
        if self._is_replica:
            self._refuse_replicas()
        return torch.is_grad_enabled() and self._attached.observed()

    def _trains(self) -> bool:
        """Whether this call needs a direction or a plan: gradients are enabled and something is trained."""
        if self._is_replica:
            self._refuse_replicas()
        if self._attached is not None and self._attached.explicit():
            return False
        own = self._parameters.values()  # checked first, because walking through submodules takes longer
        trains = torch.is_grad_enabled() and (_some_train(own) or _some_train(self.parameters()))
        if trains and several_ranks() and not torch.compiler.is_compiling():
            check_layer(self, self._layer_name, self._attached is not None)
        return trains

    def _refuse_replicas(self) -> NoReturn:
        raise RuntimeError(
            f"{self._layer_name}: nn.DataParallel's replicas have no parameters to give a direction to. Use "
            "torch.nn.parallel.DistributedDataParallel"
        )

    def _tap(
        self, output: Tensor, inputs: Sequence[Tensor], part: str = "", of: Tensor | None = None
    ) -> Tensor:
        """The output of torch's own forward. If deferred mode observes the call, backward adds S of its inputs.

        Args:
            output: of the layer.
            inputs: as its products saw them.
            part: which of the layer's systems this is.
            of: the tensor that the first input was cast from; other layers that see it share S.
        """
        if not self._observed():
            return output
        assert self._attached is not None
        self._check(output, inputs)
        return self._attached.tap(output, inputs, part, of)

    def _check(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """Raise unless the output is linear in what is trained and all tensors are real, dense and untransformed."""
        if not torch.compiler.is_compiling() and (
            in_transform() or "parametrizations" in self._modules or not COMPUTED.isdisjoint(vars(self))
        ):
            refuse_transforms(self._layer_name)
            if "parametrizations" in self._modules or is_hooked(self):
                self._refuse_computed()
        for tensor in (*inputs, output):
            if tensor.layout != torch.strided or tensor.is_complex():
                _refuse_tensor(self, self._layer_name, tensor)

    def _refuse_computed(self) -> NoReturn:
        raise RuntimeError(
            f"{self._layer_name}: its weight or bias is computed by a hook or a parametrization that was added after "
            "convert, so its output is not linear in what is trained. Call proxprop.revert(model) before "
            "adding it; convert then leaves the layer explicit"
        )

    def _plain_forward(self, *args: Any) -> Tensor:
        """The plain class's own forward from detached parameters, so that torch computes no gradient of them."""
        constant = self.plain.__new__(self.plain)
        parameters = {name: p.detach() if p is not None else None for name, p in self._parameters.items()}
        vars(constant).update(vars(self), _parameters=parameters)  # buffers and all else are the layer's own
        return cast(Tensor, self.plain.forward(constant, *args))

    def _product(
        self,
        function: Callable[..., Tensor],
        call: LayerCall,
        inputs: Sequence[Tensor],
        weight: Tensor,
        bias: Tensor | None,
        owner: nn.Module | None = None,
    ) -> Tensor:
        """`function(*inputs, weight, bias)` with the direction of weight and bias attached; see `_attach`.

        The function sees constants, so that torch's backward computes no gradient for them.
        """
        parameters = parameter_views(weight, bias)
        output = function(*inputs, weight.detach(), bias.detach() if bias is not None else None)
        return self._attach(output, call, inputs, parameters, owner)

    def _attach(
        self,
        output: Tensor,
        call: LayerCall,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
        owner: nn.Module | None = None,
    ) -> Tensor:
        """Return the output with the direction of `parameters` attached.

        Args:
            output: computed from detached parameters.
            call: how the layer was called.
            inputs: the tensors that backward needs, as its products saw them.
            parameters: None for one that the layer does not have.
            owner: the module they belong to, if it is not this one.
        """
        compiles = torch.compiler.is_compiling()
        if compiles:
            # Dynamo makes a float an input of the graph that reads it first. The backward graphs of several layers
            # read this one, so it has to be read here, in the forward graph.
            assert self._settings.tau_theta > 0
        self._check(output, inputs)
        if not _some_train(parameters):
            return output
        if parameters[0] is not None and not parameters[0].requires_grad:
            inputs = call.without_weight(inputs)
        is_opaque = compiles and self._observer is None and can_be_described(call, self._settings)
        # With its own name, each layer would be compiled separately.
        name = "a compiled layer" if compiles else self._layer_name
        beside = self._observer is None and pays(self.spaces, output, parameters)
        task = (CompiledTask if is_opaque else Task)(
            call, self._settings, name, self._failures, self._observer,
            inputs=len(inputs),
            side=side_streams(output.device).side_solve(self._turn) if beside else None,
        )  # fmt: skip
        if self._planned is not None:
            self._planned(owner or self, task.plan(inputs, output, parameters))
        return attach_direction(output, task, inputs, parameters)

    def extra_repr(self) -> str:
        """The plain layer's line, and the settings that differ from the defaults."""
        shown = [f"solver={self.solver}", f"tau_theta={self.tau_theta:g}"]
        if self.scaling != "paper":
            shown.append(f"scaling={self.scaling!r}")
        if self.space is not None:
            shown.append(f"space={self.space!r}")
        return ", ".join(filter(None, [super().extra_repr(), *shown]))


@cache
def _resting(kind: Any) -> Any:
    """The class of a layer between two observed steps: a call is the plain class's own forward, eager or compiled."""
    attributes = {
        "plain": kind.plain, "awake": kind, "forward": kind.plain.forward,
        "__module__": kind.__module__, "__qualname__": kind.__qualname__,
    }  # fmt: skip
    return type(kind.__name__, (kind,), attributes)


_derived: dict[tuple[type[ProximalLayer], type[nn.Module]], type[ProximalLayer]] = {}


def _empty(kind: type[ProximalLayer], plain: type[nn.Module] | None) -> nn.Module:
    """A layer without a state, of a class or of what the class derives from `plain`."""
    made = kind if plain is None else kind.derived(plain)
    return made.__new__(made)


def _some_train(parameters: Iterable[Tensor | None]) -> bool:
    return any(p is not None and p.requires_grad for p in parameters)


def parameter_views(*parameters: Tensor | None) -> list[Tensor | None]:
    """The tensors to attach a direction to: the parameters, or views of them made before the layer's forward runs.

    Autograd runs later nodes first. Through a view that is older than the forward's node, the direction reaches the
    parameter after that node has used the parameter for the input's gradient, so an optimizer may step as soon as a
    gradient is there. In a captured step, solves join at these views. Elsewhere views would only take time. A compiled
    backward is one node, and an exported program should look like the plain layer's.
    """
    there = [p for p in parameters if p is not None]
    if torch.compiler.is_compiling() or not any(has_hooks(p) or device.is_captured(p) for p in there):
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


def _refuse_tensor(layer: nn.Module, name: str, tensor: Tensor) -> NoReturn:
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name}: input should be dense but is {tensor.layout}; hand it over as input.to_dense(), or as a "
            f"padded tensor, or {LEAVE_OUT}"
        )
    check_real(layer, name)
    raise TypeError(f"{name}: input and output should be real but are complex; {LEAVE_OUT}")


def under_autocast(input: Any) -> Any:
    """The input as autocast hands it to a matrix product."""
    if not isinstance(input, Tensor):
        return input  # torch's own kernel says what is wrong
    kind = input.device.type
    castable = input.is_floating_point() and input.dtype != torch.float64 and not input.is_meta
    if castable and torch.is_autocast_enabled(kind):
        return input.to(torch.get_autocast_dtype(kind))
    return input
