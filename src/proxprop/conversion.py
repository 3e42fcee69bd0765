"""Turn a model's layers proximal in place, and turn them back."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar, cast

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from proxprop.nn import (
    ProximalLayer,
    by_default,
    is_product,
    is_quantized,
    known,
    known_base,
    proximal_class,
    stands_for,
)
from proxprop.nn.layer import check_real, is_hooked
from proxprop.settings import Scaling, Settings, Space
from proxprop.solvers import CG, Solver

Model = TypeVar("Model", bound=nn.Module)

log = logging.getLogger("proxprop")


def convert(
    model: Model,
    solver: Solver = CG(),
    tau_theta: float = 1.0,
    *,
    scaling: Scaling = "paper",
    space: Space | None = None,
    exclude: Sequence[str] = (),
    include_last: bool = False,
    module_types: Iterable[type[nn.Module]] | Literal["all"] | None = None,
) -> Model:
    """Make the model's layers proximal, in place, by swapping their classes.

    Parameters stay the same objects and `state_dict` keys do not change, so optimizers, checkpoints and hooks
    go on as before. A layer that this call does not select is left as it is, proximal or plain: calling again
    with other settings changes the settings of what it selects, and two calls with different `exclude` or
    `module_types` give layers different solvers. Layers that are added later, as LoRA's are, stay plain until
    `convert` is called again.

    The logger "proxprop" is told what was converted and what stays explicit: as information where that was asked
    for, as a warning where a trained linear or convolutional layer can't be converted.

    Args:
        model: any module, also a single layer.
        solver: `CG(iterations)` or `Exact()`.
        tau_theta: τ_θ > 0, the proximal step size. Larger values trust the quadratic model of the layer
            further from the current parameters.
        scaling: length of the direction, for N samples (batch × positions).
            "paper": `D = (I/τ_θ + S)⁻¹ AᵀG`, Proposition 2; a learning rate near 1 is a starting point.
            "gradient": `D = (I + τ_θ·S/N)⁻¹ AᵀG`, which tends to the gradient as τ_θ → 0, so that BackProp's
            learning rate is a starting point, and in which the batch size drops out.
        space: "sample", "feature" or "matrix_free" to pin where the system is solved; None lets the cost model
            choose. It changes the cost, never the answer.
        exclude: patterns (`"head.*"`, `"*.proj"`) of layers to leave out; a pattern is matched against the
            names of the layer, of the modules around it and of its parameters.
        include_last: also convert the last linear or convolutional layer, which the paper keeps explicit.
            Last is meant in the order of `model.named_modules()`.
        module_types: classes to convert. None: linear and convolutional layers, attention's projections and what
            was registered, because the paper's argument is about their Gram matrices. "all": every class that
            `proxprop.nn` knows, also embeddings and the scale and shift of normalisations. Or a list of
            classes; one that `proxprop.nn` does not know is solved matrix-free through autograd, and its
            output must be one tensor, linear in its parameters. A subclass is taken as its base unless it changes
            what a call computes.

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
    wanted = _wanted(module_types)
    excluded = _matching(model, exclude)
    last = None if include_last else last_layer(model, wanted.takes)
    inside = _inside_generic(model, wanted.takes)
    selected = [
        (name, module)
        for name, module in model.named_modules()
        if wanted.takes(plain_class(module)) and module is not last and not refusal(module)
        if not any(inner in excluded for inner in module.modules())
        if module not in inside
    ]
    if not selected:
        raise ValueError(_nothing_to_convert(model, wanted, last))
    _refuse_attached(model, "convert")
    for name, module in selected:
        proximal_class(plain_class(module)).check(settings)
        check_real(module, name or type(module).__name__)
    for name, module in selected:
        proximal = proximal_class(plain_class(module))
        proximal._convert(module, settings, name or proximal.plain.__name__)
    _tell(model, len(selected), last, excluded, wanted)
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
            f"{caller}: the model is attached to an optimizer: call .detach() on what proxprop.attach returned first"
        )


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or the one its proximal class stands for.

    A subclass that someone wrote of a proximal class stands for itself.
    """
    ours = isinstance(module, ProximalLayer) and "plain" in vars(type(module))
    return cast(ProximalLayer, module).plain if ours else type(module)


Takes = Callable[[type[nn.Module]], bool]
"""Whether layers of a class are to be converted."""


class _Wanted(NamedTuple):
    """Which classes a call of `convert` is about, and how messages call them."""

    words: str
    takes: Takes


def _inside_generic(model: nn.Module, takes: Takes) -> set[nn.Module]:
    """Modules inside one that is solved as a whole, matrix-free."""
    whole = [module for module in model.modules() if takes(plain_class(module))]
    whole = [module for module in whole if known(plain_class(module)) is None]
    return {inner for module in whole for inner in module.modules() if inner is not module}


LAZY = "the shape of its lazy layers is not known yet: run the model once, then convert"
EMPTY = "one of its parameters has no entries"
PARAMETRIZED = (
    "its parameters are computed by a parametrization, and no layer is linear in what computes them"
)
QUANTIZED = "quantisation-aware layers round their weight, so their output is not linear in it"


def refusal(module: nn.Module) -> str:
    """Why a module can't be converted although its class can; empty if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if any(is_hooked(inner) for inner in module.modules()):
        return "a hook computes its weight or bias, so its output is not linear in what is trained"
    found = known(plain_class(module))
    if found is None:
        return ""
    if any(is_parametrized(inner) for inner in module.modules()):
        return PARAMETRIZED
    return found.refusal(module) or (EMPTY if any(p.numel() == 0 for p in module.parameters()) else "")


