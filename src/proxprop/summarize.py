"""Show, before a run, what was chosen for every module that owns parameters, and why."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from proxprop.conversion import check_module, last_layer, obstacle, owns_parameters, plain_class
from proxprop.deferred.attaching import deferred_plan, gram_bytes
from proxprop.deferred.average import Running
from proxprop.deferred.owners import in_units
from proxprop.nn import ProximalLayer, by_default
from proxprop.solvers import FEATURE, Plan
from proxprop.transfer.autograd import cuda_devices


@dataclass(frozen=True)
class LayerSummary:
    """One row of a summary: a module that owns parameters.

    Attributes:
        name: its name in the model.
        kind: its plain class.
        parameters: how many numbers it owns.
        status: "converted" or "explicit".
        reason: why it stays explicit; empty where it is converted.
        immediate: how each system that it sets up in a forward pass is solved in immediate mode.
        deferred: how they are solved in deferred mode, for a batch that is not cut; empty where there is no S.
        gram_bytes: memory for its S in deferred mode; None where it has none.
        attached: whether it is in deferred mode.
    """

    name: str
    kind: str
    parameters: int
    status: str
    reason: str
    immediate: tuple[Plan, ...]
    deferred: tuple[Plan, ...] = ()
    gram_bytes: int | None = None
    attached: bool = False

    @property
    def plans(self) -> tuple[Plan, ...]:
        """How its systems are solved, in the mode that it is in."""
        return self.deferred if self.attached else self.immediate

    @property
    def plan(self) -> Plan | None:
        """How its (first) system is solved; None for an explicit layer or one the example did not reach."""
        return self.plans[0] if self.plans else None

    @property
    def calls(self) -> int:
        """How many systems it sets up in a forward pass."""
        return len(self.plans)


@dataclass(frozen=True)
class Summary:
    """What a conversion did to each module; prints as a table.

    Attributes:
        rows: the modules that own parameters.
        running: the running averages of an attached model, if it has them.
    """

    rows: tuple[LayerSummary, ...]
    running: Running | None = None

    @property
    def flops(self) -> float:
        """FLOPs beyond BackProp's, all layers together, in the mode that each is in."""
        return _flops(row.plans for row in self.rows)

    @property
    def immediate_flops(self) -> float:
        """FLOPs beyond BackProp's with every layer in immediate mode."""
        return _flops(row.immediate for row in self.rows)

    @property
    def deferred_flops(self) -> float:
        """FLOPs beyond BackProp's with every layer in deferred mode, in a step that forms S and solves with it."""
        return _flops(row.deferred for row in self.rows)

    @property
    def gram_bytes(self) -> int:
        """Memory for S in deferred mode, all layers together; running averages hold its average and its inverse."""
        return sum(row.gram_bytes or 0 for row in self.rows)

    def __str__(self) -> str:
        header = tuple(COLUMNS.split(", "))
        lines = [header, *(_cells(row) for row in self.rows)]
        full = [line for line in lines if len(line) == len(header)]
        widths = [max(len(line[column]) for line in lines) for column in range(EXPLICIT - 1)]
        widths += [max(len(line[column]) for line in full) for column in range(EXPLICIT - 1, len(header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)) for line in lines
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(line.rstrip() for line in [text[0], rule, *text[1:], *self._totals()])

    def _totals(self) -> Iterator[str]:
        converted = [row for row in self.rows if row.status == "converted"]
        trained = sum(row.parameters for row in self.rows)
        share = sum(row.parameters for row in converted) / trained if trained else 0.0
        yield f"{len(converted)} of {len(self.rows)} modules converted, {share:.1%} of {trained:,} parameters"
        plain = sum(plan.backprop_flops for row in converted for plan in row.immediate)
        if plain:
            yield f"extra FLOPs: {self.flops:.3g}, {self.flops / plain:.2f}x BackProp's for the converted layers"
            yield from self._other_mode(plain)
        if self.gram_bytes:
            size = self.gram_bytes
            yield f"deferred mode (attach) holds S: {in_units(size)}; with running averages {in_units(2 * size)}"

    def _other_mode(self, plain: float) -> Iterator[str]:
        """What the mode that the model is not in would cost, where that is not the same."""
        attached = any(row.attached for row in self.rows)
        other = self.immediate_flops if attached else self.deferred_flops
        if other == self.flops or not any(row.deferred for row in self.rows):
            return
        formed = sum(any(plan.space == FEATURE for plan in row.deferred) for row in self.rows)
        S = f" with S of {formed} layers formed" if formed else ""
        if attached:
            yield f"that is in deferred mode{S}; in immediate mode: {other:.3g}, {other / plain:.2f}x"
            if self.running is not None:
                update, invert = self.running.update_every, self.running.invert_every
                root = "" if self.running.power == 1 else ", three to six times for its root"
                yield f"running averages: S is formed in one step of {update}, and solved with in one of {invert}{root}"
        else:
            yield f"in deferred mode (attach){S}: {other:.3g}, {other / plain:.2f}x"


COLUMNS = "layer, kind, parameters, solved in, extra FLOPs, memory, deferred S, how"
"""Titles of the table's columns."""

EXPLICIT = 4
"""How many cells the row of an explicit layer has: its last one, the reason, runs on over the columns of numbers."""


def _flops(plans: Iterable[tuple[Plan, ...]]) -> float:
    return sum(plan.flops for found in plans for plan in found)


def _cells(row: LayerSummary) -> tuple[str, ...]:
    name = (row.name or "(model)", row.kind, f"{row.parameters:,}")
    if row.plan is None and row.gram_bytes is None:
        return (*name, row.reason)
    where = flops = memory = ""
    gram = in_units(row.gram_bytes) if row.gram_bytes is not None else ""
    if row.plan is not None:
        where = row.plan.space + (" (pinned)" if row.plan.pinned else "")
        flops = f"{row.plan.flops / row.plan.backprop_flops:.2f}x" if row.plan.backprop_flops else ""
        memory = in_units(row.plan.bytes)
    how = row.plan.backend if row.plan is not None else ""
    reason = ", ".join(filter(None, [row.reason, how]))
    return (*name, where, flops, memory, gram, reason)


def summary(model: nn.Module, example: Any) -> Summary:
    """Show what happens to every module that owns parameters: converted and how, or explicit and why.

    The model is run once on the example, in evaluation mode; nothing is solved, and its state, its gradients
    and the random state are left as they were. An attached model shows what a step of deferred mode costs: it forms
    S of every layer and solves in feature space, even where immediate mode would be cheaper; only some linear
    layers keep their rows instead. For convolutions on a CPU that is most of a step.

    Args:
        model: a model, converted or not.
        example: an input such as the model will see in training (the batch size matters for the plan): a
            tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        A summary that prints as a table, and whose `rows` can be read.

    Example:
        >>> import proxprop
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> model = proxprop.convert(model, proxprop.CG(3))
        >>> print(summary(model, torch.zeros(16, 64)))
        layer  kind    parameters  solved in  extra FLOPs  memory  deferred S  how
        -----  ------  ----------  ---------  -----------  ------  ----------  -----
        0      Linear  2,080       sample     0.41x        9 KiB   16.5 KiB    torch
        2      Linear  330         the last layer: explicit in the paper; include_last=True converts it
        1 of 2 modules converted, 86.3% of 2,410 parameters
        extra FLOPs: 8.24e+04, 0.41x BackProp's for the converted layers
        in deferred mode (attach): 3.99e+05, 2.00x
        deferred mode (attach) holds S: 16.5 KiB; with running averages 33 KiB
    """
    check_module(model, "summary")
    plans = _plans(model, example)
    last = last_layer(model)
    rows = (_row(name, m, last, plans) for name, m in model.named_modules() if owns_parameters(m))
    return Summary(tuple(rows), _running(model))


def _running(model: nn.Module) -> Running | None:
    layers = (module for module in model.modules() if isinstance(module, ProximalLayer))
    ties = (layer._attached for layer in layers if layer._attached is not None)
    return next((tie.handle.averages.running for tie in ties if tie.handle.averages is not None), None)


Plans = dict[nn.Module, list[tuple[ProximalLayer, Plan]]]
"""By the module that owns a system's parameters: the layer that sets it up, and the plan of immediate mode."""


def _row(name: str, module: nn.Module, last: nn.Module | None, plans: Plans) -> LayerSummary:
    found = plans.get(module, [])
    deferred = tuple(deferred_plan(plan, layer) for layer, plan in found)
    converted = (isinstance(module, ProximalLayer) and not _kept_explicit(module)) or bool(found)
    return LayerSummary(
        name=name,
        kind=plain_class(module).__name__,
        parameters=sum(p.numel() for p in module.parameters(recurse=False)),
        status="converted" if converted else "explicit",
        reason=_reason(module, last, reached=bool(found)),
        immediate=tuple(plan for _, plan in found),
        deferred=tuple(plan for plan in deferred if plan is not None),
        gram_bytes=gram_bytes(module) if isinstance(module, ProximalLayer) else None,
        attached=any(layer._attached is not None for layer, _ in found),
    )


def _reason(module: nn.Module, last: nn.Module | None, reached: bool) -> str:
    """Why a module is explicit; for a converted one, what is worth knowing."""
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return "frozen: nothing to solve"
    if reached:
        return "" if isinstance(module, ProximalLayer) else "solved by the module around it"
    if _kept_explicit(module):
        return "attached without an S: BackProp's gradient; see what attach returned"
    if isinstance(module, ProximalLayer):
        return "the example did not reach it"
    if module is last:
        return "the last layer: explicit in the paper; include_last=True converts it"
    if why := obstacle(module):
        return why
    if by_default(type(module)):
        return "left out of convert, or added after it"
    return f"{type(module).__name__} is converted when asked for; see module_types"


def _kept_explicit(module: nn.Module) -> bool:
    """Whether `attach` left a converted layer BackProp's gradient."""
    attached = module._attached if isinstance(module, ProximalLayer) else None
    return attached is not None and attached.explicit()


def _plans(model: nn.Module, example: Any) -> Plans:
    """Run the model once and take down the plan of every system it sets up."""
    plans: Plans = {}

    def take_down(layer: ProximalLayer, owner: nn.Module, plan: Plan) -> None:
        plans.setdefault(owner, []).append((layer, plan))

    layers = [module for module in model.modules() if isinstance(module, ProximalLayer)]
    modes = {module: module.training for module in model.modules()}
    try:
        with ExitStack() as stack, torch.enable_grad(), torch.random.fork_rng(devices=cuda_devices(model)):
            for layer in layers:
                stack.enter_context(layer._watched(planned=functools.partial(take_down, layer)))
            _call(model.eval(), example)
    finally:
        for module, training in modes.items():
            module.training = training
    return plans


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, dict):
        model(**example)
    elif isinstance(example, tuple):
        model(*example)
    else:
        model(example)
