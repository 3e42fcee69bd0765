"""The operator that a compiled backward pass calls for a layer's direction.

Traced operation by operation, a solve would be compiled for each layer and batch size, which takes minutes for a deep
network, and our kernels and transforms would be lost. As one operator, `proxprop::direction`, a solve is the same in a
compiled step as in an eager one. Operators take only tensors, numbers and strings, so layers and settings are described
by these. What can't be described is traced: embeddings and normalisations, which only divide, and custom solvers.

A small solve on a CPU would run faster if it were traced. It is not, because each layer would take seconds longer to
compile, and because a traced solve can't look at its outcome and solve again in float64 what rounding spoilt.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from proxprop.backward import Task
from proxprop.device import no_autocast, precision
from proxprop.failures import FailureWarner
from proxprop.settings import Settings
from proxprop.solvers import CG, Exact, Solver
from proxprop.transfer import (
    ConvGeometry,
    ConvTransfer,
    ConvTransposeTransfer,
    LayerCall,
    LinearTransfer,
    Parameters,
    Shapes,
    Transfer,
)

KINDS: dict[str, type[Transfer]] = {
    kind.__name__: kind for kind in (LinearTransfer, ConvTransfer, ConvTransposeTransfer)
}
"""Transfers whose calls can be described by numbers."""

torch.library.define(
    "proxprop::direction",
    "(Tensor input, Tensor G, SymInt[]? weight, SymInt[]? bias, str call, int[] numbers, int[] solver, "
    "float tau_theta, str scaling, str? space) -> Tensor[]",
)


class CompiledTask(Task):
    """A task whose solve is one operator in the graph of a compiled backward pass."""

    def direction(self, saved: Sequence[Tensor], G: Tensor, shapes: Shapes) -> Parameters:
        """The direction, from the operator."""
        (input,), (weight, bias), settings = saved, shapes, self.settings
        found = torch.ops.proxprop.direction(
            input, G, weight, bias, self.call.kind.__name__, call_numbers(self.call),
            _numbers(settings.solver), settings.tau_theta, settings.scaling, settings.space,
        )  # fmt: skip
        following = iter(found)
        return tuple(None if shape is None else next(following) for shape in shapes)


def can_be_described(call: LayerCall, settings: Settings) -> bool:
    """Whether the operator takes a call with these settings."""
    return call.kind.__name__ in KINDS and type(settings.solver) in (CG, Exact)


def call_numbers(call: LayerCall) -> list[int]:
    """The options of a call: a geometry, or whether a weight is transposed."""
    (option,) = call.options or (False,)
    return option.numbers() if isinstance(option, ConvGeometry) else [int(option)]


def call_of(kind: str, numbers: Sequence[int]) -> LayerCall:
    """The inverse of `call_numbers`."""
    linear = KINDS[kind] is LinearTransfer
    return LayerCall(KINDS[kind], (bool(numbers[0]) if linear else ConvGeometry.of(numbers),))


def _numbers(solver: Solver) -> list[int]:
    """A solver as numbers: none for the exact one."""
    return [solver.iterations, int(solver.per_output)] if isinstance(solver, CG) else []


@torch.library.impl("proxprop::direction", "default")
def _direction(
    input: Tensor, G: Tensor, weight: Sequence[int] | None, bias: Sequence[int] | None, *description: Any
) -> list[Tensor]:
    """Solve as an eager backward pass does.

    Args:
        input: of the layer.
        G: gradient of the loss at its output.
        weight, bias: their shapes; None for one that is not trained.
        description: of the call and its settings, as for `_task`.

    Returns:
        The direction of each trained parameter, contiguous, in the precision that it is solved in.
    """
    shapes = [torch.Size(shape) if shape is not None else None for shape in (weight, bias)]
    task = _task(*shapes, *(tuple(part) if isinstance(part, list) else part for part in description))
    with torch.no_grad(), no_autocast(G.device.type):
        found = task.direction((input,), G, shapes)
    return [d.contiguous() for d in found if d is not None]


@torch.library.register_fake("proxprop::direction")
def _fake(input, G, weight, bias, *description):  # type: ignore[no-untyped-def]
    dtype = precision(G, input)
    return [G.new_empty(shape, dtype=dtype) for shape in (weight, bias) if shape is not None]


@lru_cache(maxsize=1024)
def _task(
    weight: torch.Size | None,
    bias: torch.Size | None,
    call: str,
    numbers: tuple[int, ...],
    solver: tuple[int, ...],
    *settings: Any,
) -> Task:
    """The task that was described. Compiled layers that are alike share it, and its one warning."""
    chosen = CG(solver[0], bool(solver[1])) if solver else Exact()
    shown = " and ".join(str(list(shape)) for shape in (weight, bias) if shape is not None)
    return Task(
        call_of(call, numbers),
        Settings(chosen, *settings),
        layer=f"a compiled layer with parameters of shape {shown}",
        failures=FailureWarner(),
        observer=None,
        inputs=1,
    )
