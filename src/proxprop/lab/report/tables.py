"""The tables of a report as plain rows of text, for the page and for the terminal alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxprop.lab import paper
from proxprop.lab.analysis import Arm, Number, Task, usable_rates


@dataclass(frozen=True)
class Table:
    """Column names and rows of text. The first column and those in `words` read from the left, numbers do not."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), "a row does not fit its columns"


def final_table(task: Task) -> Table:
    """Every arm at its best learning rate, mean ± spread over seeds."""
    taus = len(task.tau_thetas()) > 1
    columns = [
        "method",
        "best lr",
        "final loss",
        "validation acc",
        "test acc",
        "usable lrs",
        "ms per step",
    ]
    return Table(columns, [_final_row(task, arm, taus) for arm in task.arms])


def _final_row(task: Task, arm: Arm, taus: bool) -> list[str]:
    rate, base = arm.best_rate, task.backprop(arm.optimizer)
    ratio = arm.ms_per_step / base.ms_per_step if base else math.nan
    name = arm.full_name + (_tau(arm) if taus else "")
    accuracies = ("validation_accuracy", "test_accuracy")
    return [
        name,
        f"{rate:g}",
        loss_text(arm.final("loss", rate)),
        *(percent(arm.final(key, rate)) for key in accuracies),
        f"{len(usable_rates(task, arm))} of {len(arm.rates)}",
        _pace(arm.ms_per_step, ratio),
    ]


def _pace(milliseconds: float, ratio: float) -> str:
    if not math.isfinite(milliseconds):
        return "–"
    return f"{milliseconds:.2f}" + (f" ({ratio:.2f}×)" if math.isfinite(ratio) else "")


def rate_table(task: Task, optimizer: str) -> Table:
    """Final full-batch loss for every learning rate; the paper's number behind a slash where there is one."""
    arms = task.of(optimizer)
    rates = sorted({rate for arm in arms for rate in arm.rates})
    taus = len(task.tau_thetas()) > 1
    rows = [
        [arm.name + (_tau(arm) if taus else ""), *(_rate_cell(arm, rate) for rate in rates)] for arm in arms
    ]
    return Table(["final loss at lr", *(f"{rate:g}" for rate in rates)], rows)


def _tau(arm: Arm) -> str:
    return f" τ_θ={arm.tau_theta:g}" if arm.tau_theta is not None else ""


def _rate_cell(arm: Arm, rate: float) -> str:
    if rate not in arm.rates:
        return ""
    ours = loss_text(arm.final("loss", rate), spread=False)
    theirs = paper.final_loss(arm.rates[rate][0].config)
    return ours if theirs is None else f"{ours} / {loss_text(Number(theirs, math.nan), spread=False)}"


def layer_table(arm: Arm) -> Table:
    """What the library does with every layer, and the extra work and memory it estimates."""
    rows = []
    for layer in arm.best[0].layers:
        plain, extra = layer["backprop_flops"], layer["flops"]
        share = f"+{extra / plain:.0%}" if plain else "–"
        memory = size(layer["bytes"]) if layer["bytes"] is not None else "–"
        what = layer["space"] + " space" if layer["space"] in ("sample", "feature") else layer["space"]
        shown = what or layer["reason"] or layer["status"]
        rows.append([f"{layer['name']} ({layer['kind']})", f"{layer['parameters']:,}", shown, share, memory])
    return Table(["layer", "parameters", "solved in", "extra FLOPs", "extra memory"], rows, frozenset({2}))


def estimated(arm: Arm) -> float:
    """Extra FLOPs of all converted layers together, relative to BackProp's own for them; NaN where nothing is known."""
    known = [layer for layer in arm.best[0].layers if layer["backprop_flops"]]
    plain = sum(layer["backprop_flops"] for layer in known)
    return sum(layer["flops"] for layer in known) / plain if plain else math.nan


def loss_text(number: Number, spread: bool = True) -> str:
    """A loss with its spread.

    >>> loss_text(Number(0.01234, 0.0021)), loss_text(Number(math.inf, math.nan))
    ('0.0123 ± 0.0021', 'diverged')
    """
    if not math.isfinite(number.mean):
        return "diverged"
    shown = f"{number.mean:.3g}"
    return shown if not spread or math.isnan(number.spread) else f"{shown} ± {number.spread:.2g}"


def percent(number: Number) -> str:
    """An accuracy with its spread, in percent.

    >>> percent(Number(0.975, 0.004))
    '97.5 ± 0.4 %'
    """
    if not math.isfinite(number.mean):
        return "–"
    shown = f"{100 * number.mean:.1f}"
    return f"{shown} %" if math.isnan(number.spread) else f"{shown} ± {100 * number.spread:.1f} %"


def size(count: float) -> str:
    """Bytes for people.

    >>> size(2_500_000)
    '2.4 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
