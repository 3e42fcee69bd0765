"""What the records say, as pure functions of them. A failure counts as infinite."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from proxprop.lab.peers import protocol
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.record import Run
from proxprop.lab.peers.spaces import SPACES

RESAMPLES = 2000
CLOSE = 1.05
"""A trial is close to the best if its score is at most so many times the best one's."""


@dataclass(frozen=True)
class Spread:
    """A median over seeds and the 95 % interval of its bootstrap."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One method in one task, its protocol carried out.

    Args:
        task, method: which.
        trials: by number.
        chosen: the trial that was chosen; None if all failed.
        seeds: fresh seeds of the choice.
        target: the task's.
        ms: milliseconds of a step in the fastest way; NaN where it was not timed.
        way: that way.
        megabytes: the most memory, in that way.
    """

    task: str
    method: str
    trials: list[Run]
    chosen: int | None
    seeds: list[Run]
    target: float
    ms: float = math.nan
    way: str = ""
    megabytes: float = math.nan

    @property
    def searched(self) -> float:
        """The lowest last score among the trials."""
        return min(run.score for run in self.trials)

    @property
    def score(self) -> Spread:
        """The last score."""
        return spread([run.score for run in self.seeds])

    @property
    def steps(self) -> Spread:
        """Steps to the target."""
        return spread([run.steps_to(self.target) for run in self.seeds])

    @property
    def seconds(self) -> Spread:
        """Seconds to the target: steps times the time of a step."""
        return spread([run.steps_to(self.target) * self.ms / 1000 for run in self.seeds])

    @property
    def failures(self) -> int:
        """Trials that did not finish."""
        return sum(not math.isfinite(run.score) for run in self.trials)

    def mean(self, name: str) -> float:
        """The mean over seeds of something measured at the end."""
        values = [float(getattr(run, name)) for run in self.seeds]
        return fmean(values) if values else math.nan


Cells = Mapping[tuple[str, str], Cell]
"""Task and method to what was found."""


def cells(
    runs: Sequence[Run], targets: Mapping[str, float], times: Iterable[Mapping[str, str]] = ()
) -> dict[tuple[str, str], Cell]:
    """Every method in every task whose target is fixed and whose protocol was carried out."""
    fastest: dict[tuple[str, str], Mapping[str, str]] = {}
    for row in times:
        key = row["task"], row["method"]
        if key not in fastest or float(row["ms"]) < float(fastest[key]["ms"]):
            fastest[key] = row
    found = {}
    for task, method in dict.fromkeys((run.task, run.method) for run in runs):
        if task in targets and protocol.complete(runs, task, method):
            row = fastest.get((task, method), {"ms": "nan", "way": "", "megabytes": "nan"})
            found[task, method] = Cell(
                task,
                method,
                protocol.trials_of(runs, task, method),
                protocol.choice(runs, task, method),
                protocol.seeds_of(runs, task, method),
                targets[task],
                float(row["ms"]),
                row["way"],
                float(row["megabytes"]),
            )
    return found


def tasks_of(found: Cells) -> list[str]:
    """Tasks in which something was compared: with one of ProxProp's methods and a peer beside the reference."""
    kinds: dict[str, set[bool]] = {}
    for task, method in found:
        if method != protocol.REFERENCE:
            kinds.setdefault(task, set()).add(METHODS[method].ours)
    return [task for task, both in kinds.items() if len(both) == 2]


def across(found: Cells) -> tuple[list[str], list[str]]:
    """Tasks and methods that are compared over all tasks: every one of the methods was run in every one of the tasks.

    A task in which fewer than three quarters as many methods were run as in another would leave few, and is left out.
    """
    counts = {task: sum(task == other for other, _ in found) for task in tasks_of(found)}
    tasks = [task for task, count in counts.items() if count >= 0.75 * max(counts.values())]
    return tasks, [name for name in METHODS if all((task, name) in found for task in tasks)]


def spread(values: Sequence[float]) -> Spread:
    """The median and the 95 % interval of its bootstrap; infinite for no values.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0]).middle
    3.0
    """
    if not values:
        return Spread(math.inf, math.inf, math.inf)
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.sort(np.median(np.array(values)[drawn], axis=1))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
    return Spread(median(values), float(low), float(high))


def best_after(scores: Sequence[float], k: int) -> float:
    """The median, over all choices of k of these trials, of their lowest score.

    >>> [best_after([4.0, 3.0, 2.0, 1.0], k) for k in (1, 2, 4)]
    [2.0, 1.0, 1.0]
    """
    ordered, total = sorted(scores), math.comb(len(scores), k)
    for rank, score in enumerate(ordered, start=1):
        if 1 - math.comb(len(ordered) - rank, k) / total >= 0.5:
            return score
    raise AssertionError("the lowest of all trials is always among them")


def width(cell: Cell, close: float = CLOSE) -> float:
    """Decades of learning rates within 5 % of the best, estimated from the trials.

    Trials are spread evenly over the logarithm of the learning rate, with everything else varied beside it, so the part
    of them that comes close to the best one times the width of the searched range estimates it.
    """
    scores = [run.score for run in cell.trials]
    best = min(scores)
    if not math.isfinite(best):
        return 0.0
    low, high = SPACES[cell.method].lr
    return sum(score <= close * best for score in scores) / len(scores) * math.log10(high / low)


def profile(costs: Mapping[str, Mapping[str, float]], factors: Sequence[float]) -> dict[str, list[float]]:
    """Performance profiles: the part of the tasks that a method solves within a factor of the best method's cost.

    Args:
        costs: task to method to cost, infinite where it failed.
        factors: at least one.
    """
    methods = list(dict.fromkeys(method for row in costs.values() for method in row))
    best = {task: min(row.values()) for task, row in costs.items()}
    solved = {task: value for task, value in best.items() if math.isfinite(value)}
    return {
        method: [
            sum(costs[task].get(method, math.inf) <= factor * value for task, value in solved.items())
            / max(len(solved), 1)
            for factor in factors
        ]
        for method in methods
    }


def one_setting(found: Iterable[Cell]) -> tuple[int, float, float] | None:
    """One method's best trial for all its tasks, its loss against tuning, and the tuned one's.

    Returns:
        The trial, the geometric mean over tasks of its score divided by the target, and that of each task's own best
        trial; None where every trial failed in some task.
    """
    chosen = list(found)
    numbers = set.intersection(*({run.trial for run in cell.trials} for cell in chosen))
    means = {
        trial: geometric([_score(cell, trial) / cell.target for cell in chosen]) for trial in sorted(numbers)
    }
    trial = min(means, key=lambda number: means[number])
    if not math.isfinite(means[trial]):
        return None
    tuned = geometric([min(run.score for run in cell.trials) / cell.target for cell in chosen])
    return trial, means[trial], tuned


def _score(cell: Cell, trial: int) -> float:
    return next(run.score for run in cell.trials if run.trial == trial)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean.

    >>> geometric([1.0, 4.0])
    2.0
    """
    return math.exp(fmean(math.log(value) for value in values))


def verdict(ours: Spread, theirs: Spread) -> str:
    """Whether one interval lies below the other.

    >>> verdict(Spread(1, 0.9, 1.1), Spread(2, 1.9, 2.1)), verdict(Spread(1, 0.9, 1.1), Spread(1, 1, 2))
    ('wins', 'ties')
    """
    if ours.high < theirs.low:
        return "wins"
    return "loses" if theirs.high < ours.low else "ties"
