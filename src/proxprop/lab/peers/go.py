"""Carry out what is missing, one run after the other, and record each as soon as it has ended."""

import time
from collections import defaultdict
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
        KeyboardInterrupt: a person stopped it; what was run is recorded.
    """
    pairs = [(task, method) for task in tasks for method in methods]
    pairs.sort(key=lambda pair: pair[1] != REFERENCE)
    estimate = Estimate()
    with store.locked(), interruptible() as flag:
        for task, method in pairs:
            while missing := list(protocol.jobs(store.runs(task), task, method, trials, seeds)):
                for job in missing:
                    began = time.perf_counter()
                    done = once(job, device, flag)
                    store.add(done)
                    estimate.add(job, time.perf_counter() - began)
                    left = protocol.total(store.all(tasks), pairs, trials, seeds)
                    tell(f"{line(done)}; {estimate.words(job, left)}", estimate.part(left))
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


class Estimate:
    """How long the rest takes: runs left times the mean of those of this go."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, job: Job, seconds: float) -> None:
        """One run took so long."""
        self._seconds[job.task].append(seconds)

    def part(self, left: int) -> float:
        """The part of this go that is done."""
        done = sum(map(len, self._seconds.values()))
        return done / (done + left)

    def words(self, job: Job, left: int) -> str:
        """What is left, in words."""
        every = [seconds for part in self._seconds.values() for seconds in part]
        minutes = left * fmean(every) / 60
        return f"{left} left, about {minutes:.0f} min"
