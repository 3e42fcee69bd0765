"""What the paper's text promises but does not show: four small panels."""

from collections.abc import Iterable
from typing import Any

from proxprop.lab.figures.reproduction.draw import label, log_scale, sweep
from proxprop.lab.figures.style import LOOKS, styled
from proxprop.lab.reproduction.claims.beyond import OPTIMIZERS, SOLVERS, over
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import LOSS, arm, band
from proxprop.lab.reproduction.results import Results


def beyond(results: Results) -> Any | None:
    """BatchNorm, τ_θ, batch sizes, and three optimizers; means over seeds with their range, × where a run diverged."""
    rows = results.beyond
    if not rows:
        return None
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(13, 7.4), layout="constrained")
        above, below = figure.subplots(2, 3)
        _batchnorm(above[0], rows)
        _swept(above[1], rows, "tau_theta", "tau_theta", "τ_θ (τ = 1)", "sensitivity to τ_θ")
        _swept(above[2], rows, "batches", "batch_size", "batch size", "batch sizes, Figure 1's step sizes")
        for ax, name in zip(below, OPTIMIZERS, strict=True):
            part = arm(rows, experiment="optimizers", **OPTIMIZERS[name])
            _swept(ax, part, "optimizers", "tau", "learning rate τ (τ_θ = 1)", name)
        for ax in (*above, *below):
            log_scale(ax)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=8.5)
    return figure


def _batchnorm(ax: Any, rows: Iterable[Row]) -> None:
    part = arm(rows, experiment="batchnorm")
    for solver in SOLVERS:
        x, low, middle, high = band(arm(part, solver=solver), LOSS)
        if x:
            ax.plot(x, middle, label=label(solver), **LOOKS[solver])
            ax.fill_between(x, low, high, color=LOOKS[solver]["color"], alpha=0.18, linewidth=0)
    ax.set_xlabel("epochs")
    ax.set_title("BatchNorm in the network\nfull-batch loss")


def _swept(ax: Any, rows: list[Row], experiment: str, column: str, unit: str, title: str) -> None:
    ax.set_xscale("log")
    for index, solver in enumerate(SOLVERS):
        found = over(rows, column, experiment=experiment, solver=solver)
        sweep(ax, found, label(solver), LOOKS[solver], index)
    ax.set_xlabel(unit)
    ax.set_title(f"{title}\nfull-batch loss after ten epochs")
