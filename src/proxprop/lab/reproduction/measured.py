"""Numbers out of tidy rows: a quantity of one method over its seeds, at an epoch, at the end, at its best.

An *arm* is the rows of one method with one setting, all seeds. Runs that are not finished do not count.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from proxprop.lab.reproduction.files import Row

LOSS, VALIDATION, TEST = "train_loss", "val_accuracy", "test_accuracy"


@dataclass(frozen=True)
class Seeds:
    """A quantity over seeds: the values that are finite, and how many runs diverged instead.

    >>> Seeds((1.0, 3.0)).mean, Seeds((), diverged=2).lost, Seeds(()).count
    (2.0, True, 0)
    """

    values: tuple[float, ...]
    diverged: int = 0

    @property
    def count(self) -> int:
        """How many seeds were run."""
        return len(self.values) + self.diverged

    @property
    def lost(self) -> bool:
        """Whether at least one seed diverged."""
        return self.diverged > 0

    @property
    def mean(self) -> float:
        """The mean; infinite where a seed diverged, NaN where nothing was run."""
        return math.inf if self.lost else fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The sample standard deviation; NaN for fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    def map(self, change: Callable[[float], float]) -> "Seeds":
        """The same seeds with every value changed."""
        return Seeds(tuple(change(value) for value in self.values), self.diverged)


def arm(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these settings, of runs that have ended.

    >>> arm([{"solver": "exact", "status": "finished"}], solver="exact")
    [{'solver': 'exact', 'status': 'finished'}]
    """
    ended = (row for row in rows if row["status"] != "unfinished")
    return [row for row in ended if all(row[name] == value for name, value in wanted.items())]


def by_seed(rows: Iterable[Row]) -> list[list[Row]]:
    """An arm's rows, one list per seed, each by epoch."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append(row)
    return [sorted(found[seed], key=lambda row: int(row["epoch"])) for seed in sorted(found)]


def at(rows: Iterable[Row], column: str, epoch: int) -> Seeds:
    """A column of an arm after so many epochs; a run that diverged before then has none."""
    values, diverged = [], 0
    for run in by_seed(rows):
        found = next((row[column] for row in run if row["epoch"] == epoch), None)
        if run[-1]["status"] == "diverged" and (found is None or run[-1]["epoch"] <= epoch):
            diverged += 1
        elif found is not None:
            values.append(float(found))
    return Seeds(tuple(values), diverged)


def final(rows: Iterable[Row], column: str) -> Seeds:
    """A column of an arm at the end of every run."""
    values, diverged = [], 0
    for run in by_seed(rows):
        if run[-1]["status"] == "diverged" or run[-1][column] is None:
            diverged += 1
        else:
            values.append(float(run[-1][column]))
    return Seeds(tuple(values), diverged)


def best(rows: Iterable[Row], column: str) -> Seeds:
    """The highest value of a column of an arm in every run."""
    runs = [[float(row[column]) for row in run if row[column] is not None] for run in by_seed(rows)]
    return Seeds(tuple(max(run) for run in runs if run))


def pace(rows: Iterable[Row]) -> Seeds:
    """Training seconds per epoch of every run that was not cut short by divergence."""
    ends = [run[-1] for run in by_seed(rows) if run[-1]["status"] == "finished" and run[-1]["seconds"]]
    return Seeds(tuple(end["seconds"] / end["epoch"] for end in ends))


def within(rows: Iterable[Row], column: str, seconds: float) -> Seeds:
    """A column of an arm at the last epoch that ended within so many seconds."""
    values = []
    for run in by_seed(rows):
        done = [row[column] for row in run if row["seconds"] is not None and row["seconds"] <= seconds]
        if done and done[-1] is not None:
            values.append(float(done[-1]))
    return Seeds(tuple(values))


def band(rows: Iterable[Row], column: str, over: str = "epoch") -> tuple[list[float], ...]:
    """What a figure draws of an arm: x, lowest, mean and highest over seeds, at the epochs all of them have."""
    known = [row for row in rows if row[column] is not None and row[over] is not None]
    runs = [{row["epoch"]: row for row in run} for run in by_seed(known)]
    shared = sorted(set.intersection(*map(set, runs))) if runs else []
    columns = [[float(run[epoch][column]) for run in runs] for epoch in shared]
    xs = [fmean(float(run[epoch][over]) for run in runs) for epoch in shared]
    return xs, [min(c) for c in columns], [fmean(c) for c in columns], [max(c) for c in columns]


def distance(rows: Iterable[Row], column: str, theirs: tuple[Sequence[float], Sequence[float]]) -> float:
    """How far apart two curves are: the mean over epochs ≥ 1 of |ln(ours / theirs)|, ours the mean over seeds.

    0.1 means about 10 % apart, 0.7 a factor of two. NaN where there is nothing to compare.
    """
    epochs, _, middle, _ = band(rows, column)
    known = dict(zip(*theirs, strict=True))
    apart = [
        abs(math.log(y / known[x])) for x, y in zip(epochs, middle, strict=True) if x >= 1 and x in known
    ]
    return fmean(apart) if apart else math.nan
