"""Attach a model's converted layers to its optimizer: what deferred mode does with each, and why."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from proxprop.conversion import check_module, last_layer
from proxprop.deferred.average import Running
from proxprop.deferred.equation import components, equation_of, why_not_joint
from proxprop.deferred.handle import Attached
from proxprop.deferred.observing import Attachment
from proxprop.deferred.owners import in_units
from proxprop.deferred.preconditioner import products_with_rows, rows_pay, rows_space
from proxprop.device import precision
from proxprop.nn import ProximalLayer, by_default
from proxprop.nn.layer import Part
from proxprop.solvers import DIAGONAL, FEATURE, Plan
from proxprop.transfer import LinearTransfer

Fallback = Literal["explicit", "immediate"]
FALLBACKS: tuple[Fallback, ...] = ("explicit", "immediate")

MAX_BYTES = 2**30
"""Most bytes of one layer's S unless told otherwise: some 16,000 features in float32."""


@dataclass(frozen=True)
class Choice:
    """What is done with a layer.

    Attributes:
        layer: the layer.
        mode: "deferred"; or "explicit", which keeps BackProp's gradient, or "immediate", which solves inside backward.
        bytes: memory for its S; 0 where it has none.
        reason: why it is not deferred; empty where it is.
    """

    layer: ProximalLayer
    mode: str
    bytes: int
    reason: str = ""

    def __str__(self) -> str:
        size = f"S takes {in_units(self.bytes)}" if self.mode == "deferred" else self.reason
        return f"{self.mode}, {size}"


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    running: Running | None = None,
    max_bytes: int = MAX_BYTES,
    fallback: Fallback = "explicit",
) -> Attached:
    """Solve for a model's converted layers when their optimizer steps: once, from all that was summed by then.

    From here on backward leaves the plain gradient `B = AᵀG` in `.grad` and sums `S = AᵀA` beside it, over
    micro-batches and every use of a layer. `optimizer.step()` first turns `.grad` into `D = (λI + S)⁻¹B`, the
    direction of the whole batch however it was cut. Call `.solve()` on the handle to clip or look at D before that,
    and `.detach()` to go back to immediate mode.

    As without proxprop, weight a loss that is a mean over a micro-batch by the micro-batch's share of the batch, so
    that B is the batch's gradient: `(loss * len(x) / batch_size).backward()`. S does not depend on the loss and needs
    no weight.

    Args:
        optimizer: the optimizer, or several that share the model's parameters.
        model: a model with converted layers. Those that no optimizer here holds a parameter of keep immediate mode.
        running: take S from a running average.
        max_bytes: most bytes of one layer's S.
        fallback: what to do with a layer that has no S, or a larger one: "explicit" leaves it BackProp's gradient,
            which does not depend on how the batch is cut either; "immediate" solves inside every backward.

    Returns:
        A handle that solves ahead of a step, detaches, holds the state of running averages and prints what was done
        with each layer.

    A `UserWarning` names layers that are not deferred, and plain layers that train where converted ones are frozen.

    Raises:
        TypeError: something is not an optimizer, not a model or not a `Running`.
        ValueError: the model has nothing to attach or is attached already, or layers share parameters in a way that
            has no common step.

    Example:
        >>> import torch, proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> attach(optimizer, model)
        Attached(
          0: deferred, S takes 100 B
        )
        >>> for x in torch.randn(16, 4).split(8):
        ...     (model(x).square().mean() * len(x) / 16).backward()
        >>> optimizer.step()  # the direction of all 16
    """
    optimizers = _check(optimizer, model, running, max_bytes, fallback)
    _refuse_flat_parameters(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ProximalLayer)}
    if not layers:
        raise ValueError("the model has no proximal layer to attach: call proxprop.convert(model) first")
    width = running.block if running is not None else None
    held = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
    choices = {
        public_name(name, layer): choose(layer, max_bytes, fallback, width)
        for name, layer in layers.items()
        if not held.isdisjoint(layer.parameters())
    }
    _refuse_twice(choices)
    added = _plain_beside_frozen(model)
    if not choices:
        remedy = added or (
            "make the optimizer from model.parameters(), after the model was moved, wrapped or sharded"
        )
        raise ValueError(f"the optimizer holds no parameter of the model's proximal layers: {remedy}")
    check_shared(model, choices, width)
    if added:
        warnings.warn(added, UserWarning, stacklevel=2)
    for name, choice in choices.items():
        if choice.mode != "deferred":
            done = (
                "keeps BackProp's gradient" if choice.mode == "explicit" else "solves inside every backward"
            )
            warnings.warn(
                f"{name} {done}: {choice.reason}; see max_bytes and fallback", UserWarning, stacklevel=2
            )
    return Attached(optimizers, model, choices, running)


