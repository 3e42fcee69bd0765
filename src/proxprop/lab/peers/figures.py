"""One figure for each task and two for all of them; pure functions of the records."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from proxprop.lab.figures.save import save
from proxprop.lab.figures.style import FAINT, styled
from proxprop.lab.peers import analysis
from proxprop.lab.peers.analysis import Cell, Cells
from proxprop.lab.peers.costs import costs
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.refusal import Refused

SGD, ADAMW, MUON = "#0072B2", "#D55E00", "#009E73"
LOOKS: dict[str, dict[str, Any]] = {
    "sgd": {"color": SGD, "linestyle": "--", "marker": "o"},
    "adamw": {"color": ADAMW, "linestyle": "--", "marker": "o"},
    "schedule-free": {"color": "#CC79A7", "linestyle": "--", "marker": "v"},
    "muon": {"color": MUON, "linestyle": "--", "marker": "o"},
    "soap": {"color": "#3b3b3b", "linestyle": "--", "marker": "P"},
    "shampoo": {"color": "#8c8c8c", "linestyle": "--", "marker": "X"},
    "ikfac": {"color": "#b39b00", "linestyle": "--", "marker": "D"},
    "exact+sgd": {"color": SGD, "linestyle": "-", "marker": "^"},
    "cg3+sgd": {"color": SGD, "linestyle": ":", "marker": "s"},
    "exact+adamw": {"color": ADAMW, "linestyle": "-", "marker": "^"},
    "cg3+adamw": {"color": ADAMW, "linestyle": ":", "marker": "s"},
    "running+sgd": {"color": SGD, "linestyle": "-.", "marker": "*"},
    "running+adamw": {"color": ADAMW, "linestyle": "-.", "marker": "*"},
    "running+muon": {"color": MUON, "linestyle": "-.", "marker": "*"},
}
"""The colour says the optimizer, dash and marker what it is fed; peers' lines are dashed."""

FACTORS = np.geomspace(1, 16, 200)


def write(store: Store) -> None:
    """Draw every figure that the records allow.

    Raises:
        Refused: they allow none.
    """
    found = analysis.cells(store.all(TASKS), store.targets(), store.times())
    tasks = analysis.tasks_of(found)
    if not tasks:
        raise Refused(f"there is nothing to draw: {store.folder} holds no complete records of a task")
    for task in tasks:
        save(task_figure(_of(found, task)), store.folder / f"{task}.png")
    save(overview(found), store.folder / "all.png")
    save(costs(found), store.folder / "costs.png")


def _of(found: Cells, task: str) -> list[Cell]:
    """A task's cells, in the methods' order."""
    return [found[task, method] for method in METHODS if (task, method) in found]


def task_figure(chosen: Sequence[Cell]) -> Any:
    """Four panels: scores over steps, the last scores, trials over the learning rate, the best after k trials.

    Args:
        chosen: the cells of one task.
    """
    from matplotlib.figure import Figure

    task = TASKS[chosen[0].task]
    ceiling = _ceiling(chosen)
    with styled():
        figure = Figure(figsize=(11, 8.4), layout="constrained")
        axes = figure.subplots(2, 2)
        _curves(axes[0, 0], chosen)
        _last(axes[0, 1], chosen, ceiling)
        _trials(axes[1, 0], chosen, ceiling)
        _after(axes[1, 1], chosen)
        for ax in (axes[0, 0], axes[1, 0], axes[1, 1]):
            ax.axhline(chosen[0].target, color=FAINT, linewidth=0.9, zorder=1)
            ax.set_yscale("log")
            ax.set_ylim(top=ceiling * 1.25)
            ax.set_ylabel(task.score)
            _plain_within_a_decade(ax.yaxis)
        figure.suptitle(f"{task.name}: {task.score}; grey line: the target", x=0.01, ha="left", fontsize=11)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=4, fontsize=9)
    return figure


def _ceiling(chosen: Sequence[Cell]) -> float:
    """Scores above the untrained model's are as lost as infinite ones."""
    return max(run.scores[0] for cell in chosen for run in cell.trials if run.scores)


def _title(method: str) -> str:
    return METHODS[method].title


