"""Bounds that were tried beside `proxprop.bound` and are not in the library, as plain as they can be."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear
from torch.optim import Optimizer

import proxprop


class Candidate:
    """Cut each layer's step to a limit, in the norm of its weights or of what it does to the layer's last outputs.

    Args:
        optimizer: whose steps.
        model: linear layers and convolutions without options.
        outputs: measure `AΔV` against `AV`, A the last batch, instead of ΔV against V.
        present: against the present size, instead of that of the first step.
        whole: one factor for the whole model.
        step: the most of one step.
        budget: the most of the root of all squared steps so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        outputs: bool = False,
        present: bool = False,
        whole: bool = False,
        step: float = math.inf,
        budget: float = math.inf,
    ) -> None:
        layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.parts = [layers] if whole else [[layer] for layer in layers]
        self.outputs, self.present, self.step, self.budget = outputs, present, step, budget
        self.spent, self.sizes = [0.0] * len(self.parts), [0.0] * len(self.parts)
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for layer in layers if outputs else ():
            layer.register_forward_hook(self._see)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _see(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen[layer] = inputs[0].detach(), output.detach()

    @torch.no_grad()
    def _before(self, *_: Any) -> None:
        self.old = [[[p.clone() for p in m.parameters()] for m in part] for part in self.parts]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        for index, (part, olds) in enumerate(zip(self.parts, self.old, strict=True)):
            moves = [
                [p - q for p, q in zip(m.parameters(), old, strict=True)]
                for m, old in zip(part, olds, strict=True)
            ]
            length = math.hypot(*(self._length(m, move) for m, move in zip(part, moves, strict=True)))
            if self.present or not self.sizes[index]:
                self.sizes[index] = math.hypot(*map(self._size, part, olds))
            self.spent[index] += length**2
            limit = self.sizes[index] / max(
                math.sqrt(self.spent[index]) / self.budget, length / self.step, 1e-30
            )
            if limit < 1:
                for m, old, move in zip(part, olds, moves, strict=True):
                    for p, q, d in zip(m.parameters(), old, move, strict=True):
                        p.copy_(q + limit * d)

    def _length(self, layer: Any, move: list[Tensor]) -> float:
        if not self.outputs:
            return math.hypot(*(float(d.norm()) for d in move))
        x = self.seen[layer][0]
        if isinstance(layer, nn.Linear):
            return float(linear(x, *move).norm())
        return float(conv2d(x, *move, stride=layer.stride, padding=layer.padding).norm())

    def _size(self, layer: nn.Module, old: list[Tensor]) -> float:
        if self.outputs:
            return float(self.seen[layer][1].norm())
        return math.hypot(*(float(p.norm()) for p in old))


CANDIDATES: dict[str, Callable[[Optimizer, nn.Module], object]] = {
    "relative-weights": partial(Candidate, present=True, step=0.1),
    "relative-outputs": partial(Candidate, outputs=True, present=True, step=0.1),
    "first-weights": partial(Candidate, step=0.1),
    "budget-outputs": partial(Candidate, outputs=True, budget=3.0),
    "both-layers": partial(Candidate, step=0.1, budget=1.0),
    "budget-whole": partial(Candidate, whole=True, budget=1.0),
    "looser": lambda optimizer, model: proxprop.bound(optimizer, step=0.2, budget=2.0),
}
"""By name: what is measured, against what, and whether one step or all of them are limited."""
