"""Turn a model's layers proximal in place, and turn them back."""

from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from proxprop.nn import TABLE, ProximalLayer, default_kinds, proximal_class
from proxprop.nn.layer import COMPUTED, check_real
from proxprop.settings import Scaling, Settings
from proxprop.solvers import CG, Solver

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    solver: Solver = CG(),
    tau_theta: float = 1.0,
    *,
    scaling: Scaling = "paper",
    space: str | None = None,
    exclude: Sequence[str] = (),
    include_last: bool = False,
    kinds: Iterable[type[nn.Module]] | Literal["all"] | None = None,
) -> Model:
    """Make the model's layers proximal, in place, by swapping their classes.

    Parameters stay the same objects and `state_dict` keys do not change, so optimizers, checkpoints and hooks
    go on as before. A layer that this call does not select is left as it is, proximal or plain: calling again
    with other settings changes the settings of what it selects, and two calls with different `exclude` or
    `kinds` give layers different solvers.

    Args:
        model: any module, also a single layer.
        solver, tau_theta, scaling, space: see `proxprop.Settings`.
        exclude: patterns (`"head.*"`, `"*.proj"`) of layers to leave out; a pattern is matched against the
            names of the layer, of the modules around it and of its parameters.
        include_last: also convert the last linear or convolutional layer, which the paper keeps explicit.
            Last is meant in the order of `model.named_modules()`.
        kinds: classes to convert. None: linear and convolutional layers, attention's projections and what was
            registered, because the paper's argument is about their Gram matrices. "all": every class that
            `proxprop.nn` knows, also embeddings and the scale and shift of normalisations. Or a list of
            classes; one that `proxprop.nn` does not know is solved matrix-free through autograd, and its
            output must be one tensor, linear in its parameters.

    Returns:
        The same model.

    Raises:
        TypeError: the model is not a module, or a setting has the wrong type.
        ValueError: a setting is out of range, a pattern matches nothing, or nothing is left to convert.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> convert(model, CG(3), tau_theta=0.5)[0]
        Linear(in_features=4, out_features=8, bias=True, solver=CG(iterations=3, per_output=True), tau_theta=0.5)
        >>> type(model[2])  # the last layer stays explicit
        <class 'torch.nn.modules.linear.Linear'>
    """
    check_module(model, "convert")
    settings = Settings(solver, tau_theta, scaling, space)
    kinds = _check_kinds(kinds)
    excluded = _matching(model, exclude)
    last = None if include_last else last_layer(model, kinds)
    inside = _inside_generic(model, kinds)
    selected = [
        (name, module)
        for name, module in model.named_modules()
        if plain_class(module) in kinds and module is not last and not refusal(module)
        if not any(inner in excluded for inner in module.modules())
        if module not in inside
    ]
    if not selected:
        raise ValueError(_nothing_to_convert(model, kinds, last))
    _refuse_attached(model, "convert")
    for name, module in selected:
        proximal_class(plain_class(module)).check(settings)
        check_real(module, name or type(module).__name__)
    for name, module in selected:
        module.__class__ = proximal_class(plain_class(module))
        assert isinstance(module, ProximalLayer)
        module._adopt(settings, name or type(module).plain.__name__)
    return model


def revert(model: Model) -> Model:
    """Undo `convert`, in place: every proximal layer becomes its plain class again.

    Example:
        >>> model = convert(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        >>> type(revert(model)[0])
        <class 'torch.nn.modules.linear.Linear'>
    """
    check_module(model, "revert")
    _refuse_attached(model, "revert")
    for module in model.modules():
        if isinstance(module, ProximalLayer) and plain_class(module) is not type(module):
            module._abandon()
    return model


def _refuse_attached(model: nn.Module, caller: str) -> None:
    if any(isinstance(module, ProximalLayer) and module._attached is not None for module in model.modules()):
        raise ValueError(
            f"{caller}: the model is attached to an optimizer: call proxprop.detach(model) first"
        )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or the one its proximal class stands for.

    A subclass that someone wrote of a proximal class stands for itself.
    """
    ours = isinstance(module, ProximalLayer) and "plain" in vars(type(module))
    return cast(ProximalLayer, module).plain if ours else type(module)


def _inside_generic(model: nn.Module, kinds: Iterable[type[nn.Module]]) -> set[nn.Module]:
    """Modules inside one that is solved as a whole, matrix-free."""
    whole = [module for module in model.modules() if plain_class(module) in kinds]
    whole = [module for module in whole if plain_class(module) not in TABLE]
    return {inner for module in whole for inner in module.modules() if inner is not module}


LAZY = "the shape of its lazy layers is not known yet: run the model once, then convert"
QUANTIZED = "quantisation-aware layers round their weight, so their output is not linear in it"


def quantized(kind: type) -> bool:
    """Whether a class is one of torch's quantisation-aware ones."""
    return kind.__module__.startswith(("torch.ao.", "torchao."))


