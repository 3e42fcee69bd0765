"""What the paper's text promises but does not show: small panels."""

from collections.abc import Iterable
from typing import Any

from proxprop.lab.figures.reproduction.draw import label, log_scale, sweep
from proxprop.lab.figures.style import LOOKS, styled
from proxprop.lab.reproduction.claims.beyond import OPTIMIZERS, SOLVERS, over
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import LOSS, arm, band
from proxprop.lab.reproduction.results import Results


def beyond(results: Results) -> Any | None:
    """BatchNorm, τ_θ, batch sizes, optimizers; means over seeds with their range, × where a run diverged."""
    rows = results.beyond
    if not rows:
        return None
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(15, 7.4), layout="constrained")
        axes = figure.subplots(2, 4)
        _batchnorm(axes[0, 0], arm(rows, experiment="batchnorm"))
        _swept(
            axes[0, 1], arm(rows, experiment="tau_theta"), "tau_theta", "τ_θ (τ = 1)", "sensitivity to τ_θ"
        )
        _swept(axes[0, 2], arm(rows, experiment="batches"), "batch_size", "batch size", "batch sizes")
        for ax, (name, wanted) in zip(axes.flat[3:7], OPTIMIZERS.items(), strict=True):
            _swept(ax, arm(rows, **wanted), "tau", "learning rate τ", name)
        for ax in axes.flat[:7]:
            log_scale(ax)
        _legend(axes.flat[7], axes.flat[:7])
    return figure


def _legend(ax: Any, panels: Iterable[Any]) -> None:
    """What all panels show, in the place of an eighth."""
    named: dict[str, Any] = {}
    for panel in panels:
        named |= {name: handle for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    ax.axis("off")
    ax.legend(named.values(), named, loc="center left", fontsize=10)


def _batchnorm(ax: Any, rows: Iterable[Row]) -> None:
    for solver in SOLVERS:
        x, low, middle, high = band(arm(rows, solver=solver), LOSS)
        if x:
            ax.plot(x, middle, label=label(solver), **LOOKS[solver])
            ax.fill_between(x, low, high, color=LOOKS[solver]["color"], alpha=0.18, linewidth=0)
    ax.set_xlabel("epochs")
    ax.set_title("BatchNorm in the network\nfull-batch loss")


def _swept(ax: Any, rows: list[Row], column: str, unit: str, title: str) -> None:
    ax.set_xscale("log")
    for index, solver in enumerate(SOLVERS):
        sweep(ax, over(rows, column, solver=solver), label(solver), LOOKS[solver], index)
    ax.set_xlabel(unit)
    ax.set_title(f"{title}\nfull-batch loss after ten epochs")