def _curves(ax: Any, chosen: Sequence[Cell]) -> None:
    """The median over seeds after every measurement; a run that ended early stays where nothing is drawn."""
    for cell in chosen:
        if not cell.seeds:
            continue
        length = max(len(run.scores) for run in cell.seeds)
        padded = [[*run.scores, *[math.inf] * (length - len(run.scores))] for run in cell.seeds]
        middle = np.median(np.nan_to_num(np.array(padded), nan=math.inf), axis=0)
        x = np.minimum(np.arange(length) * cell.seeds[0].every, cell.seeds[0].steps)
        ax.plot(x, middle, label=_title(cell.method), markevery=max(length // 6, 1), **LOOKS[cell.method])
    ax.set_xlabel("steps")
    ax.set_title("the chosen setting, median of the seeds")


def _last(ax: Any, chosen: Sequence[Cell], ceiling: float) -> None:
    """Every seed's last score, a row for each method, best at the top."""
    ordered = sorted(chosen, key=lambda cell: cell.score.middle, reverse=True)
    for height, cell in enumerate(ordered):
        scores = [min(run.score, ceiling) for run in cell.seeds]
        look = LOOKS[cell.method]
        ax.plot(
            scores,
            [height] * len(scores),
            linestyle="",
            marker=look["marker"],
            color=look["color"],
            alpha=0.7,
        )
        if not scores:
            ax.text(ceiling, height, "every trial failed", ha="right", va="center", fontsize=8.5)
    ax.axvline(chosen[0].target, color=FAINT, linewidth=0.9, zorder=1)
    ax.set_yticks(range(len(ordered)), [_title(cell.method) for cell in ordered], fontsize=8.5)
    ax.set_ylim(-0.7, len(ordered) - 0.3)
    ax.set_xscale("log")
    _plain_within_a_decade(ax.xaxis)
    ax.set_title("the last score of every fresh seed")


def _plain_within_a_decade(axis: Any) -> None:
    """Mark a logarithmic axis with a few plain numbers where it has less than a power of ten to show."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    low, high = axis.get_view_interval()
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())


def _trials(ax: Any, chosen: Sequence[Cell], ceiling: float) -> None:
    """Every trial's last score over its learning rate; failures at the top."""
    for cell in chosen:
        look = LOOKS[cell.method]
        x = [run.setting.lr for run in cell.trials]
        y = [min(run.score, ceiling) for run in cell.trials]
        ax.plot(x, y, linestyle="", marker=look["marker"], color=look["color"], alpha=0.6)
    ax.set_xscale("log")
    ax.set_xlabel("learning rate")
    ax.set_title("every trial; failures lie at the top")


def _after(ax: Any, chosen: Sequence[Cell]) -> None:
    """What a search of k trials finds."""
    for cell in chosen:
        scores = [run.score for run in cell.trials]
        k = list(range(1, len(scores) + 1))
        found = [analysis.best_after(scores, count) for count in k]
        ax.plot(k, found, **LOOKS[cell.method])
    ax.set_xlabel("trials")
    ax.set_title("the best after so many trials, median")


def overview(found: Cells) -> Any:
    """Four panels over all tasks: profiles in steps and in seconds, last scores, one setting for all."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(12, 9), layout="constrained")
        axes = figure.subplots(2, 2)
        for ax, what in ((axes[0, 0], "steps"), (axes[0, 1], "seconds")):
            _profile(ax, found, what)
        _heat(axes[1, 0], found)
        _settings(axes[1, 1], found)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=5, fontsize=9)
    return figure


def _profile(ax: Any, found: Cells, what: str) -> None:
    costs: dict[str, dict[str, float]] = {}
    for task, method in product(*analysis.across(found)):
        cost = getattr(found[task, method], what).middle
        if not math.isnan(cost):
            costs.setdefault(task, {})[method] = cost
    ax.set_title(f"{what} to the target, within a factor of the fewest")
    if not costs:
        ax.text(0.5, 0.5, "not timed yet", transform=ax.transAxes, ha="center")
        return
    profiles = analysis.profile(costs, list(FACTORS))
    for index, method in enumerate(name for name in METHODS if name in profiles):
        # Methods that solve the same tasks would hide each other, so each is moved by a hair.
        shifted = np.array(profiles[method]) + 0.004 * (index - 7)
        ax.plot(FACTORS, shifted, label=_title(method), markevery=(11 * index % 40, 40), **LOOKS[method])
    ax.set_xscale("log", base=2)
    ax.set_xlabel(f"{what}, divided by the fewest of any method")
    ax.set_ylabel(f"part of {len(costs)} tasks")
    ax.set_ylim(-0.05, 1.05)


def _heat(ax: Any, found: Cells) -> None:
    """The last score divided by the target: below one is better than tuned AdamW."""
    tasks = analysis.tasks_of(found)
    methods = [name for name in METHODS if any((task, name) in found for task in tasks)]
    values = np.array([[_ratio(found.get((task, method))) for task in tasks] for method in methods])
    shades = np.log2(np.clip(values, 1 / 8, 8))
    ax.imshow(shades, cmap="PuOr_r", vmin=-3, vmax=3, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        value = values[row, column]
        text = "" if math.isnan(value) else f"{value:.2f}" if value < 100 else "–"
        color = "white" if abs(shades[row, column]) > 2 else "black"
        ax.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    ax.set_xticks(range(len(tasks)), tasks, fontsize=8.5, rotation=20, ha="right")
    ax.set_yticks(range(len(methods)), [_title(name) for name in methods], fontsize=8.5)
    ax.grid(False)
    ax.set_title("last score divided by AdamW's; – failed")


def _ratio(cell: Cell | None) -> float:
    if cell is None:
        return math.nan
    return cell.score.middle / cell.target


def _settings(ax: Any, found: Cells) -> None:
    """One setting for all tasks beside one for each."""
    tasks, methods = analysis.across(found)
    rows = [(name, analysis.one_setting([found[task, name] for task in tasks])) for name in methods]
    rows.sort(key=lambda row: -math.inf if row[1] is None else -row[1][1])
    for height, (method, result) in enumerate(rows):
        look = LOOKS[method]
        if result is None:
            ax.text(1, height, "fails somewhere", va="center", fontsize=8.5)
            continue
        _, one, tuned = result
        ax.plot([tuned, one], [height, height], color=look["color"], linewidth=1.2)
        ax.plot([tuned], [height], marker="|", markersize=9, color=look["color"])
        ax.plot([one], [height], marker=look["marker"], markersize=7, color=look["color"])
    ax.axvline(1, color=FAINT, linewidth=0.9, zorder=1)
    ax.set_xscale("log")
    ax.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    ax.xaxis.set_minor_formatter("")
    ax.set_yticks(range(len(rows)), [_title(method) for method, _ in rows], fontsize=8.5)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.set_xlabel("score divided by the target, geometric mean over tasks")
    ax.set_title("one setting for all tasks (marker), for each (bar)")
