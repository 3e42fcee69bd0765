"""The angle between the proximal direction and the gradient, layer by layer, over training."""

from typing import Any

import numpy as np

from proxprop.lab.analysis import Task, angles
from proxprop.lab.figures.style import label, styled

MARKERS = "osD^vP*X"


def angle(task: Task, optimizer: str) -> Any | None:
    """One panel per solver, one line per layer; None where nothing was observed.

    Args:
        task: from `analysis.tasks`.
        optimizer: whose arms to draw.

    Returns:
        A matplotlib figure, or None.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    observed = [(arm, angles(arm.best)) for arm in task.of(optimizer) if arm.solver != "backprop"]
    observed = [(arm, found) for arm, found in observed if found]
    if not observed:
        return None
    with styled():
        figure = Figure(figsize=(10, 3.3), layout="constrained")
        axes = figure.subplots(1, len(observed), sharey=True, squeeze=False)[0]
        for ax, (arm, found) in zip(axes, observed, strict=True):
            shades = colormaps["viridis"](np.linspace(0.0, 0.8, len(found)))
            for (name, degrees), shade, index in zip(found.items(), shades, range(len(found)), strict=True):
                marker = MARKERS[index % len(MARKERS)]
                every = max(len(degrees) // 8, 1)
                ax.plot(degrees, label=f"layer {name}", color=shade, marker=marker, markevery=every)
            ax.set_title(label(arm, task.tau_thetas(), rate=True))
            ax.set_xlabel("epochs")
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.set_ylim(0, 90)
            ax.set_yticks([0, 15, 30, 45, 60, 75, 90])
        axes[0].set_ylabel("angle to the gradient, degrees")
        handles, names = axes[0].get_legend_handles_labels()
        if len(names) <= 10:
            figure.legend(handles, names, loc="outside right upper", fontsize=9)
    return figure
