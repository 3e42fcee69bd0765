"""`bound`: steps that can't blow up, whatever the optimizer and its learning rate.

What an optimizer does to all its parameters θ in a step is Δθ, momentum, weight decay and Adam's scaling included. It
is applied as `sΔθ` with one factor for all of them,

    q ← (1 − 1/horizon)·q + ‖Δθ‖²,        s = min(1, R / √(q/budget² + ‖Δθ‖²/step²)),

R = ‖θ‖ when the bound was set. So no step is longer than `step·R`, and the steps of a horizon come to no more than
`budget·R`, times a logarithm, in the root of their summed squares. Both hold for every learning rate: Δθ is measured
after the optimizer, and multiplying every Δθ by the same number leaves sΔθ as it is where s < 1.

R stays what it was at the start. A bound relative to the present norm would let weights grow by the same factor in
every step. The sum q is what makes too large a rate useful and not only harmless: steps shrink as in AdaGrad with one
rate for all (Ward, Wu, Bottou 2019), where a limit on single steps alone would keep them jumping about. Momentum is
left alone: it points where it did, and its length does not matter while steps are cut. `results/bounds` has what was
tried.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxprop.distributed import mesh_of
from proxprop.torch_internals import copy_all, differences, norms


def bound(
    optimizer: Optimizer, *, step: float = 0.1, budget: float = 1.0, horizon: float = 1000
) -> "Bounded":
    """Bound the steps of an optimizer, so that no learning rate lets training blow up.

    It is a cap on the learning rate, found while training: a step that is too long is shortened, with the same factor
    for every parameter. One that is not stays what it was, to the bit. It works on plain models as well as on converted
    ones. It costs a copy of the parameters while the optimizer steps, and passes over memory but no products.

    Args:
        optimizer: whose steps to bound. Several optimizers take a call each.
        step: the longest step, as a part of the norm that all parameters have now.
        budget: the most that the steps of a horizon may come to, as the root of their summed squares.
        horizon: after so many steps older ones are forgotten.

    Returns:
        A handle. Its `.factor` is what the last step was multiplied by, `.detach()` ends it, `.state_dict()` and
        `.load_state_dict()` are for checkpoints.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: a number is out of range, all parameters are zero or they are cut over ranks (FSDP2, tensor
            parallel), or the optimizer keeps weights of its own beside them.

    Example:
        >>> import torch, proxprop
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> torch.nn.init.ones_(model.weight).norm().item()
        2.0
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
        >>> bounded = proxprop.bound(optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> f"{(model.weight.detach() - 1).norm():.3f}"  # 0.1 of 2, less the budget
        '0.199'
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer should be a torch.optim.Optimizer but has type {type(optimizer).__name__}; "
            "several optimizers take a call each"
        )
    for name, value, least in (("step", step, 0), ("budget", budget, 0), ("horizon", horizon, 1)):
        if not value > least:
            raise ValueError(f"{name} should be > {least} but is {value!r}")
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise ValueError(
            f"{type(optimizer).__name__} keeps weights of its own beside the model's, which a bound does not reach"
        )
    if any(mesh_of(parameter) is not None for parameter in _parameters(optimizer)):
        raise ValueError(
            "the parameters are cut over ranks (FSDP2, tensor parallel), and the norm of a part is not the norm of the "
            "whole: bound works on whole parameters, in one process or under DistributedDataParallel"
        )
    return Bounded(optimizer, step, budget, horizon)


class Bounded:
    """An optimizer whose steps are bounded. Made by `proxprop.bound`.

    Attributes:
        factor: what the last step was multiplied by, a tensor; 1 where nothing was cut.
    """

    def __init__(self, optimizer: Optimizer, step: float, budget: float, horizon: float) -> None:
        self._step, self._budget, self._keep = step, budget, 1 - 1 / horizon
        self._held = _parameters(optimizer)
        precise = any(parameter.dtype == torch.float64 for parameter in self._held)
        self._dtype = torch.float64 if precise else torch.float32
        self._before: list[Tensor] = []
        self._reference = self._length([parameter.detach() for parameter in self._held])
        if not self._reference > 0:
            raise ValueError(
                "the parameters are all zero, so that there is nothing to measure steps against: call proxprop.bound "
                "after they are initialised"
            )
        self._spent = torch.zeros_like(self._reference)
        self.factor = torch.ones_like(self._reference)
        # Compiled into one graph with the step, parameters before and after it came out equal (torch 2.13).
        self._hooks = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._keep_parameters)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._cut)),
        ]

    def detach(self) -> None:
        """Let the optimizer step as it likes again."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """What steps are measured against, and what they have spent, for a checkpoint."""
        return {"reference": self._reference.clone(), "spent": self._spent.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it is no state of a bound.
        """
        if set(state) != {"reference", "spent"}:
            raise ValueError(
                f"the state should hold reference and spent but holds {', '.join(state) or 'nothing'}"
            )
        self._reference.copy_(state["reference"])
        self._spent.copy_(state["spent"])

    @torch.no_grad()
    def _keep_parameters(self, optimizer: Optimizer, *_: Any) -> None:
        """Keep the parameters as they are before a step."""
        if len(self._held) != sum(len(group["params"]) for group in optimizer.param_groups):
            raise RuntimeError(
                "the optimizer got other parameters after proxprop.bound: call .detach() on what it returned, then "
                "proxprop.bound again"
            )
        self._before = [parameter.clone() for parameter in self._held]

    @torch.no_grad()
    def _cut(self, *_: Any) -> None:
        """After a step: θ ← θ_before + s(θ − θ_before), computed such that no bit changes where s = 1."""
        before, self._before = self._before, []
        length = self._length(differences(self._held, before))
        square = length.square()
        fits = square.isfinite()  # what overflows is taken back and not counted; NaN stays NaN
        self._spent.mul_(self._keep).add_(torch.where(fits, square, 0.0))
        lengths = torch.hypot(self._spent.sqrt() / self._budget, length / self._step)
        self.factor.copy_(torch.where(fits, (self._reference / lengths).clamp(max=1.0), 0.0))
        for parameter, old in zip(self._held, before, strict=True):
            old.lerp_(parameter, self.factor.to(parameter.device, parameter.dtype))
        copy_all(self._held, before)

    def _length(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """The norm of all tensors together."""
        found = norms(tensors, 2, self._dtype)
        length: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in found]))
        return length


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