def refusal(module: nn.Module) -> str:
    """Why a module can't be converted although its class can; empty if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if not COMPUTED.isdisjoint(vars(module)):
        return "a hook computes its weight, so its output is not linear in what is trained"
    kind = plain_class(module)
    return TABLE[kind].refusal(module) if kind in TABLE else ""


def owns_parameters(module: nn.Module) -> bool:
    """Whether the module itself, not one inside it, has parameters."""
    return next(module.parameters(recurse=False), None) is not None


def last_layer(model: nn.Module, kinds: Iterable[type[nn.Module]] = ()) -> nn.Module | None:
    """The last module that is a matrix product or an unknown one of `kinds`, in the order of `named_modules`."""
    candidates = {*default_kinds(), *(kind for kind in kinds if kind not in TABLE)}
    layers = [module for module in model.modules() if plain_class(module) in candidates]
    inside = _inside_generic(model, kinds)
    return next((module for module in reversed(layers) if module not in inside), None)


def check_module(model: object, caller: str) -> None:
    """Raise unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} should be given a torch.nn.Module but was given {type(model).__name__}")


def _check_kinds(kinds: Iterable[type[nn.Module]] | str | None) -> tuple[type[nn.Module], ...]:
    if kinds is None:
        return default_kinds()
    if kinds == "all":
        return tuple(TABLE)
    if isinstance(kinds, str):
        raise ValueError(f'kinds should be "all", a list of module classes or None but is {kinds!r}')
    if not isinstance(kinds, Iterable):
        raise TypeError(f'kinds should be "all", a list such as [nn.Linear] or None but is {kinds!r}')
    kinds = tuple(kinds)
    if not kinds:
        raise ValueError('kinds is empty; it should be "all", a list such as [nn.Linear] or None')
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"kinds should hold module classes such as nn.Linear but holds {kind!r}")
        if quantized(kind):
            raise ValueError(
                f"kinds holds {kind.__module__}.{kind.__name__}, which is quantized: {QUANTIZED}"
            )
    return kinds


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """Modules that a pattern names, themselves, by a parameter, or by a module around them."""
    if isinstance(patterns, str):
        raise TypeError(f"exclude should be a list of patterns but is one string: write [{patterns!r}]")
    if not isinstance(patterns, Sequence | Set):
        raise TypeError(f"exclude should be a list of patterns but is {patterns!r}")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"exclude should hold patterns such as 'head.*' but holds {pattern!r}")
    found: set[nn.Module] = set()
    for pattern in patterns:
        named = [
            module
            for name, module in model.named_modules(remove_duplicate=False)
            if fnmatchcase(name, pattern) or _names_a_parameter(name, module, pattern)
        ]
        if not named:
            kinds = default_kinds()
            names = ", ".join(name for name, module in model.named_modules() if plain_class(module) in kinds)
            raise ValueError(f"exclude pattern {pattern!r} matches no module; there are: {names or 'none'}")
        found.update(inner for module in named for inner in module.modules())
    return found


def _names_a_parameter(name: str, module: nn.Module, pattern: str) -> bool:
    prefix = f"{name}." if name else ""
    return any(fnmatchcase(prefix + own, pattern) for own, _ in module.named_parameters(recurse=False))


def _nothing_to_convert(model: nn.Module, kinds: Sequence[type], last: nn.Module | None) -> str:
    """Say why nothing was selected and what to do."""
    wanted = ", ".join(kind.__name__ for kind in kinds)
    left = [module for module in model.modules() if plain_class(module) in kinds]
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        return f"the model has nothing to convert yet: {LAZY}"
    if not left:
        present = sorted({type(module).__name__ for module in model.modules() if owns_parameters(module)})
        return (
            f"the model has nothing to convert: no {wanted}; "
            f"its parameters are in {', '.join(present) or 'no module'}. "
            "Name other classes that are linear in their parameters with kinds=[...]"
        )
    if left == [last]:
        return f"the model's only {wanted} is its last layer, which stays explicit: pass include_last=True"
    reasons = {refusal(module) for module in left} - {""} or {"exclude names them"}
    return f"nothing is left to convert: none of {len(left)} layers ({wanted}), because {'; '.join(reasons)}"