def innermost(optimizer: object) -> object:
    """The optimizer that takes the steps, inside wrappers such as Accelerate's, Lightning's and Schedule-Free's."""
    held = (getattr(optimizer, name, None) for name in ("optimizer", "base"))
    inner = next((each for each in held if isinstance(each, Optimizer)), None)
    return optimizer if inner is None else innermost(inner)


WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names that DDP, torch.compile and others put between those of a model's own modules."""


def public_name(name: str, layer: ProximalLayer) -> str:
    """A layer's name in the model that the user wrote; its class where the layer is the whole model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or layer.plain.__name__


def _check(
    optimizer: object, model: object, running: object, max_bytes: object, fallback: object
) -> list[Optimizer]:
    given = [innermost(o) for o in optimizer] if isinstance(optimizer, Sequence) else [innermost(optimizer)]
    optimizers = [each for each in given if isinstance(each, Optimizer)]
    if not given or len(optimizers) < len(given):
        raise TypeError(
            "attach should be given an optimizer or a list of optimizers, then the model, but was given "
            f"{type(optimizer).__name__}"
        )
    for each in optimizers:
        if not _takes_hooks(each):
            raise TypeError(
                f"{type(each).__name__} never called Optimizer.__init__, so that nothing can be solved "
                "before its steps: give the optimizer inside it"
            )
    check_module(model, "attach")
    if running is not None and not isinstance(running, Running):
        raise TypeError(f"running should be a proxprop.Running or None but is {running!r}")
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int | float) or max_bytes < 0:
        raise ValueError(f"max_bytes should be a number of bytes but is {max_bytes!r}")
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback should be one of {', '.join(FALLBACKS)} but is {fallback!r}")
    return optimizers


def _refuse_flat_parameters(model: nn.Module) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel cuts parameters without regard to their rows, so that no rank can solve for "
            "what it holds. Use torch.distributed.fsdp.fully_shard"
        )


def _takes_hooks(optimizer: Optimizer) -> bool:
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def _plain_beside_frozen(model: nn.Module) -> str:
    """Say which plain layers train beside converted ones that are frozen, as LoRA's do if added after convert."""
    last, found = last_layer(model), list[str]()
    for name, parent in model.named_modules():
        converted = [child for child in parent.children() if isinstance(child, ProximalLayer)]
        if not converted or any(_trains(child) for child in converted):
            continue
        for inner, module in parent.named_modules(prefix=name):
            if by_default(type(module)) and module is not last and _trains(module):
                found.append(inner)
    if not found:
        return ""
    names = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (
        f"{names}: plain, and trained beside converted layers that are frozen. If they were added after convert, as "
        "LoRA's layers are, call proxprop.convert(model) once more before attach"
    )


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _refuse_twice(choices: dict[str, Choice]) -> None:
    taken = [name for name, choice in choices.items() if choice.layer._attached is not None]
    if taken:
        raise ValueError(
            f"{taken[0]} is attached already: call .detach() on what attach returned first, or pass all "
            "optimizers at once, proxprop.attach([first, second], model)"
        )


