"""Show, before a run, what was chosen for every module that owns parameters, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proxprop.convert import check_module, last_layer, owns_parameters, plain_class
from proxprop.nn import TABLE, ProximalLayer
from proxprop.solve import Plan, plan


@dataclass(frozen=True)
class LayerSummary:
    """One row of a summary: a module that owns parameters.

    Attributes:
        name: its name in the model.
        kind: its plain class.
        parameters: how many numbers it owns.
        status: "converted" or "explicit".
        reason: why it stays explicit; empty where it is converted.
        plan: how its system is solved; None for an explicit layer or one the example did not reach.
    """

    name: str
    kind: str
    parameters: int
    status: str
    reason: str
    plan: Plan | None


@dataclass(frozen=True)
class Summary:
    """What a conversion did to each module; prints as a table."""

    rows: tuple[LayerSummary, ...]

    @property
    def flops(self) -> float:
        """FLOPs beyond BackProp's, all layers together."""
        return sum(row.plan.flops for row in self.rows if row.plan)

    def __str__(self) -> str:
        header = ("layer", "kind", "parameters", "solved in", "extra FLOPs", "extra memory", "why")
        lines = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(line.rstrip() for line in [text[0], rule, *text[1:], *self._totals()])

    def _totals(self) -> Iterator[str]:
        converted = [row for row in self.rows if row.status == "converted"]
        trained = sum(row.parameters for row in self.rows)
        share = sum(row.parameters for row in converted) / trained if trained else 0.0
        yield f"{len(converted)} of {len(self.rows)} modules converted, {share:.1%} of {trained:,} parameters"
        plain = sum(row.plan.backprop_flops for row in converted if row.plan)
        if plain:
            yield f"extra FLOPs: {self.flops:.3g}, {self.flops / plain:.2f}x BackProp's for the converted layers"


def _cells(row: LayerSummary) -> tuple[str, ...]:
    where = flops = memory = ""
    if row.plan is not None:
        where = row.plan.space + (" (pinned)" if row.plan.pinned else "")
        flops = f"{row.plan.flops / row.plan.backprop_flops:.2f}x" if row.plan.backprop_flops else ""
        memory = _memory(row.plan.bytes)
    return (row.name or "(model)", row.kind, f"{row.parameters:,}", where, flops, memory, row.reason)


def _memory(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def summary(model: nn.Module, example: Any) -> Summary:
    """Show what happens to every module that owns parameters: converted and how, or explicit and why.

    The model is run once on the example, in evaluation mode and without gradients; its state and the random
    state are left as they were.

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
        layer  kind    parameters  solved in  extra FLOPs  extra memory  why
        -----  ------  ----------  ---------  -----------  ------------  ---...
        0      Linear  2,080       sample     0.41x        9 KiB
        2      Linear  330                                               the last layer: ...
        1 of 2 modules converted, 86.3% of 2,410 parameters
        extra FLOPs: 8.24e+04, 0.41x BackProp's for the converted layers
    """
    check_module(model, "summary")
    plans = _plans(model, example)
    last = last_layer(model)
    return Summary(
        tuple(_row(name, m, last, plans) for name, m in model.named_modules() if owns_parameters(m))
    )


def _row(name: str, module: nn.Module, last: nn.Module | None, plans: dict[nn.Module, Plan]) -> LayerSummary:
    converted = isinstance(module, ProximalLayer)
    return LayerSummary(
        name=name,
        kind=plain_class(module).__name__,
        parameters=sum(p.numel() for p in module.parameters(recurse=False)),
        status="converted" if converted else "explicit",
        reason=_reason(module, last, reached=module in plans),
        plan=plans.get(module),
    )


def _reason(module: nn.Module, last: nn.Module | None, reached: bool) -> str:
    """Why a module is explicit; for a converted one, what is worth knowing."""
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return "frozen: nothing to solve"
    if isinstance(module, ProximalLayer):
        return "" if reached else "the example did not reach it"
    if type(module) not in TABLE:
        return f"{type(module).__name__} is not converted by default; see kinds"
    if module is last:
        return "the last layer: explicit in the paper; include_last=True converts it"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return "left out of convert"


def _plans(model: nn.Module, example: Any) -> dict[nn.Module, Plan]:
    """Run the model once and plan each proximal layer's system from the shapes it sees."""
    plans: dict[nn.Module, Plan] = {}

    def look(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(layer, ProximalLayer)
        if any(p.requires_grad for p in layer.parameters()):
            plans[layer] = plan(layer.sizes(inputs, output), layer.solver, layer.space, layer.spaces)

    layers = [module for module in model.modules() if isinstance(module, ProximalLayer)]
    handles = [layer.register_forward_hook(look) for layer in layers]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            _call(model.eval(), example)
    finally:
        for handle in handles:
            handle.remove()
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
