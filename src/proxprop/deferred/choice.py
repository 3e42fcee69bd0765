"""What deferred mode does with each converted layer, decided before a run starts, with the reason."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from proxprop.backward import precision
from proxprop.deferred.equation import Equation, components
from proxprop.deferred.joint import why_not_joint
from proxprop.nn import ProximalLayer
from proxprop.nn.layer import Part
from proxprop.solvers import DIAGONAL, FEATURE

Fallback = Literal["explicit", "immediate"]
FALLBACKS: tuple[Fallback, ...] = ("explicit", "immediate")

MAX_BYTES = 2**30
"""Most bytes of one layer's S unless told otherwise: some 16,000 features in float32."""


@dataclass(frozen=True)
class Choice:
    """What is done with a layer.

    Attributes:
        layer: the layer.
        mode: "deferred", or why not: "explicit" keeps BackProp's gradient, "immediate" solves inside backward.
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


def choose(name: str, layer: ProximalLayer, max_bytes: int, fallback: Fallback) -> Choice:
    """Decide for one layer.

    Args:
        name: how messages call it.
        layer: a converted layer.
        max_bytes: most bytes of its S.
        fallback: what to do where S is larger, or where there is none.
    """
    size = gram_bytes(layer)
    if size is None:
        return Choice(layer, fallback, 0, f"{layer.plain.__name__} has no Gram matrix that could be summed")
    solver = layer._settings.solver
    if FEATURE not in solver.spaces and DIAGONAL not in layer.spaces:
        return Choice(layer, fallback, 0, f"{solver!r} does not work in feature space")
    if size > max_bytes:
        reason = f"its S would take {in_units(size)}, over the limit of {in_units(max_bytes)}"
        return Choice(layer, fallback, size, reason)
    return Choice(layer, "deferred", size)


def gram_bytes(layer: ProximalLayer) -> int | None:
    """Memory for the S of a layer's usual systems; None where it has none."""
    usual = [part for part in layer._parts().values() if part.usual]
    return sum(_part_bytes(layer, part) for part in usual) if usual else None


def _part_bytes(layer: ProximalLayer, part: Part) -> int:
    equation = Equation.of("", layer, part)
    if not equation.trained:
        return 0
    layout = equation.layout
    groups, _, features, _ = layout.sizes
    numbers = groups * features * (1 if DIAGONAL in layout.spaces else features)
    return numbers * precision(equation.parameters[0]).itemsize


def check_shared(model: nn.Module, choices: dict[str, Choice]) -> None:
    """Raise ValueError where layers share a parameter in a way that no common system has."""
    deferred = {name: c.layer for name, c in choices.items() if c.mode == "deferred"}
    equations = [
        Equation.of(name, layer, part) for name, layer in deferred.items() for part in layer._parts().values()
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


def in_optimizers(layer: ProximalLayer, parameters: Collection[Tensor]) -> bool:
    """Whether an optimizer holds any of a layer's parameters."""
    return any(parameter in parameters for parameter in layer.parameters())


def in_units(size: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