def obstacle(module: nn.Module) -> str:
    """Why a module can't be converted, or not unless its class is asked for; empty if it can."""
    kind = plain_class(module)
    if (why := refusal(module)) or known(kind) is not None:
        return why
    if is_parametrized(module):
        return PARAMETRIZED
    if isinstance(module, LazyModuleMixin):
        return LAZY
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent: its output is not linear in its weights"
    if is_quantized(kind):
        return QUANTIZED
    if kind is NonDynamicallyQuantizableLinear:
        return "a part of MultiheadAttention, which is converted as a whole"
    base = known_base(kind)
    found = (
        "not a class proxprop knows" if base is None else f"a subclass of {base.__name__} that may do more"
    )
    return f"{found}; see module_types and proxprop.register"


def _tell(
    model: nn.Module, converted: int, last: nn.Module | None, excluded: Set[nn.Module], wanted: _Wanted
) -> None:
    """Log what was done, and which trained linear and convolutional layers were not converted."""
    asked, unasked = list[str](), list[str]()
    solved = {
        inner for layer in model.modules() if isinstance(layer, ProximalLayer) for inner in layer.modules()
    }
    for name, module in model.named_modules():
        kind = plain_class(module)
        trained = any(p.requires_grad for p in module.parameters())
        if module in solved or not is_product(kind) or not trained:
            continue
        if module is last:
            asked.append(f"{name} (the last layer)")
        elif module in excluded:
            asked.append(f"{name} (excluded)")
        elif why := obstacle(module):
            unasked.append(f"{name} ({why})")
        else:
            asked.append(f"{name} (no {wanted.words})")
    log.info("converted layers: %d; left explicit: %s", converted, ", ".join(asked) or "none")
    if unasked:
        log.warning("convert left explicit: %s", ", ".join(unasked))


def owns_parameters(module: nn.Module) -> bool:
    """Whether the module itself, not one inside it, has parameters."""
    return next(module.parameters(recurse=False), None) is not None


def last_layer(model: nn.Module, takes: Takes = by_default) -> nn.Module | None:
    """The last module that is a matrix product or an unknown one to convert, in the order of `named_modules`.

    A matrix product counts also where it can't be converted: the layer before it is no last one.
    """
    inside = _inside_generic(model, takes)
    last = None
    for module in model.modules():
        kind = plain_class(module)
        if (is_product(kind) or (takes(kind) and known(kind) is None)) and module not in inside:
            last = module
    return last


def check_module(model: object, caller: str) -> None:
    """Raise unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} should be given a torch.nn.Module but was given {type(model).__name__}")


def _wanted(types: Iterable[type[nn.Module]] | str | None) -> _Wanted:
    """Check `module_types` and say what they take."""
    if types is None:
        return _Wanted("linear or convolutional layer", by_default)
    if types == "all":
        return _Wanted("layer of proxprop.nn", lambda kind: known(kind) is not None)
    if isinstance(types, str):
        raise ValueError(f'module_types should be "all", a list of module classes or None but is {types!r}')
    if not isinstance(types, Iterable):
        raise TypeError(f'module_types should be "all", a list such as [nn.Linear] or None but is {types!r}')
    classes = tuple(types)
    if not classes:
        raise ValueError('module_types is empty; it should be "all", a list such as [nn.Linear] or None')
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"module_types should hold module classes such as nn.Linear but holds {kind!r}")
        if is_quantized(kind):
            raise ValueError(
                f"module_types holds {kind.__module__}.{kind.__name__}, which is quantized: {QUANTIZED}"
            )
    names = ", ".join(kind.__name__ for kind in classes)
    return _Wanted(names, lambda kind: kind in classes or stands_for(kind) in classes)


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
            if any(fnmatchcase(each, pattern) for each in _names(name, module))
        ]
        if not named:
            names = ", ".join(n for n, module in model.named_modules() if by_default(plain_class(module)))
            raise ValueError(f"exclude pattern {pattern!r} matches no module; there are: {names or 'none'}")
        found.update(inner for module in named for inner in module.modules())
    return found


def _names(name: str, module: nn.Module) -> list[str]:
    """The names of a module and of its own parameters."""
    return [name, *(own for own, _ in module.named_parameters(name, recurse=False))]


def _nothing_to_convert(model: nn.Module, wanted: _Wanted, last: nn.Module | None) -> str:
    """Say why nothing was selected, what was found and what to do."""
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        return f"the model has nothing to convert yet: {LAZY}"
    left = [module for module in model.modules() if wanted.takes(plain_class(module))]
    others = [module for module in model.modules() if owns_parameters(module) and module not in left]
    present = ", ".join(_counted(others)) or "no module"
    ask = (
        "Name classes that are linear in their parameters with module_types=[...], or a linear layer of another "
        "library with proxprop.register(...)"
    )
    if not left:
        return f"the model has nothing to convert: no {wanted.words}; its parameters are in {present}. {ask}"
    if left == [last]:
        only = (
            f"the model's only {wanted.words} is its last layer, which stays explicit: pass include_last=True"
        )
        return f"{only}; its other parameters are in {present}. {ask}" if others else only
    reasons = {refusal(module) for module in left} - {""} or {"exclude names them"}
    return f"nothing is left to convert: none of {len(left)} layers ({wanted.words}), because {'; '.join(reasons)}"


def _counted(modules: Iterable[nn.Module]) -> Iterable[str]:
    """Class names, with how many there are of each."""
    for name, count in sorted(Counter(plain_class(module).__name__ for module in modules).items()):
        yield name if count == 1 else f"{count} {name}"
