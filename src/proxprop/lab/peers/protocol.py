"""What is run, in which order: AdamW's trials and seeds fix a task's target, then every other method's follow."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from proxprop.lab.peers.record import Key, Run

TRIALS, SEEDS = 8, 5
TRIAL_SEED = 0
"""The seed of every trial; fresh seeds count from one above it."""

REFERENCE = "adamw"
RULE = "the median last score of AdamW's fresh seeds at its chosen setting, rounded up to three digits"


class Job(NamedTuple):
    """A run to be made."""

    task: str
    method: str
    trial: int
    seed: int


def trials_of(runs: Iterable[Run], task: str, method: str) -> list[Run]:
    """The search of one method in one task, by trial."""
    found = [r for r in runs if (r.task, r.method, r.seed) == (task, method, TRIAL_SEED)]
    return sorted(found, key=lambda run: run.trial)


def choice(runs: Iterable[Run], task: str, method: str, trials: int | None = None) -> int | None:
    """The trial with the lowest last score, among the first so many; None where every one failed, or none was run."""
    searched = [r for r in trials_of(runs, task, method) if trials is None or r.trial < trials]
    finished = [run for run in searched if math.isfinite(run.score)]
    return min(finished, key=lambda run: run.score).trial if finished else None


def seeds_of(runs: Sequence[Run], task: str, method: str) -> list[Run]:
    """The fresh seeds of the choice."""
    chosen = choice(runs, task, method)
    found = [r for r in runs if (r.task, r.method, r.trial) == (task, method, chosen)]
    return sorted((r for r in found if r.seed != TRIAL_SEED), key=lambda run: run.seed)


def complete(runs: Sequence[Run], task: str, method: str) -> bool:
    """Whether a method's protocol was carried out in a task: all trials, and all seeds unless every trial failed."""
    if len(trials_of(runs, task, method)) < TRIALS:
        return False
    return choice(runs, task, method) is None or len(seeds_of(runs, task, method)) >= SEEDS


def jobs(runs: Sequence[Run], task: str, method: str, trials: int, seeds: int) -> Iterator[Job]:
    """What is missing of one method in one task; seeds only once all trials are there."""
    done: set[Key] = {run.key for run in runs}
    missing = [Job(task, method, trial, TRIAL_SEED) for trial in range(trials)]
    if missing := [job for job in missing if job not in done]:
        yield from missing
        return
    chosen = choice(runs, task, method)
    if chosen is not None:
        fresh = (Job(task, method, chosen, TRIAL_SEED + 1 + seed) for seed in range(seeds))
        yield from (job for job in fresh if job not in done)


def target(runs: Sequence[Run], task: str) -> float | None:
    """A task's target; None as long as the reference's seeds are not there, or most of them failed."""
    if not complete(runs, task, REFERENCE):
        return None
    found = median([run.score for run in seeds_of(runs, task, REFERENCE)] or [math.inf])
    return rounded_up(found) if math.isfinite(found) else None


def rounded_up(value: float) -> float:
    """To three digits, away from zero.

    >>> rounded_up(0.012341), rounded_up(123.4)
    (0.0124, 124.0)
    """
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")


def total(runs: Sequence[Run], pairs: Sequence[tuple[str, str]], trials: int, seeds: int) -> int:
    """How many runs are missing at most, seeds included whose trials are still to come."""
    missing = 0
    for task, method in pairs:
        lacking = trials - len([r for r in trials_of(runs, task, method) if r.trial < trials])
        failed = lacking == 0 and choice(runs, task, method) is None
        fresh = 0 if failed else seeds - min(len(seeds_of(runs, task, method)), seeds)
        missing += lacking + (seeds if lacking else fresh)
    return missing
