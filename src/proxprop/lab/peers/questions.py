"""Two questions about S, answered from results/questions: which rate carries over, and what S does to validation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from proxprop.lab.peers.store import read
from proxprop.lab.reproduction.markdown import table

Row = dict[str, str]
Scores = dict[float, dict[str, float]]
"""Last scores by rate, then by seed."""

PAIRS = {
    "adamw": ("running+adamw", "seldom+adamw", "cg3+adamw"),
    "muon": ("running+muon", "seldom+muon"),
    "soap": ("running+soap", "cg3+soap"),
}
"""Optimizers, and the same with S."""

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP"}
DIRECTIONS = {"running": "a running S", "seldom": "a running √S as in `wrap`", "cg3": "`CG(3)`"}

RATES = """## Which learning rate carries over

Every method at the same {count} rates, half a decade apart, and all else held: weight decay 0.001, a linear schedule,
ρ = 0.3 for a running S and for √S (made anew in one step of 40), τ_θ = 10 and `scaling="gradient"` for `CG(3)`. *Rate*
has the lowest last score, by the median over seeds; *(end)* marks the first and the last of the grid. *Kept* is the
score with S at the rate that is best without S, divided by the score without S at that rate. *Tuned* is the same with S
at its own best rate. Below 1 S helps. Medians over seeds, with the lowest and the highest in brackets.
`python benchmarks/questions.py rates`, record in `results/questions/rates.csv`.
"""

VALIDATION = """## Why training gains more than validation

AdamW at a rate of 0.003 on {task}, fed by different directions, with little and with much (decoupled) weight decay.
Medians over {seeds} seeds, with the lowest and the highest in brackets. *On the way* is the lowest validation loss of a
run at any time. *At equal training* is the validation loss when the training loss first fell to {level:.2g}, which
every run reached. `python benchmarks/questions.py validation`, record in `results/questions/validation.csv`.

Damping decides most of it here. Directions with S end lower in training and in validation, but how much of the one
becomes the other depends on damping. With little of it (τ_θ = 100, ρ = 0.03) `Exact()` and a running S validate at
equal training loss as the gradient does, or worse. With more (τ_θ = 1, ρ = 0.3 and 3) their medians are lower there,
and at the end as well, at about the same training loss. `CG(3)` at τ_θ = 100 lies between, so that stopping early acts
as damping. A running S behaves as the batch's does. Weight decay of 0.3 raises the training loss of all directions, the
gradient's included, and hardly moves validation. This is one task at one learning rate, and some ranges overlap.
"""


HEAD = ["direction", "weight decay", "training loss", "validation loss", "on the way", "at equal training"]


def section(folder: Path) -> list[str]:
    """Both answers as lines of the page; none where nothing was recorded."""
    return [*rates(read(folder / "rates.csv")), *validation(read(folder / "validation.csv"))]


@dataclass(frozen=True)
class Carried:
    """What becomes of an optimizer's best rate when S is switched on, in one task.

    Args:
        task, base, direction: which.
        own, tuned: the best rates without S and with it.
        ends: the first and the last rate of the grid.
        kept, best: scores with S at `own` and at `tuned`, divided by the score without S at `own`, by seed.
    """

    task: str
    base: str
    direction: str
    own: float
    tuned: float
    ends: tuple[float, float]
    kept: list[float]
    best: list[float]

    def row(self) -> list[str]:
        """Its cells."""

        def named(lr: float) -> str:
            return f"{lr:g}" + (" (end)" if lr in self.ends else "")

        ratios = [spread(values, "{:.2f}".format) for values in (self.kept, self.best)]
        names = [self.task, OPTIMIZERS[self.base], DIRECTIONS[self.direction]]
        return [*names, named(self.own), named(self.tuned), *ratios, str(len(self.kept))]


def rates(rows: Sequence[Row]) -> list[str]:
    """Best rates with and without S, task by task, and what follows."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        for base, others in PAIRS.items():
            for other in others:
                without, having = both(by_rate(of_task, base), by_rate(of_task, other))
                if without:
                    found.append(carried(task, base, other.partition("+")[0], without, having))
    if not found:
        return []
    head = ["task", "optimizer", "with", "rate", "rate with S", "kept", "tuned", "seeds"]
    count = len({row["lr"] for row in rows})
    return [RATES.format(count=count), *followed(found), table(head, [one.row() for one in found]), ""]


