"""Attach a model's converted layers to its optimizer: solve when the optimizer steps."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxprop.convert import check_module
from proxprop.deferred.reduction import Reduction
from proxprop.deferred.step import direct
from proxprop.deferred.system import System
from proxprop.nn import ProximalLayer


class Attachment:
    """One layer's tie to deferred mode. A copy or a pickle of the layer is not attached."""

    def __init__(self, deferred: "Deferred", systems: dict[str, System]) -> None:
        self.deferred, self.systems = deferred, systems

    def leaves(self, part: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The leaves of one of the layer's systems."""
        self.deferred.reduction.notice()
        return self.systems[part].leaves(device, dtype)

    def explicit(self) -> bool:
        """Whether the layer keeps BackProp's gradient."""
        return not self.systems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Deferred:
    """Converted layers whose steps are solved when their optimizer steps; what `attach` returns."""

    def __init__(
        self, optimizers: Sequence[Optimizer], model: nn.Module, layers: dict[str, ProximalLayer]
    ) -> None:
        self.optimizers, self.layers = list(optimizers), layers
        self.systems: list[System] = []
        for name, layer in layers.items():
            parts = {
                key: System(f"{name}.{key}" if key else name, layer, part)
                for key, part in layer._parts().items()
            }
            layer._attached = Attachment(self, parts)
            self.systems += parts.values()
        self.reduction = Reduction(model, self.systems)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]

    @torch.no_grad()
    def solve(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Turn gradients in `.grad` into directions, where backward passes have summed S since the last solve.

        Args:
            parameters: solve only systems that one of these is in.
        """
        chosen = None if parameters is None else set(parameters)
        systems = [s for s in self.systems if chosen is None or not chosen.isdisjoint(s.parameters)]
        for system, S, samples in self.reduction.summed(systems):
            direct(system, S, samples)
            system.note_solved()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Solve before the optimizer steps; where it is given a closure, after each call of it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.solve(parameters)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        solved = self._solving(closure, parameters)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": solved}
        return (args[0], solved, *args[2:]), kwargs

    def _solving(self, closure: Callable[[], Any], parameters: list[Tensor]) -> Callable[[], Any]:
        def solved() -> Any:
            loss = closure()
            self.solve(parameters)
            return loss

        return solved

    def detach(self) -> None:
        """Go back to immediate mode: layers solve inside backward again, and the optimizer steps as before."""
        for hook in self._hooks:
            hook.remove()
        self.reduction.release()
        for system in self.systems:
            system.release()
        for layer in self.layers.values():
            layer._attached = None


def attach(optimizer: Optimizer | Sequence[Optimizer], model: nn.Module) -> Deferred:
    """Solve the steps of a model's converted layers when their optimizer steps, from all that was summed until then."""
    check_module(model, "attach")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, ProximalLayer)}
    return Deferred(optimizers, model, layers)


def detach(attached: nn.Module | Optimizer) -> None:
    """Undo `attach`: of every layer of a model, or of every layer that is attached to an optimizer."""
    assert isinstance(attached, nn.Module)
    for deferred in _deferred(attached):
        deferred.detach()


def solve(model: nn.Module) -> None:
    """Turn the gradients of a model's attached layers into directions now, before the optimizer steps."""
    for deferred in _deferred(model):
        deferred.solve()


def _deferred(model: nn.Module) -> list[Deferred]:
    """What the layers of a model are attached to."""
    attachments = [m._attached for m in model.modules() if isinstance(m, ProximalLayer)]
    return list({a.deferred: None for a in attachments if isinstance(a, Attachment)})
