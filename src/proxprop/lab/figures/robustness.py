"""The last full-batch loss and validation accuracy over the learning rate: the paper's Table 1 as a picture."""

import math
from typing import Any

from proxprop.lab import paper
from proxprop.lab.analysis import Arm, Task
from proxprop.lab.figures.style import label, log_losses, look, percent_tick, styled

OFF_SCALE = 1000.0  # A finite loss beyond this is as lost as an infinite one, and would flatten the rest.
KEYS = (("loss", "final full-batch training loss"), ("validation_accuracy", "final validation accuracy"))


def robustness(task: Task, optimizer: str) -> Any:
    """Two panels over the learning rate; bars from the lowest to the highest seed, × marks divergence.

    Args:
        task: from `analysis.tasks`.
        optimizer: whose arms to draw.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(10, 3.9), layout="constrained")
        axes = figure.subplots(1, 2)
        for ax, (key, title) in zip(axes, KEYS, strict=True):
            ax.set_xscale("log")
            for index, arm in enumerate(task.of(optimizer)):
                style = look(arm, index, task.tau_thetas())
                _draw(ax, arm, key, label(arm, task.tau_thetas()), style, inset=0.015 + 0.045 * index)
            ax.set_xlabel("learning rate")
            ax.set_title(title)
        log_losses(axes[0])
        axes[1].yaxis.set_major_formatter(percent_tick)
        axes[1].set_ylim(0, 1.03)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=min(len(names), 5), fontsize=9.5)
    return figure


def _draw(ax: Any, arm: Arm, key: str, name: str, style: dict[str, Any], inset: float) -> None:
    kept = [rate for rate in arm.rates if arm.final("loss", rate).mean <= OFF_SCALE]
    drawn = [rate for rate in kept if math.isfinite(arm.final(key, rate).mean)]
    ends = [[float(record.last[key]) for record in arm.rates[rate]] for rate in drawn]
    means = [arm.final(key, rate).mean for rate in drawn]
    # A mean of equal numbers can differ from them by a rounding.
    below = [max(0.0, mean - min(values)) for mean, values in zip(means, ends, strict=True)]
    above = [max(0.0, max(values) - mean) for mean, values in zip(means, ends, strict=True)]
    ax.errorbar(drawn, means, yerr=[below, above], label=name, capsize=2.5, elinewidth=1, **style)
    _crosses(
        ax, [rate for rate in arm.rates if rate not in kept], style, 1 - inset if key == "loss" else inset
    )
    if key == "loss":
        _behind(ax, arm, style)


def _crosses(ax: Any, lost: list[float], style: dict[str, Any], height: float) -> None:
    """Mark learning rates that led nowhere, each method at its own height so that none hides another."""
    if lost:
        marks = {
            "linestyle": "",
            "marker": "x",
            "markersize": 7,
            "markeredgewidth": 1.8,
            "color": style["color"],
        }
        ax.plot(lost, [height] * len(lost), transform=ax.get_xaxis_transform(), clip_on=False, **marks)


def _behind(ax: Any, arm: Arm, style: dict[str, Any]) -> None:
    """Table 1's numbers as open markers, where the runs repeat it."""
    table = {rate: paper.final_loss(records[0].config) for rate, records in arm.rates.items()}
    points = {rate: loss for rate, loss in table.items() if loss is not None and math.isfinite(loss)}
    if points:
        ax.plot(
            list(points), list(points.values()), linestyle=":", marker=style["marker"], color=style["color"],
            alpha=0.5, markerfacecolor="white", markersize=8, zorder=1, label=f"{arm.name}, the paper's",
        )  # fmt: skip
