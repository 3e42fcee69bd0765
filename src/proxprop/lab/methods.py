"""The seam for what is compared: a method is a name, a way to prepare a model, a way to make optimizers.

A peer is added by one entry in `FAMILIES`: from the part of `--solver` before the colon to a function that
takes what stands after it and the run's Config, and returns the method's `prepare`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

import proxprop
from proxprop.lab import published
from proxprop.lab.config import Config
from proxprop.lab.refusal import Refused, one_of

Prepare = Callable[[nn.Module], nn.Module]
MakeOptimizers = Callable[[nn.Module], list[Optimizer]]
Attach = Callable[[list[Optimizer], nn.Module], proxprop.Attached | None]

MOST = {"cg": ("iterations", 1000), "published": ("iterations", 1000), "running": ("steps", 1_000_000)}
"""What the K of a solver counts, and the most that is accepted: with more iterations, `exact` is better and faster."""


@dataclass(frozen=True)
class Method:
    """What is compared.

    Args:
        name: for people, "ProxProp cg3".
        prepare: takes the fresh model, returns the model to train.
        optimizers: takes the prepared model, returns the optimizers that step together.
        attach: takes both, returns what was attached to them; None for a method that solves inside backward.
    """

    name: str
    prepare: Prepare
    optimizers: MakeOptimizers
    attach: Attach


def method(config: Config) -> Method:
    """The method a Config names.

    >>> method(Config(solver="cg:3")).name
    'ProxProp cg3'
    """
    family, _, argument = config.solver.partition(":")
    one_of("solver", family, FAMILIES)
    prepare = FAMILIES[family](argument, config)
    attach = _running_averages(config) if family == "running" else _nothing_attached
    return Method(solver_name(config.solver), prepare, OPTIMIZERS[config.optimizer](config), attach)


def solver_name(solver: str) -> str:
    """A solver's name for people; a peer goes by its own.

    >>> [solver_name(s) for s in ("backprop", "cg:10", "exact", "published:3", "running:10", "kfac")]
    ['BackProp', 'ProxProp cg10', 'ProxProp exact', 'published cg3', 'ProxProp running10', 'kfac']
    """
    if is_proximal(solver):
        return f"ProxProp {solver.replace(':', '')}"
    if solver.startswith("published:"):
        return solver.replace(":", " cg")
    return "BackProp" if solver == "backprop" else solver


def is_proximal(solver: str) -> bool:
    """Whether a solver is one of this library's own."""
    return solver.partition(":")[0] in ("cg", "exact", "running")


def _backprop(argument: str, config: Config) -> Prepare:
    _no_argument("backprop", argument)
    return lambda model: model


def _exact(argument: str, config: Config) -> Prepare:
    _no_argument("exact", argument)
    return lambda model: _convert(model, proxprop.Exact(), config)


def _cg(argument: str, config: Config) -> Prepare:
    steps = _iterations("cg", argument)
    return lambda model: _convert(model, proxprop.CG(steps), config)


def _published(argument: str, config: Config) -> Prepare:
    steps = _iterations("published", argument)
    return lambda model: published.convert(model, steps, config.tau_theta)


def _running(argument: str, config: Config) -> Prepare:
    _iterations("running", argument)
    return lambda model: _convert(model, proxprop.Exact(), config)


def _running_averages(config: Config) -> Attach:
    """S averaged over steps and inverted every so many, with damping 1/τ_θ relative to S's mean diagonal."""
    every = int(config.solver.partition(":")[2])
    running = proxprop.Running(update_every=1, invert_every=every, damping=1 / config.tau_theta)
    return lambda optimizers, model: proxprop.attach(optimizers, model, running=running)


def _nothing_attached(optimizers: list[Optimizer], model: nn.Module) -> None:
    """Immediate mode, and BackProp."""


def _convert(model: nn.Module, solver: proxprop.CG | proxprop.Exact, config: Config) -> nn.Module:
    try:
        return proxprop.convert(model, solver, tau_theta=config.tau_theta)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error


def _iterations(family: str, argument: str) -> int:
    """The K of cg:K, published:K or running:K."""
    counted, most = MOST[family]
    if not (argument.isascii() and argument.isdigit() and int(argument[:20]) in range(1, most + 1)):
        raise Refused(
            f"solver {family} should be {family}:K with K from 1 to {most} {counted}, like {family}:3, "
            f"but is '{family}:{argument}'"
        )
    return int(argument)


def _no_argument(family: str, argument: str) -> None:
    if argument:
        raise Refused(f"solver {family} takes nothing after a colon but came with '{argument}'")


def _sgd(config: Config) -> MakeOptimizers:
    """PyTorch's Nesterov momentum, the paper's: m ← μm + d, θ ← θ − τ(μm + d)."""
    return lambda model: [
        torch.optim.SGD(
            model.parameters(),
            lr=_lr(config),
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            fused=_on_cuda(model) or None,
        )
    ]


def _adam(config: Config) -> MakeOptimizers:
    return lambda model: [torch.optim.Adam(model.parameters(), lr=_lr(config), capturable=_on_cuda(model))]


def _adamw(config: Config) -> MakeOptimizers:
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=_lr(config), capturable=_on_cuda(model))]


def _muon(config: Config) -> MakeOptimizers:
    """Muon for hidden matrices, AdamW for the rest; Muon's step has AdamW's size, so one lr fits both."""

    def make(model: nn.Module) -> list[Optimizer]:
        named = list(model.named_parameters())
        last = next(name for name, parameter in reversed(named) if parameter.ndim >= 2)
        matrices = [p for name, p in named if p.ndim == 2 and name != last]
        rest = [p for name, p in named if p.ndim != 2 or name == last]
        made: list[Optimizer] = [torch.optim.AdamW(rest, lr=_lr(config), capturable=_on_cuda(model))]
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=_lr(config), momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
            )
            made.append(muon)
        return made

    return make


def _on_cuda(model: nn.Module) -> bool:
    """Whether the optimizer's step counters have to live on the GPU, so that a CUDA graph can hold the step."""
    return next(model.parameters()).is_cuda


def _lr(config: Config) -> float:
    lr = config.settled().lr
    assert lr is not None
    return lr


FAMILIES: dict[str, Callable[[str, Config], Prepare]] = {
    "backprop": _backprop,
    "cg": _cg,
    "exact": _exact,
    "published": _published,
    "running": _running,
}
OPTIMIZERS: dict[str, Callable[[Config], MakeOptimizers]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "muon": _muon,
}