def choose(layer: ProximalLayer, max_bytes: int, fallback: Fallback, width: int | None) -> Choice:
    """Decide for one layer.

    Args:
        layer: a converted layer.
        max_bytes: most bytes of its S.
        fallback: what to do where S is larger, or where there is none.
        width: of the blocks that features are in; None for one block.
    """
    size = gram_bytes(layer, width)
    if size is None:
        return Choice(layer, fallback, 0, f"{layer.plain.__name__} has no Gram matrix that could be summed")
    solver = layer._settings.solver
    if FEATURE not in solver.spaces and DIAGONAL not in layer.spaces:
        return Choice(layer, fallback, 0, f"{solver!r} does not work in feature space")
    if size > max_bytes:
        reason = f"its S would take {in_units(size)}, over the limit of {in_units(max_bytes)}"
        return Choice(layer, fallback, size, reason)
    return Choice(layer, "deferred", size)


def gram_bytes(layer: ProximalLayer, width: int | None = None) -> int | None:
    """Memory for the S of a layer's usual systems; None where it has none."""
    usual = [part for part in layer._parts().values() if part.usual]
    return sum(_part_bytes(layer, part, width) for part in usual) if usual else None


def _part_bytes(layer: ProximalLayer, part: Part, width: int | None) -> int:
    equation = equation_of("", layer, part, width)
    if not equation.trained:
        return 0
    return equation.gram_shape.numel() * precision(equation.parameters[0]).itemsize


def check_shared(model: nn.Module, choices: dict[str, Choice], width: int | None) -> None:
    """Raise ValueError where layers share a parameter in a way that no common system has."""
    deferred = {name: c.layer for name, c in choices.items() if c.mode == "deferred"}
    equations = [
        equation_of(name, layer, part, width)
        for name, layer in deferred.items()
        for part in layer._parts().values()
    ]
    for cluster in components(equations, trained=True):
        for other in cluster[1:]:
            if reason := why_not_joint(cluster[0], other):
                raise ValueError(
                    f"{cluster[0].name} and {other.name} share a parameter, but {reason}, so that they have no common "
                    "step; leave one of them out of convert with exclude=[...]"
                )
    _check_explicit(model, deferred)


def _check_explicit(model: nn.Module, deferred: dict[str, ProximalLayer]) -> None:
    inside = {module for layer in deferred.values() for module in layer.modules()}
    owners: dict[Tensor, str] = {p: name for name, layer in deferred.items() for p in layer.parameters()}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False) if module not in inside else ():
            if parameter in owners:
                raise ValueError(
                    f"{owners[parameter]} shares a parameter with {name}, which is not deferred; their gradients "
                    f"come as one sum, of which only a part has an S. Leave {owners[parameter]} out of convert with "
                    "exclude=[...], or convert both"
                )


def deferred_plan(plan: Plan, layer: ProximalLayer) -> Plan | None:
    """How a call of a converted layer is solved in deferred mode; None where the layer has no S.

    A step of one call is counted. With running averages it is one that updates and inverts them.

    Args:
        plan: how it is solved in immediate mode.
        layer: the layer, attached or not.
    """
    if plan.space == DIAGONAL:
        return plan
    if FEATURE not in plan.costs or not layer._parts():
        return None
    settings = layer._settings
    if _may_keep_rows(layer) and rows_pay(plan.sizes, settings):
        space = rows_space(settings.solver)
        cost = plan.costs[space]
        cost = replace(cost, flops=cost.flops + products_with_rows(plan.sizes, space))
        return replace(plan, space=space, costs={**plan.costs, space: cost}, pinned=settings.space == space)
    return replace(plan, space=FEATURE, pinned=settings.space == FEATURE)


def _may_keep_rows(layer: ProximalLayer) -> bool:
    """Whether rows may stand for S: those of a linear layer that shares no weight and has no running average."""
    if isinstance(layer._attached, Attachment):
        return any(system.may_keep_rows for system in layer._attached.systems.values())
    layouts = (equation_of("", layer, part).layout for part in layer._parts().values())
    return any(isinstance(layout, LinearTransfer) for layout in layouts)
