"""Attach a model's converted layers to its optimizer, and undo it."""

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from proxprop.convert import check_module
from proxprop.deferred.choice import (
    LIMIT,
    OTHERWISE,
    Choice,
    Otherwise,
    check_shared,
    choose,
    in_optimizers,
)
from proxprop.deferred.handle import Deferred, attachments
from proxprop.deferred.running import Running
from proxprop.distributed import refuse_flat_parameters
from proxprop.nn import ProximalLayer
from proxprop.torch_internals import step_hooks


def attach(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    running: Running | None = None,
    limit: int = LIMIT,
    otherwise: Otherwise = "explicit",
) -> Deferred:
    """Solve the steps of a model's converted layers when their optimizer steps, once, from all that was summed by then.

    From here on backward leaves the plain gradient `B = AᵀG` in `.grad` and sums `S = AᵀA` beside it, over
    micro-batches and every use of a layer. `optimizer.step()` first turns `.grad` into `D = (λI + S)⁻¹B`, the
    direction of the whole batch however it was cut. Call `proxprop.solve(model)` before it to clip or look at D.

    A loss that is a mean over a micro-batch has to be weighted by the micro-batch's share of the batch, as without
    proxprop, for B to be the batch's gradient: `(loss * len(x) / batch_size).backward()`. S does not depend on
    the loss, so that it needs no weighting.

    Args:
        optimizer: whose steps to solve before, or several that share the model's parameters.
        model: a model with converted layers. Layers of which no optimizer here holds a parameter keep immediate mode.
        running: take S from a running average.
        limit: most bytes of one layer's S.
        otherwise: what becomes of a layer without an S, or with one over the limit: "explicit" leaves it BackProp's
            gradient, which does not depend on how the batch is cut either; "immediate" solves inside every backward.

    Returns:
        What was done with each layer, and the state of running averages.

    Raises:
        TypeError: something is not an optimizer, not a model or not a `Running`.
        ValueError: the model has nothing to attach or is attached already, or layers share parameters in a way that
            has no common step.

    Example:
        >>> import torch, proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> attach(optimizer, model)
        Deferred(
          0: deferred, S takes 100 B
        )
        >>> for x in torch.randn(16, 4).split(8):
        ...     (model(x).square().mean() * len(x) / 16).backward()
        >>> optimizer.step()  # the direction of all 16
    """
    optimizers = _check(optimizer, model, running, limit, otherwise)
    refuse_flat_parameters(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ProximalLayer)}
    if not layers:
        raise ValueError("the model has no proximal layer to attach: call proxprop.convert(model) first")
    held = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
    choices = {
        public_name(name, layer): choose(name, layer, limit, otherwise)
        for name, layer in layers.items()
        if in_optimizers(layer, held)
    }
    _refuse_twice(choices)
    if not choices:
        raise ValueError(
            "the optimizer holds no parameter of the model's proximal layers: make the optimizer from "
            "model.parameters(), after the model was moved, wrapped or sharded"
        )
    check_shared(model, choices)
    for name, choice in choices.items():
        if choice.mode != "deferred":
            done = (
                "keeps BackProp's gradient" if choice.mode == "explicit" else "solves inside every backward"
            )
            warnings.warn(
                f"{name} {done}: {choice.reason}; see limit and otherwise", UserWarning, stacklevel=2
            )
    return Deferred(optimizers, model, choices, running)


def detach(attached: nn.Module | Optimizer) -> None:
    """Undo `attach`, for a model or for an optimizer: layers solve inside backward again. S that waits is dropped.

    Example:
        >>> import torch, proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> handle = attach(optimizer, model)
        >>> detach(optimizer)
    """
    found = _deferred_of(attached)
    if not found:
        raise ValueError("detach: nothing is attached here")
    for deferred in found:
        deferred.detach()


def solve(model: nn.Module) -> None:
    """Turn the gradients of a model's attached layers into directions now, to clip or look at them before a step.

    A part of a model may be given too: its layers are solved, and with them those that share parameters. The
    optimizer's step then solves nothing more. Where no backward pass came since the last solve, nothing is done.

    Example:
        >>> import torch, proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> handle = attach(optimizer, model)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> solve(model)
        >>> norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    check_module(model, "solve")
    found = _deferred_of(model)
    if not found:
        raise ValueError("solve: the model is not attached: call proxprop.attach(optimizer, model) first")
    for deferred in found:
        deferred.solve(model.parameters())


def innermost(optimizer: object) -> object:
    """The optimizer that takes the steps, inside wrappers such as Accelerate's and Lightning's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names that DDP, torch.compile and others put between those of a model's own modules."""


def public_name(name: str, layer: ProximalLayer) -> str:
    """A layer's name in the model that the user wrote; its class where the layer is the whole model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or layer.plain.__name__


def _check(
    optimizer: object, model: object, running: object, limit: object, otherwise: object
) -> list[Optimizer]:
    given = [innermost(o) for o in optimizer] if isinstance(optimizer, Sequence) else [innermost(optimizer)]
    optimizers = [each for each in given if isinstance(each, Optimizer)]
    if not given or len(optimizers) < len(given):
        raise TypeError(
            "attach should be given an optimizer or a list of optimizers, then the model, but was given "
            f"{type(optimizer).__name__}"
        )
    check_module(model, "attach")
    if running is not None and not isinstance(running, Running):
        raise TypeError(f"running should be a proxprop.Running or None but is {running!r}")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit < 0:
        raise ValueError(f"limit should be a number of bytes but is {limit!r}")
    if otherwise not in OTHERWISE:
        raise ValueError(f"otherwise should be one of {', '.join(OTHERWISE)} but is {otherwise!r}")
    return optimizers


def _refuse_twice(choices: dict[str, Choice]) -> None:
    taken = [name for name, choice in choices.items() if choice.layer._attached is not None]
    if taken:
        raise ValueError(
            f"{taken[0]} is attached already: call proxprop.detach(model) first, or pass all "
            "optimizers at once, proxprop.attach([first, second], model)"
        )


def _deferred_of(attached: nn.Module | Optimizer) -> list[Deferred]:
    """What a model's layers, or an optimizer, are attached by."""
    if isinstance(attached, nn.Module):
        return list({attachment.deferred: None for attachment in attachments(attached)})
    inner = innermost(attached)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"detach should be given a model or an optimizer but was given {type(attached).__name__}"
        )
    owners = [getattr(hook, "__self__", None) for hook in step_hooks(inner)]
    return [owner for owner in owners if isinstance(owner, Deferred)]