def by_rate(rows: Sequence[Row], direction: str) -> Scores:
    """A direction's scores; infinite where a run diverged."""
    found: Scores = {}
    for row in rows:
        if row["direction"] == direction:
            score = float(row["score"]) if row["status"] == "finished" else math.inf
            found.setdefault(float(row["lr"]), {})[row["seed"]] = score
    return found


def both(without: Scores, having: Scores) -> tuple[Scores, Scores]:
    """The seeds that were run at every rate on both sides; nothing if the rates differ or there is no such seed."""
    if without.keys() != having.keys() or not without:
        return {}, {}
    shared = set.intersection(*(set(seeds) for scores in (without, having) for seeds in scores.values()))
    if not shared:
        return {}, {}
    kept = [
        {lr: {seed: seeds[seed] for seed in seeds if seed in shared} for lr, seeds in scores.items()}
        for scores in (without, having)
    ]
    return kept[0], kept[1]


def carried(task: str, base: str, direction: str, without: Scores, having: Scores) -> Carried:
    """The best rates, and what it costs to keep the one without S."""
    own, tuned = (min(f, key=lambda lr: median(f[lr].values())) for f in (without, having))
    kept, best = ([having[lr][seed] / score for seed, score in without[own].items()] for lr in (own, tuned))
    return Carried(task, base, direction, own, tuned, (min(without), max(without)), kept, best)


def followed(found: Sequence[Carried]) -> list[str]:
    """What follows for each optimizer and direction: where the rate went, and whether it can stay."""
    lines = []
    for base, direction in dict.fromkeys((one.base, one.direction) for one in found):
        tasks = [one for one in found if (one.base, one.direction) == (base, direction)]
        stayed = sum(one.own == one.tuned for one in tasks)
        down, up = sum(one.tuned < one.own for one in tasks), sum(one.tuned > one.own for one in tasks)
        worse = [one for one in tasks if min(one.kept) > 1]
        helped, tuned = sum(max(one.kept) < 1 for one in tasks), sum(max(one.best) < 1 for one in tasks)
        seeds = sorted({len(one.kept) for one in tasks})
        among = f"tasks: {len(tasks)}, seeds: {'–'.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))}"
        if len(tasks) == 1:
            so = "One task is too little to follow"
        elif not worse:
            so = "That rate can stay"
        elif all(max(one.best) < 1 and one.tuned < one.own for one in worse):
            so = "That rate is a start, and a third of it is worth a trial"
        else:
            so = "Compare with the optimizer alone"
        lines.append(
            f"- **{OPTIMIZERS[base]}** with {DIRECTIONS[direction]} ({among}): the best rate stayed in "
            f"{stayed}, went down in {down} and up in {up}. At the rate that is best without S, S was better with "
            f"every seed in {helped} and worse with every seed in {len(worse)}; at its own best rate, better in "
            f"{tuned}. {so}."
        )
    return [*lines, ""]


def validation(rows: Sequence[Row]) -> list[str]:
    """Training and validation of every direction, at the end, on the way and at equal training loss."""
    rows = [row for row in rows if row["status"] == "finished"]
    parts: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        level = max(min(numbers(row["train_losses"])) for row in own)
        cells = list(dict.fromkeys((row["direction"], row["weight_decay"]) for row in own))
        lines = []
        for direction, decay in cells:
            runs = [r for r in own if (r["direction"], r["weight_decay"]) == (direction, decay)]
            columns = (
                [float(row["train_loss"]) for row in runs],
                [float(row["score"]) for row in runs],
                [min(numbers(row["scores"])) for row in runs],
                [_at(row, level) for row in runs],
            )
            lines.append([direction, f"{float(decay):g}", *(spread(c, "{:.2g}".format) for c in columns)])
        words = VALIDATION.format(task=task, seeds=len({row["seed"] for row in own}), level=level)
        parts += [words, table(HEAD, lines), ""]
    return parts


def _at(row: Row, level: float) -> float:
    """The validation loss at the first measurement where the training loss is down to a level."""
    pairs = zip(numbers(row["train_losses"]), numbers(row["scores"]), strict=True)
    return next(score for train, score in pairs if train <= level)


def numbers(cell: str) -> list[float]:
    """The numbers of a cell.

    >>> numbers("1 2.5")
    [1.0, 2.5]
    """
    return list(map(float, cell.split()))


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The median, and in brackets the lowest and the highest.

    >>> spread([3.0, 1.0, 2.0], "{:.0f}".format)
    '2 (1–3)'
    """
    return f"{form(median(values))} ({form(min(values))}–{form(max(values))})"
