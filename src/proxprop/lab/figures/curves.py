"""Loss and accuracy over epochs and over time, each arm at its best learning rate."""

from typing import Any

import numpy as np

from proxprop.lab import paper
from proxprop.lab.analysis import Arm, Task
from proxprop.lab.figures.style import FAINT, label, log_losses, look, percent_tick, styled

PANELS = (
    ("loss", "epoch", "full-batch training loss", "epochs"),
    ("loss", "seconds", "full-batch training loss", "training time in seconds"),
    ("validation_accuracy", "epoch", "validation accuracy", "epochs"),
    ("validation_accuracy", "seconds", "validation accuracy", "training time in seconds"),
)


def curves(task: Task, optimizer: str) -> Any:
    """Four panels: mean over seeds with the range between the lowest and the highest, the paper's curves behind.

    Args:
        task: from `analysis.tasks`.
        optimizer: whose arms to draw.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    arms = task.of(optimizer)
    with styled():
        figure = Figure(figsize=(10, 6.6), layout="constrained")
        axes = figure.subplots(2, 2)
        for ax, (key, over, title, unit) in zip(axes.flat, PANELS, strict=True):
            for index, arm in enumerate(arms):
                _draw(
                    ax,
                    arm,
                    key,
                    over,
                    label(arm, task.tau_thetas(), rate=True),
                    look(arm, index, task.tau_thetas()),
                )
            ax.set_xlabel(unit)
            if over == "epoch":
                ax.xaxis.get_major_locator().set_params(integer=True)
            ax.set_title(title)
            if key == "loss":
                log_losses(ax)
            else:
                ax.yaxis.set_major_formatter(percent_tick)
                _zoom(ax)
            ax.set_xlim(left=0)
        _common_time(axes, arms)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), 4), fontsize=9.5)
    return figure


def _draw(ax: Any, arm: Arm, key: str, over: str, name: str, style: dict[str, Any]) -> None:
    behind = paper.curve(arm.best[0].config, key, over)
    if behind is not None:
        ax.plot(*behind, color=style["color"], alpha=0.4, linewidth=3.5, label=f"{arm.name}, the paper's")
    x, low, middle, high = band(arm, key, over)
    ax.plot(x, middle, label=name, markevery=max(len(x) // 8, 1), **style)
    ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def band(arm: Arm, key: str, over: str) -> tuple[Any, Any, Any, Any]:
    """x, lowest, mean and highest over the seeds at the best learning rate, up to the shortest run."""
    length = min(len(record.epochs) for record in arm.best)
    ys = np.array([record.series(key)[:length] for record in arm.best])
    xs = np.array([record.series(over)[:length] for record in arm.best])
    return xs.mean(axis=0), ys.min(axis=0), ys.mean(axis=0), ys.max(axis=0)


def _common_time(axes: Any, arms: list[Arm]) -> None:
    """Over time, every arm is shown as far as the fastest one ran, as the paper does, and says so."""
    ends = [np.nanmax(band(arm, "loss", "seconds")[0]) for arm in arms]
    if not ends or not np.isfinite(min(ends)) or min(ends) <= 0:
        return
    for ax in axes[:, 1]:
        ax.set_xlim(0, 1.02 * max(ends))
        if max(ends) > 1.05 * min(ends):
            ax.axvline(min(ends), color=FAINT, linewidth=0.8, linestyle=":")


def _zoom(ax: Any) -> None:
    """Leave the first, untrained epochs out of an accuracy axis, so that the ends can be told apart."""
    ends = [line.get_ydata()[-1] for line in ax.get_lines() if len(line.get_ydata())]
    lowest = np.nanmin(ends) if len(ends) and np.isfinite(ends).any() else 0.0
    everything = [y for line in ax.get_lines() for y in line.get_ydata() if np.isfinite(y)]
    highest = max(everything, default=1.0)
    ax.set_ylim(max(0.0, lowest - 0.8 * (1.02 - lowest)), min(1.005, highest + 0.02))
