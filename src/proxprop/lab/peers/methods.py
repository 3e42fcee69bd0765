"""What is compared: a name, what it is, and how it makes optimizers (and attaches S to them)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import proxprop
from proxprop.lab.peers.muon import Muon
from proxprop.lab.peers.spaces import Setting
from proxprop.lab.peers.task import Task
from proxprop.lab.refusal import Refused, install

Make = Callable[[nn.Module, Setting, Task], list[Optimizer]]
MOMENTUM = 0.9
RMSPROP = 3  # among the graftings of pytorch_optimizer


@dataclass(frozen=True)
class Method:
    """What is compared.

    Args:
        name: for the command line.
        title: for people.
        optimizers: made of the model, a setting and the task.
        solver: ProxProp's, or None for a method without it.
        running: whether S is a running average instead of the batch's.
        power, invert_every: of a running S.
        later: whether it was added after results of the others had been seen; the headline does not count it.
    """

    name: str
    title: str
    optimizers: Make
    solver: proxprop.Solver | None = None
    running: bool = False
    power: float = 1.0
    invert_every: int = 10
    later: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is ProxProp."""
        return self.solver is not None

    def prepare(self, model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
        """Convert the model if the method does, and make the optimizers that step together.

        Where a loss holds derivatives of the model, the batch's S is summed in backward and solved when the optimizers
        step (`proxprop.attach`), as an immediate step has no second derivative. The direction is the same.
        """
        if self.solver is None:
            return self.optimizers(model, setting, task)
        tau_theta = 1.0 if setting.tau_theta is None else setting.tau_theta
        proxprop.convert(model, self.solver, tau_theta, scaling="gradient")
        optimizers = self.optimizers(model, setting, task)
        if self.running:
            running = proxprop.Running(
                damping=setting.damping, power=self.power, invert_every=self.invert_every
            )
            proxprop.attach(optimizers, model, running=running)
        elif task.derivatives:
            proxprop.attach(optimizers, model)
        return optimizers


def _sgd(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    return [
        torch.optim.SGD(
            model.parameters(),
            lr=setting.lr,
            momentum=MOMENTUM,
            nesterov=True,
            weight_decay=setting.weight_decay,
            fused=_fused(next(model.parameters())),
        )
    ]


def _adamw(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    return [_adamw_of(list(model.parameters()), setting)]


def _adamw_of(parameters: list[nn.Parameter], setting: Setting) -> Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=setting.lr,
        weight_decay=setting.weight_decay,
        fused=_fused(parameters[0]),
        capturable=parameters[0].is_cuda,
    )


def _muon(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    """Muon for hidden matrices and filters, AdamW at the same rate for embeddings, the last layer and vectors."""
    matrices, rest = hidden_and_rest(model)
    muon = Muon(matrices, setting.lr, setting.weight_decay)
    return [muon, _adamw_of(rest, setting)]


def _schedule_free(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    """The warm-up is the loop's own, so that it is the same for every method."""
    package = _package("schedulefree")
    return [package.AdamWScheduleFree(model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay)]


def _soap(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    package = _package("pytorch_optimizer")
    return [package.SOAP(model.parameters(), lr=setting.lr, weight_decay=setting.weight_decay)]


def _shampoo(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    """Shampoo with the length of RMSProp's step, its roots computed every ten steps.

    By default the package sums momentum where AdamW averages it, so that steps are ten times as long.
    """
    package = _package("pytorch_optimizer")
    return [
        package.ScalableShampoo(
            model.parameters(),
            lr=setting.lr,
            weight_decay=setting.weight_decay,
            decoupled_weight_decay=True,
            moving_average_for_momentum=True,
            start_preconditioning_step=10,
            preconditioning_compute_steps=10,
            graft_type=RMSPROP,
        )
    ]


def _ikfac(model: nn.Module, setting: Setting, task: Task) -> list[Optimizer]:
    """Inverse-free K-FAC for linear and convolutional layers, AdamW for the rest."""
    package = _package("singd.optim.optimizer")
    known = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    taken = {id(p) for module in known for p in module.parameters()}
    rest = [p for p in model.parameters() if id(p) not in taken]
    made: list[Optimizer] = [
        package.SINGD(
            model,
            params=[p for p in model.parameters() if id(p) in taken],
            lr=setting.lr,
            weight_decay=setting.weight_decay,
            damping=setting.damping,
            loss_average="batch+sequence" if task.sequences else "batch",
            kfac_like=True,
            warn_unsupported=False,
        )
    ]
    return [*made, _adamw_of(rest, setting)] if rest else made


def hidden_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of products but the last one, and all other parameters."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    products = [module for module in model.modules() if isinstance(module, kinds)]
    taken = {id(module.weight) for module in products[:-1]}
    hidden = [p for p in model.parameters() if id(p) in taken]
    return hidden, [p for p in model.parameters() if id(p) not in taken]


def _fused(parameter: nn.Parameter) -> bool | None:
    """One kernel for all parameters wherever torch has one: both on a CPU and on a CUDA GPU."""
    return parameter.device.type in ("cpu", "cuda") or None


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise Refused(f"{name.partition('.')[0]} is needed: {install('bench')}") from error


CG3, EXACT = proxprop.CG(3), proxprop.Exact()
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("adamw", "AdamW", _adamw),
        Method("sgd", "SGD, Nesterov", _sgd),
        Method("schedule-free", "Schedule-Free AdamW", _schedule_free),
        Method("muon", "Muon", _muon),
        Method("soap", "SOAP", _soap),
        Method("shampoo", "Shampoo", _shampoo),
        Method("ikfac", "inverse-free K-FAC", _ikfac),
        Method("exact+sgd", "ProxProp exact + SGD", _sgd, EXACT),
        Method("cg3+sgd", "ProxProp cg3 + SGD", _sgd, CG3),
        Method("exact+adamw", "ProxProp exact + AdamW", _adamw, EXACT),
        Method("cg3+adamw", "ProxProp cg3 + AdamW", _adamw, CG3),
        Method("running+sgd", "running S + SGD", _sgd, EXACT, running=True),
        Method("running+adamw", "running S + AdamW", _adamw, EXACT, running=True),
        Method("running+muon", "running S + Muon", _muon, EXACT, running=True),
        Method("exact+soap", "ProxProp exact + SOAP", _soap, EXACT, later=True),
        Method("cg3+soap", "ProxProp cg3 + SOAP", _soap, CG3, later=True),
        Method("running+soap", "running S + SOAP", _soap, EXACT, running=True, later=True),
        Method("root+sgd", "running √S + SGD", _sgd, EXACT, running=True, power=0.5, later=True),
        Method("root+adamw", "running √S + AdamW", _adamw, EXACT, running=True, power=0.5, later=True),
        Method("root+muon", "running √S + Muon", _muon, EXACT, running=True, power=0.5, later=True),
        Method("root+soap", "running √S + SOAP", _soap, EXACT, running=True, power=0.5, later=True),
    )
}
"""Every method by its name; AdamW comes first, because targets are made from it."""
