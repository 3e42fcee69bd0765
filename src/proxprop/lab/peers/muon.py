"""Muon, with equal shapes orthogonalised together: torch's own takes one matrix after the other.

The update is that of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, which the tests compare it with. Filters
of convolutions are taken as matrices [outputs, inputs × positions], which torch's refuses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class Muon(Optimizer):
    """Momentum whose singular values are set to about one, with decoupled weight decay.

    Args:
        parameters: of at least two dimensions.
        lr: the learning rate; a step has the root mean square of AdamW's.
        weight_decay: decoupled.
        momentum: Nesterov's.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step; a closure is not supported."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.flatten(1).shape].append(parameter)
            for parameters in shapes.values():
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        averages = [
            self.state[p].setdefault(
                "momentum_buffer", torch.zeros_like(p, memory_format=torch.preserve_format)
            )
            for p in parameters
        ]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        turned = orthogonal(torch.stack([d.flatten(1) for d in ahead]))
        size = 0.2 * max(turned.shape[-2:]) ** 0.5
        steps = [d.view_as(p) for d, p in zip(turned.to(parameters[0].dtype), parameters, strict=True)]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, steps, alpha=-group["lr"] * size)


def orthogonal(matrices: Tensor) -> Tensor:
    """Newton–Schulz iterations in bfloat16, which set singular values to between 0.7 and 1.2.

    Args:
        matrices: [matrices, rows, columns].

    Returns:
        The same shape, in bfloat16.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    X = (matrices.mT if tall else matrices).bfloat16()
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X
