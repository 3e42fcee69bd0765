"""Carry out what is missing, one run after the other, and record each as soon as it has ended."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from proxprop.lab.interruption import Flag, interruptible
from proxprop.lab.peers import protocol, record
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import REFERENCE, RULE, Job
from proxprop.lab.peers.run import run
from proxprop.lab.peers.spaces import setting
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.refusal import Refused

Tell = Callable[[str, float], None]
"""Told after every run: a line, and the part that is done."""


def go(
    store: Store,
    tasks: Sequence[str],
    methods: Sequence[str],
    trials: int,
    seeds: int,
    device: torch.device,
    tell: Tell,
) -> None:
    """Run what is missing of these tasks and methods: the reference first, because targets are made from it.

    Stopped at any moment, it goes on where it was when it is called again.

    Raises:
        Refused: a task has no target yet, because the reference was not run in it; or its data is missing.
        KeyboardInterrupt: a person stopped it; what was run is recorded.
    """
    pairs = [(task, method) for task in tasks for method in methods]
    pairs.sort(key=lambda pair: pair[1] != REFERENCE)
    seconds: list[float] = []
    with store.locked(), interruptible() as flag:
        for task, method in pairs:
            if method != REFERENCE and task not in store.targets():
                raise Refused(
                    f"{task} has no target yet: run `proxprop bench --task {task} --method {REFERENCE}` first"
                )
            while missing := list(protocol.jobs(store.runs(task), task, method, trials, seeds)):
                for job in missing:
                    began = time.perf_counter()
                    done = once(job, device, flag)
                    store.add(done)
                    seconds.append(time.perf_counter() - began)
                    left = protocol.total(store.all(tasks), pairs, trials, seeds)
                    tell(f"{line(done)}; {estimate(seconds, left)}", len(seconds) / (len(seconds) + left))
            fix(store, task)


def once(job: Job, device: torch.device, flag: Flag | None = None) -> record.Run:
    """One run and its record."""
    task, method, trial, seed = job
    chosen = setting(method, trial)
    outcome = run(TASKS[task], METHODS[method], chosen, seed, device, flag)
    return record.made(TASKS[task], method, trial, seed, chosen, outcome, device)


def fix(store: Store, task: str) -> None:
    """Fix a task's target as soon as the reference's runs are there."""
    runs = store.runs(task)
    found = protocol.target(runs, task)
    if found is not None:
        store.fix_target(task, found, RULE, runs[-1].commit)


def line(done: record.Run) -> str:
    """What is told of a run."""
    what = f"{done.task} {done.method} trial {done.trial} seed {done.seed}"
    return f"{what}: {done.status}, score {done.score:.4g}" + (f" ({done.note})" if done.note else "")


def estimate(seconds: Sequence[float], left: int) -> str:
    """How long the rest takes: runs left times the mean of those of this go.

    >>> estimate([30.0, 90.0], 5)
    '5 left, about 5 min'
    """
    return f"{left} left, about {left * fmean(seconds) / 60:.0f} min"
