"""Two questions about S, answered from results/questions: which rate carries over, and what S does to validation."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from proxprop.lab.peers.store import read
from proxprop.lab.reproduction.markdown import table

Row = dict[str, str]

PAIRS = {"adamw": ("running+adamw", "cg3+adamw"), "muon": ("running+muon",)}
"""Optimizers, and the same with S."""

TITLES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "running+adamw": "a running S",
    "running+muon": "a running S",
    "cg3+adamw": "`CG(3)`",
}

RATES = """## Which learning rate carries over

Every method at the same {count} rates (half a decade apart), everything else held: weight decay 0.001, linear schedule, ρ = 0.3
for a running S, τ_θ = 10 and `scaling="gradient"` for `CG(3)`. *Rate* is the one with the lowest last score, a median over
seeds; *(end)* marks the first or last of the grid. *Kept* is the score with S at the rate that is best without, divided by
the best without S, and *tuned* the same with S at its own best rate: below 1 S helps. In brackets the
lowest and highest over seeds, each divided by the same seed's score without S.
`python benchmarks/questions.py rates`, record in `results/questions/rates.csv`.
"""

VALIDATION = """## Why training gains more than validation

AdamW at a rate of 0.003, fed by different directions, with little and with much (decoupled) weight decay; losses after
the last step, medians over {seeds} seeds with the lowest and highest in brackets. *On the way* is the lowest validation
loss of a run at any time, and *at equal training* the validation loss when the training loss first fell to {level:.2g}, which
every run reached. `python benchmarks/questions.py validation`, record in `results/questions/validation.csv`.
"""


def section(folder: Path) -> list[str]:
    """Both answers as lines of the page; none where nothing was recorded."""
    return [*rates(read(folder / "rates.csv")), *validation(read(folder / "validation.csv"))]


def rates(rows: Sequence[Row]) -> list[str]:
    """Best rates with and without S, task by task."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        scores = {name: by_rate([r for r in rows if r["task"] == task], name) for name in TITLES}
        for base, others in PAIRS.items():
            for other in others:
                if scores[base] and scores[other]:
                    lines.append([task, TITLES[base], TITLES[other], *_carried(scores[base], scores[other])])
    if not lines:
        return []
    head = ["task", "optimizer", "with", "rate", "rate with S", "kept", "tuned", "seeds"]
    count = len({row["lr"] for row in rows})
    return [RATES.format(count=count), table(head, lines), ""]


def by_rate(rows: Sequence[Row], direction: str) -> dict[float, dict[str, float]]:
    """Last scores by rate, then by seed; infinite where a run diverged."""
    found: dict[float, dict[str, float]] = {}
    for row in rows:
        if row["direction"] == direction:
            score = float(row["score"]) if row["status"] == "finished" else math.inf
            found.setdefault(float(row["lr"]), {})[row["seed"]] = score
    return found


def _carried(without: dict[float, dict[str, float]], having: dict[float, dict[str, float]]) -> list[str]:
    """The best rates, and what it costs to keep the one without S."""
    own, tuned = (min(f, key=lambda lr: median(f[lr].values())) for f in (without, having))

    def against(lr: float) -> str:
        ratios = [having[lr][seed] / score for seed, score in without[own].items() if seed in having[lr]]
        return spread(ratios, "{:.2f}".format)

    def named(lr: float) -> str:
        return f"{lr:g}" + (" (end)" if lr in (min(without), max(without)) else "")

    return [named(own), named(tuned), against(own), against(tuned), str(len(without[own]))]


def validation(rows: Sequence[Row]) -> list[str]:
    """Training and validation of every direction, at the end, on the way and at equal training loss."""
    rows = [row for row in rows if row["status"] == "finished"]
    lines: list[list[str]] = []
    parts: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        level = max(min(numbers(row["train_losses"])) for row in own)
        cells = list(dict.fromkeys((row["direction"], row["weight_decay"]) for row in own))
        lines = []
        for direction, decay in cells:
            runs = [r for r in own if (r["direction"], r["weight_decay"]) == (direction, decay)]
            measures: list[Callable[[Row], float]] = [
                lambda row: float(row["train_loss"]),
                lambda row: float(row["score"]),
                lambda row: min(numbers(row["scores"])),
                lambda row, level=level: _at(row, level),  # type: ignore[misc]
            ]
            spreads = [spread([measure(row) for row in runs], "{:.2g}".format) for measure in measures]
            lines.append([direction, f"{float(decay):g}", *spreads])
        seeds = len({row["seed"] for row in own})
        head = [
            "direction",
            "weight decay",
            "training loss",
            f"{task}: validation loss",
            "on the way",
            "at equal training",
        ]
        parts += [VALIDATION.format(seeds=seeds, level=level), table(head, lines), ""]
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
