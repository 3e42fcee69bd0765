"""Train once: a task, a method, a setting, a seed."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from proxprop.lab import devices
from proxprop.lab.interruption import Flag
from proxprop.lab.peers.methods import Method
from proxprop.lab.peers.spaces import Setting
from proxprop.lab.peers.task import Batch, Measured, Problem, Task
from proxprop.lab.refusal import Refused

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
SETTLING = 20
"""Batches that batch normalisations average over before weights are measured that were not trained on."""


@dataclass
class Outcome:
    """What came out of a run.

    Args:
        status: finished; diverged, if the loss was no longer finite; or failed, if the method raised an error.
        scores: measured before the first step and after every `task.every` steps.
        last: the last measurement, empty where there is none.
        note: the error's message.
    """

    status: str = FINISHED
    scores: list[float] = field(default_factory=list)
    last: Measured = field(default_factory=dict)
    note: str = ""


@lru_cache(maxsize=2)
def problem(task: Task, device: torch.device) -> Problem:
    """A task's data, loaded once for all the runs that follow each other."""
    return task.problem(device)


class Trained:
    """A model, its optimizers and its batches: takes steps.

    Args:
        task: what is trained.
        method: by what.
        setting: with what.
        seed: of the weights and of the batches.
        device: where.
    """

    def __init__(self, task: Task, method: Method, setting: Setting, seed: int, device: torch.device) -> None:
        self.task, self.setting, self.problem = task, setting, problem(task, device)
        torch.manual_seed(seed)
        self.model: nn.Module = self.problem.model().to(device)
        self.optimizers = method.prepare(self.model, setting, task)
        self.generator = torch.Generator(device).manual_seed(seed)
        _switch(self.optimizers, "train")

    def step(self, factor: float = 1.0) -> torch.Tensor:
        """Take one step at a factor of the setting's learning rate; returns the mini-batch loss."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.setting.lr * factor
        return self.step_on(self.problem.batch(self.generator))

    def step_on(self, batch: Batch) -> torch.Tensor:
        """Take one step on a batch at the learning rate that is set."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = self.problem.loss(self.model, batch)
        loss.backward()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def measure(self) -> Measured:
        """Measure the model, or what an optimizer says is to be measured in its place."""
        if _switch(self.optimizers, "eval"):
            self._settle()
        self.model.eval()
        found = self.problem.measure(self.model)
        _switch(self.optimizers, "train")
        self.model.train()
        return found

    def _settle(self) -> None:
        """Let batch normalisations see the weights that are measured, which are not those that were trained on."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules()):
            generator = torch.Generator(self.generator.device).manual_seed(0)
            for _ in range(SETTLING):
                self.problem.loss(self.model, self.problem.batch(generator))


def run(
    task: Task, method: Method, setting: Setting, seed: int, device: torch.device, flag: Flag | None = None
) -> Outcome:
    """Train once; numerical failures are outcomes.

    Raises:
        Refused: data or a package is missing.
        KeyboardInterrupt: the flag was raised.
    """
    found = Outcome()
    with devices.matmul_precision(task.precision), _quiet():
        try:
            _train(Trained(task, method, setting, seed, device), found, flag)
        except Refused:
            raise
        except (RuntimeError, ValueError, ArithmeticError) as error:
            found.status, found.note = FAILED, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def _train(trained: Trained, found: Outcome, flag: Flag | None) -> None:
    steps, every = trained.task.steps, trained.task.every
    _measured(trained, found)
    for step in range(steps):
        if flag is not None and flag.look():
            raise KeyboardInterrupt
        trained.step(trained.setting.rate(step, steps))
        if (step + 1) % every == 0 or step + 1 == steps:
            _measured(trained, found)
            if found.status == DIVERGED:
                return


def _measured(trained: Trained, found: Outcome) -> None:
    found.last = trained.measure()
    found.scores.append(found.last["score"])
    if not all(map(math.isfinite, (found.last["score"], found.last["train_loss"]))):
        found.status = DIVERGED


def _switch(optimizers: list[Optimizer], mode: str) -> bool:
    """Schedule-Free keeps two points, one to train and one to measure; whether there is such an optimizer."""
    switches: list[Any] = [getattr(optimizer, mode) for optimizer in optimizers if hasattr(optimizer, mode)]
    for switch in switches:
        switch()
    return bool(switches)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, numerical warnings are not told: what comes of them is in the record."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
