"""The angle to the gradient, and the penalty energy after implicit and explicit steps, over τ_θ."""

from collections.abc import Sequence
from typing import Any

from proxprop.lab.figures.reproduction.draw import label
from proxprop.lab.figures.style import FAINT, INK, LOOKS, styled
from proxprop.lab.reproduction.claims.propositions import limit
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.results import Results

ANGLES = ("cg:1", "cg:3", "cg:5", "cg:10", "exact", "published:3")
ENERGIES = ("published:3", "cg:3", "exact")


def propositions(results: Results) -> Any | None:
    """Left: the largest angle over layers, epochs and runs. Right: energy after a step over energy before it."""
    rows = [r for r in results.propositions if r["precision"] == "float64" and r["layer"] != "all"]
    if not rows:
        return None
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _angles(left, rows)
        _energies(right, rows)
    return figure


def _angles(ax: Any, rows: Sequence[Row]) -> None:
    for solver in ANGLES:
        mine = [row for row in rows if row["solver"] == solver and row["angle"] is not None]
        taus = sorted({row["tau_theta"] for row in mine})
        angles = [[row["angle"] for row in mine if row["tau_theta"] == tau] for tau in taus]
        ax.plot(taus, [max(found) for found in angles], label=label(solver), **LOOKS[solver])
    ax.axhline(90, color=INK, linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_ylim(0, 95)
    ax.set_yticks([0, 15, 30, 45, 60, 75, 90])
    ax.set_xlabel("τ_θ")
    ax.set_title(
        "angle between direction and gradient, degrees\n(line: the largest of all layers, epochs and runs)"
    )
    ax.legend(fontsize=8.5, loc="lower right", ncols=2)


def _energies(ax: Any, rows: Sequence[Row]) -> None:
    known = [row for row in rows if row["energy"] is not None]
    explicit = [row for row in known if row["solver"] == "explicit"]
    marks: dict[str, Any] = {"linestyle": "", "markersize": 4, "alpha": 0.6}
    ax.plot(
        [limit(row) for row in explicit], [row["energy"] for row in explicit], marker="o", color="#E69F00",
        label="explicit step τ_θ·AᵀG", **marks,
    )  # fmt: skip
    for solver in ENERGIES:
        mine = [row for row in known if row["solver"] == solver]
        points = [limit(row) for row in mine], [row["energy"] for row in mine]
        style = LOOKS[solver] | marks
        ax.plot(*points, label=f"proximal step, {label(solver)}", **style)
    ax.axhline(1, color=INK, linewidth=1, linestyle="--")
    ax.axvline(1, color=FAINT, linewidth=1, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("τ_θ in units of 2/λ, λ the largest eigenvalue of the layer's AᵀA")
    ax.set_title("penalty energy after the step, relative to before\n(a point per layer, epoch, run and τ_θ)")
    ax.legend(fontsize=8.5, loc="upper left")
