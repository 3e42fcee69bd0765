"""What a method costs in every task: steps and seconds to the target, memory, failures, learning rates that serve."""

import math
from collections.abc import Callable
from typing import Any

from proxprop.lab.figures.style import FAINT, INK, styled
from proxprop.lab.peers import analysis
from proxprop.lab.peers.analysis import Cell, Cells
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import REFERENCE
from proxprop.lab.peers.tasks import TASKS

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


def costs(found: Cells) -> Any:
    """Five panels with a row for each method and a marker for each task; × at the right edge is infinite."""
    from matplotlib.figure import Figure

    tasks = analysis.tasks_of(found)
    methods = [name for name in METHODS if any((task, name) in found for task in tasks)][::-1]
    panels: list[tuple[str, Callable[[Cell], float], bool]] = [
        (
            "steps to the target,\npart of the budget",
            lambda cell: cell.steps.middle / TASKS[cell.task].steps,
            False,
        ),
        ("seconds to the target,\nof AdamW's budget", lambda cell: _seconds(found, cell), True),
        ("most memory,\nof AdamW's", lambda cell: _memory(found, cell), True),
        ("trials that failed", lambda cell: cell.failures, False),
        ("decades of rates\nwithin 5 % of the best", analysis.width, False),
    ]
    with styled():
        figure = Figure(figsize=(11, 0.9 + 0.34 * len(methods)), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True)
        for ax, (title, value, logarithmic) in zip(axes, panels, strict=True):
            _panel(ax, found, tasks, methods, value)
            ax.set_title(title, fontsize=9.5)
            if logarithmic and ax.get_lines():
                ax.set_xscale("log", base=2)
                ax.axvline(1, color=FAINT, linewidth=0.9, zorder=1)
        axes[0].set_xlim(0, 1.05)
        axes[0].set_yticks(range(len(methods)), [METHODS[name].title for name in methods], fontsize=9)
        handles, names = axes[3].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=6, fontsize=9)
    return figure


def _panel(
    ax: Any, found: Cells, tasks: list[str], methods: list[str], value: Callable[[Cell], float]
) -> None:
    for index, task in enumerate(tasks):
        shift = 0.7 * ((index + 0.5) / len(tasks) - 0.5)  # a method's marks stay within its row
        known = [(row, value(found[task, name])) for row, name in enumerate(methods) if (task, name) in found]
        points = [(x, row - shift) for row, x in known if math.isfinite(x)]
        lost = [row - shift for row, x in known if math.isinf(x)]
        look = {"linestyle": "", "color": f"C{index}", "alpha": 0.85}
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, marker=MARKERS[index], label=task, **look)
        if lost:
            ax.plot(
                [1.03] * len(lost),
                lost,
                marker="x",
                transform=ax.get_yaxis_transform(),
                clip_on=False,
                **look,
            )
    for row, name in enumerate(methods):
        if all(math.isnan(value(cell)) for (_, method), cell in found.items() if method == name):
            across = ax.get_yaxis_transform()
            ax.text(
                0.5, row, "not timed yet", transform=across, ha="center", va="center", color=INK, fontsize=8
            )


def _seconds(found: Cells, cell: Cell) -> float:
    """Relative to what the reference's whole budget takes."""
    reference = found[cell.task, REFERENCE]
    return cell.seconds.middle / (TASKS[cell.task].steps * reference.ms / 1000)


def _memory(found: Cells, cell: Cell) -> float:
    return cell.megabytes / found[cell.task, REFERENCE].megabytes
