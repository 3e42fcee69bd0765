"""Table 1 as a picture: the final loss over the step size τ."""

import math
from collections.abc import Sequence
from typing import Any

from proxprop.lab import paper
from proxprop.lab.figures.reproduction.draw import label, log_scale, sweep, theirs
from proxprop.lab.figures.style import LOOKS, styled
from proxprop.lab.reproduction.claims.table1 import losses
from proxprop.lab.reproduction.measured import arm
from proxprop.lab.reproduction.results import Results

PANELS = {
    "the released iteration": ("backprop", "published:1", "published:3", "published:5"),
    "correct conjugate gradients, and exact": ("backprop", "cg:1", "cg:3", "cg:5", "exact"),
}


def table1(results: Results) -> Any | None:
    """Two panels: bars from the lowest to the highest seed, × where a run diverged, the paper's numbers behind."""
    if not results.table1:
        return None
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for ax, (title, solvers) in zip(axes, PANELS.items(), strict=True):
            _panel(ax, results, solvers)
            ax.set_title(f"full-batch loss after 50 epochs\n{title}")
            ax.tick_params(labelleft=True)
        for ax in axes:
            log_scale(ax)
            ax.legend(fontsize=8.5, ncols=2, loc="lower left")
    return figure


def _panel(ax: Any, results: Results, solvers: Sequence[str]) -> None:
    ax.set_xscale("log")
    ax.set_xlabel("step size τ (× : at least one seed diverged, or its loss is beyond 1000)")
    for index, solver in enumerate(solvers):
        style = LOOKS[solver]
        sweep(ax, losses(arm(results.table1, solver=solver)), label(solver), style, index)
        said = {tau: loss for (name, tau), loss in paper.table().items() if name == paper.name(solver)}
        points = {tau: loss for tau, loss in said.items() if math.isfinite(loss)}
        if points:
            behind = {"color": style["color"], "alpha": 0.3, "linewidth": 4.5, "zorder": 1}
            ax.plot(*zip(*points.items(), strict=True), label=theirs(solver), **behind)
