"""What the paper's text promises but does not show: BatchNorm, optimizers, sensitivity to τ_θ; and batch sizes."""

import math
from collections.abc import Sequence
from typing import Any

from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.table1 import Losses, span
from proxprop.lab.reproduction.claims.verdict import Verdict
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import LOSS, VALIDATION, arm, final
from proxprop.lab.reproduction.results import Results

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain SGD": {"experiment": "optimizers", "optimizer": "sgd", "momentum": 0},
    "Nesterov SGD": {"experiment": "optimizers", "optimizer": "sgd", "momentum": 0.95},
    "Adam": {"experiment": "optimizers", "optimizer": "adam"},
    "Muon": {"experiment": "muon"},
}
SOLVERS = {"backprop": "BackProp", "cg:3": "cg3", "exact": "exact", "running:10": "running average"}


def claims(results: Results) -> list[Verdict]:
    """BatchNorm, the three optimizers, τ_θ, and the batch size."""
    rows = results.beyond
    return [
        *(_batchnorm(rows, solver, results.seeds) for solver in ("cg:3", "exact")),
        *(_optimizer(rows, name, results.seeds) for name in OPTIMIZERS),
        _sensitive(rows),
        *(_batch(rows, solver) for solver in ("cg:3", "exact")),
    ]


def over(rows: list[Row], column: str, **wanted: object) -> Losses:
    """A setting's values, ascending, to the final loss of the arm."""
    found = arm(rows, **wanted)
    values = sorted({row[column] for row in found})
    return {value: final(arm(found, **{column: value}), LOSS) for value in values}


def _batchnorm(rows: list[Row], solver: str, seeds: int) -> Verdict:
    """Works: every seed finishes, with a validation accuracy no more than a point below BackProp's."""
    part = arm(rows, experiment="batchnorm")
    mine, base = (arm(part, solver=name) for name in (solver, "backprop"))
    accuracy, other = final(mine, VALIDATION), final(base, VALIDATION)
    works = None if not (accuracy.count and other.count) else accuracy.mean >= other.mean - grades.POINTS
    shown = f"loss {words.loss(final(mine, LOSS), seeds)}, validation {words.percent(accuracy, seeds)}"
    told = f"BackProp: loss {words.loss(final(base, LOSS), seeds)}, validation {words.percent(other, seeds)}"
    claim = (
        f"ProxProp ({SOLVERS[solver]}) integrates with BatchNorm: no seed diverges, validation accuracy at most "
        f"{100 * grades.POINTS:g} point below BackProp's"
    )
    verdict = grades.holds(works if works is None else works and not accuracy.lost)
    return Verdict(
        claim, "said, not shown", "", shown if mine else words.NOTHING, verdict, told if base else ""
    )


def _optimizer(rows: list[Row], name: str, seeds: int) -> Verdict:
    """Combines well: every solver's lowest final loss over learning rates is below BackProp's lowest."""
    part = arm(rows, **OPTIMIZERS[name])
    found = {solver: over(part, "tau", solver=solver) for solver in SOLVERS}
    found = {solver: losses for solver, losses in found.items() if losses}
    claim = f"{name}: ProxProp ends lower than BackProp after ten epochs, each at its best τ"
    said = "said, not shown" if name != "Muon" else "not in the paper"
    if "backprop" not in found or len(found) < 2 or not _complete(list(found.values()), seeds):
        return Verdict(claim, said, "", "incomplete" if found else words.NOTHING, grades.NOT_RUN)
    best = {solver: min(losses, key=lambda tau: losses[tau].mean) for solver, losses in found.items()}
    lowest = {solver: found[solver][tau].mean for solver, tau in best.items()}
    told = [f"{SOLVERS[s]} {_loss(loss)} (τ = {best[s]:g})" for s, loss in lowest.items()]
    lower = [loss < lowest["backprop"] for solver, loss in lowest.items() if solver != "backprop"]
    outer = [SOLVERS[s] for s, tau in best.items() if tau in (min(found[s]), max(found[s]))]
    why = f"at an end of the grid: {', '.join(outer)}" if outer else ""
    return Verdict(claim, said, "", ", ".join(told), grades.holds(*lower), why)


def _complete(found: Sequence[Losses], seeds: int) -> bool:
    """Whether methods were run over the same settings, with all seeds, so that their best ones can be compared."""
    grids = {tuple(losses) for losses in found}
    return len(grids) == 1 and all(loss.count == seeds for losses in found for loss in losses.values())


def _sensitive(rows: list[Row]) -> Verdict:
    """More sensitive: fewer orders of τ_θ within twice the method's own lowest loss."""
    spans, told = {}, []
    for solver in ("cg:3", "exact"):
        losses = over(rows, "tau_theta", experiment="tau_theta", solver=solver)
        if losses:
            lowest = min(loss.mean for loss in losses.values())
            worst = max(loss.mean for loss in losses.values())
            spans[solver] = span(losses, 2 * lowest) or 0.0
            ratio = f"{worst / lowest:.3g}×" if math.isfinite(worst) else "a diverged run"
            told.append(f"{SOLVERS[solver]} {spans[solver]:.2g} orders, worst over best {ratio}")
    conditions = [spans["exact"] < spans["cg:3"]] if len(spans) == 2 else [None]
    claim = (
        "exact is more sensitive to τ_θ than cg3: fewer orders of τ_θ within twice its own lowest loss (τ = 1, "
        "ten epochs)"
    )
    return Verdict(claim, "said, not shown", "", "; ".join(told) or words.NOTHING, grades.holds(*conditions))


def _batch(rows: list[Row], solver: str) -> Verdict:
    """The paper only has batches of 500."""
    mine, base = (
        over(rows, "batch_size", experiment="batches", solver=name) for name in (solver, "backprop")
    )
    shared = [size for size in mine if size in base]
    told = [f"{size}: {_loss(mine[size].mean)} against {_loss(base[size].mean)}" for size in shared]
    lower = [mine[size].mean < base[size].mean for size in shared]
    claim = (
        f"ProxProp ({SOLVERS[solver]}) ends lower than BackProp after ten epochs at every batch size, both with "
        "Figure 1's step sizes"
    )
    verdict = grades.holds(*lower) if lower else grades.NOT_RUN
    return Verdict(claim, "only 500 shown", "", "; ".join(told) or words.NOTHING, verdict)


def _loss(value: float) -> str:
    return words.number(value) if math.isfinite(value) else "diverged"
