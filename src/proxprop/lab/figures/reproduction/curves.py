"""Figures 1 and 2: loss and accuracy over epochs and over time."""

from collections.abc import Sequence
from typing import Any

from proxprop.lab import paper
from proxprop.lab.figures.reproduction.draw import label, log_scale, theirs
from proxprop.lab.figures.style import LOOKS, percent_tick, styled
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import LOSS, VALIDATION, arm, band, pace
from proxprop.lab.reproduction.results import Results

QUANTITY = {LOSS: "loss", VALIDATION: "validation_accuracy"}
TITLES = {LOSS: "full-batch training loss", VALIDATION: "validation accuracy"}
TIME = "training seconds here; the paper's scaled to\nthe same BackProp seconds per epoch"
LINES = {
    "the released iteration": ("backprop", "published:3", "published:5", "published:10", "exact"),
    "correct conjugate gradients": ("backprop", "cg:3", "cg:5", "cg:10", "exact"),
}
ARCHITECTURES = {
    "convnet-2pool": "two poolings, as in the released code",
    "convnet": "three poolings, as in the paper's text",
}


def fig1(results: Results) -> Any | None:
    """The paper's three panels, once with the released iteration and once with correct conjugate gradients."""
    if not results.fig1:
        return None
    panels = ((LOSS, "epoch"), (LOSS, "seconds"), (VALIDATION, "epoch"))
    return _grid("fig1", results.fig1, panels, (13.5, 7.6))


def fig2(results: Results, model: str) -> Any | None:
    """The paper's four panels for one architecture, once with either iteration."""
    rows = [row for row in results.fig2 if row["model"] == model]
    if not rows:
        return None
    panels = ((LOSS, "epoch"), (LOSS, "seconds"), (VALIDATION, "epoch"), (VALIDATION, "seconds"))
    return _grid("fig2", rows, panels, (16.5, 7.6), ARCHITECTURES[model])


def _grid(
    figure: str,
    rows: Sequence[Row],
    panels: Sequence[tuple[str, str]],
    size: tuple[float, float],
    title: str = "",
) -> Any:
    from matplotlib.figure import Figure

    with styled():
        made = Figure(figsize=size, layout="constrained")
        axes = made.subplots(len(LINES), len(panels), sharex="col", sharey="col", squeeze=False)
        for line, (name, solvers) in zip(axes, LINES.items(), strict=True):
            for ax, (column, over) in zip(line, panels, strict=True):
                _panel(ax, figure, rows, solvers, column, over)
                ax.set_title(f"{TITLES[column]}\n{name}", fontsize=10)
        for ax in axes.flat:
            ax.tick_params(labelleft=True, labelbottom=True)
        _legend(made, axes)
        if title:
            made.suptitle(title, fontsize=11)
    return made


def _panel(ax: Any, figure: str, rows: Sequence[Row], solvers: Sequence[str], column: str, over: str) -> None:
    backprop = pace(arm(rows, solver="backprop"))
    for solver in solvers:
        mine = arm(rows, solver=solver)
        x, low, middle, high = band(mine, column, over)
        style = LOOKS[solver]
        drawn = paper.drawn(figure, paper.name(solver), QUANTITY[column], over)
        if drawn and (over == "epoch" or backprop.values):
            scale = 1.0 if over == "epoch" else backprop.mean / paper.pace(figure, "BackProp")
            xs = [scale * value for value in drawn[0]]
            ax.plot(
                xs, drawn[1], color=style["color"], alpha=0.3, linewidth=4.5, label=theirs(solver), zorder=1
            )
        if x:
            ax.plot(x, middle, label=label(solver), markevery=max(len(x) // 8, 1), **style)
            ax.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    ax.set_xlim(0, 1.02 * max((row[over] for row in rows if row[over]), default=1.0))
    ax.set_xlabel("epochs" if over == "epoch" else TIME)
    if column == LOSS:
        log_scale(ax)
    else:
        ax.yaxis.set_major_formatter(percent_tick)
        _zoom(ax)


def _zoom(ax: Any) -> None:
    """Leave the untrained start out of an accuracy axis, so that the ends can be told apart."""
    ends = [float(line.get_ydata()[-1]) for line in ax.get_lines() if len(line.get_ydata())]
    if ends:
        ax.set_ylim(max(0.0, min(ends) - 0.12), min(1.0, max(ends) + 0.04))


def _legend(figure: Any, axes: Any) -> None:
    """One legend for all panels; what occurs in several is named once."""
    named: dict[str, Any] = {}
    for ax in axes.flat:
        named |= {name: handle for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = sorted(named, key=lambda name: name.endswith("the paper's"))
    figure.legend([named[name] for name in order], order, loc="outside lower center", ncols=6, fontsize=9)
