"""One run as a row of a table, with everything that it takes to run it again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from proxprop.lab.peers.run import DIVERGED, FAILED, FINISHED, Outcome
from proxprop.lab.peers.spaces import Setting
from proxprop.lab.peers.task import Task
from proxprop.lab.records.environment import environment
from proxprop.lab.refusal import Refused

Key = tuple[str, str, int, int]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        task, method, trial, seed: what was run; the trial says with which setting.
        setting: the trial's.
        status: finished, diverged or failed.
        score: the last; infinite where the run did not finish.
        train_loss, accuracy, test_accuracy: the last, NaN where there is none.
        steps: the budget.
        every: steps between two of `scores`.
        scores: from before the first step on.
        note: what a failed method raised.
        command, commit, torch, device, threads, time: how and where it was run.
    """

    task: str
    method: str
    trial: int
    seed: int
    setting: Setting
    status: str
    score: float
    train_loss: float
    accuracy: float
    test_accuracy: float
    steps: int
    every: int
    scores: tuple[float, ...]
    note: str
    command: str
    commit: str
    torch: str
    device: str
    threads: int
    time: str

    @property
    def key(self) -> Key:
        """What makes it another run than others."""
        return self.task, self.method, self.trial, self.seed

    def steps_to(self, target: float) -> float:
        """Steps until the score was first measured at or below a target; infinite where it never was."""
        reached = [index for index, score in enumerate(self.scores) if score <= target]
        if not reached or self.status == FAILED:
            return math.inf
        return min(reached[0] * self.every, self.steps)

    def row(self) -> dict[str, str]:
        """Its cells, to four or five digits where they were measured."""
        cells: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "setting":
                cells |= {name: "" if part is None else str(part) for name, part in value.columns().items()}
            elif field.name == "scores":
                cells["scores"] = " ".join(f"{score:.5g}" for score in value)
            else:
                cells[field.name] = f"{value:.6g}" if isinstance(value, float) else str(value)
        return cells


COLUMNS = tuple(
    name
    for field in fields(Run)
    for name in ([f.name for f in fields(Setting)] if field.name == "setting" else [field.name])
)


def command(task: str, method: str, trial: int, seed: int) -> str:
    """What runs a row again."""
    return f"proxprop bench --task {task} --method {method} --trial {trial} --seed {seed}"


def made(
    task: Task, method: str, trial: int, seed: int, setting: Setting, outcome: Outcome, device: torch.device
) -> Run:
    """The record of an outcome."""
    where = environment(device)
    last = outcome.last

    def measured(name: str) -> float:
        return last.get(name, math.nan)

    return Run(
        task=task.name,
        method=method,
        trial=trial,
        seed=seed,
        setting=setting,
        status=outcome.status,
        score=measured("score") if outcome.status == FINISHED else math.inf,
        train_loss=measured("train_loss"),
        accuracy=measured("accuracy"),
        test_accuracy=measured("test_accuracy"),
        steps=task.steps,
        every=task.every,
        scores=tuple(outcome.scores),
        note=outcome.note,
        command=command(task.name, method, trial, seed),
        commit=where["commit"] or "",
        torch=where["torch"],
        device=where["device"],
        threads=where["threads"],
        time=where["time"],
    )


def parsed(row: Mapping[str, str], where: str) -> Run:
    """The run that a row tells of.

    Raises:
        Refused: a cell is missing or makes no sense.
    """
    try:
        values: dict[str, Any] = dict(row)
        setting = Setting(
            lr=float(values.pop("lr")),
            weight_decay=float(values.pop("weight_decay")),
            warmup=float(values.pop("warmup")),
            schedule=values.pop("schedule"),
            tau_theta=_optional(values.pop("tau_theta")),
            damping=_optional(values.pop("damping")),
        )
        for field in fields(Run):
            if field.type in (int, float):
                values[field.name] = field.type(values[field.name])
        values["scores"] = tuple(map(float, values["scores"].split()))
        run = Run(setting=setting, **values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"{where} is not a record of a run: {error}") from error
    if run.status not in (FINISHED, DIVERGED, FAILED):
        raise Refused(f"{where}: status should be finished, diverged or failed but is '{run.status}'")
    return run


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None
