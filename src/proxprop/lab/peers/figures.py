"""One figure for each task and two for all of them; pure functions of the records."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from proxprop.lab.figures.save import save
from proxprop.lab.figures.style import FAINT, styled
from proxprop.lab.peers import analysis
from proxprop.lab.peers.analysis import Cell, Cells
from proxprop.lab.peers.costs import costs
from proxprop.lab.peers.looks import GREY, LOOKS, families, legend, title
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.refusal import Refused

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
    """Scores over steps, a panel for each optimizer; below, last scores, trials, and the best after k trials.

    Args:
        chosen: the cells of one task.
    """
    from matplotlib.figure import Figure

    task = TASKS[chosen[0].task]
    ceiling = _ceiling(chosen)
    with styled():
        figure = Figure(figsize=(10.5, 9.6), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.35))
        above, below = parts
        curves = above.subplots(1, len(families()), sharex=True, sharey=True)
        for ax, (name, methods) in zip(curves, families().items(), strict=True):
            _curves(ax, chosen, methods)
            ax.set_title(name)
        curves[0].set_ylabel(task.score)
        last, trials, after = below.subplots(1, 3)
        _last(last, chosen, ceiling)
        _trials(trials, chosen, ceiling)
        _after(after, chosen)
        for ax in (*curves, trials, after):
            ax.axhline(chosen[0].target, color=FAINT, linewidth=0.9, zorder=1)
            ax.set_yscale("log")
            ax.set_ylim(top=min(ceiling * 1.25, ax.get_ylim()[1]))
            _plain_within_a_decade(ax.yaxis)
        figure.suptitle(
            f"{task.name}: {task.score} over steps, the chosen setting, median of the seeds.\n"
            "Level grey line: the target. Pale lines: all other methods.",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        legend(figure, curves, 4)
    return figure


def _ceiling(chosen: Sequence[Cell]) -> float:
    """Scores above the untrained model's are as lost as infinite ones."""
    return max(run.scores[0] for cell in chosen for run in cell.trials if run.scores)


def _curves(ax: Any, chosen: Sequence[Cell], methods: Sequence[str]) -> None:
    """The median over seeds after every measurement; a run that ended early stays where nothing is drawn."""
    for cell in chosen:
        look = {"label": title(cell.method)} | LOOKS[cell.method] if cell.method in methods else GREY
        if not cell.seeds:
            ax.plot([], [], **look)  # for the legend
            continue
        length = max(len(run.scores) for run in cell.seeds)
        padded = [[*run.scores, *[math.inf] * (length - len(run.scores))] for run in cell.seeds]
        middle = np.median(np.nan_to_num(np.array(padded), nan=math.inf), axis=0)
        x = np.minimum(np.arange(length) * cell.seeds[0].every, cell.seeds[0].steps)
        ax.plot(x, middle, markevery=max(length // 6, 1), **look)
    ax.set_xlabel("steps")


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
    ax.set_yticks(range(len(ordered)), [title(cell.method) for cell in ordered], fontsize=8.5)
    ax.set_ylim(-0.7, len(ordered) - 0.3)
    ax.set_xscale("log")
    _plain_within_a_decade(ax.xaxis)
    ax.set_title("last score of every seed")


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
    ax.set_title("every trial; failed at the top")


def _after(ax: Any, chosen: Sequence[Cell]) -> None:
    """What a search of k trials finds."""
    for cell in chosen:
        scores = [run.score for run in cell.trials]
        k = list(range(1, len(scores) + 1))
        found = [analysis.best_after(scores, count) for count in k]
        ax.plot(k, found, **LOOKS[cell.method])
    ax.set_xlabel("k")
    ax.set_title("best after k trials, median")


def overview(found: Cells) -> Any:
    """All tasks: profiles in steps and in seconds, a panel for each optimizer; last scores; one setting for all."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(10.5, 13), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 0.95))
        above, below = parts
        axes = above.subplots(2, len(families()), sharex=True, sharey=True)
        for row, what in zip(axes, ("steps", "seconds"), strict=True):
            _profiles(row, found, what)
        above.suptitle(
            "Part of the tasks whose target is reached within a factor of the fewest steps (above)\n"
            "or seconds (below) of any method. Pale lines: all other methods.",
            x=0.01,
            ha="left",
            fontsize=11,
        )
        heat, settings = below.subplots(1, 2, width_ratios=(1.5, 1))
        _heat(heat, found)
        _settings(settings, found)
        legend(figure, axes[0], 4)
    return figure


def _profiles(axes: Sequence[Any], found: Cells, what: str) -> None:
    """A row of panels. A method that was not timed in every task has no profile in seconds."""
    tasks, methods = analysis.across(found)
    middles = {name: [getattr(found[task, name], what).middle for task in tasks] for name in methods}
    known = {name: values for name, values in middles.items() if not any(map(math.isnan, values))}
    costs = {task: {name: values[at] for name, values in known.items()} for at, task in enumerate(tasks)}
    profiles = analysis.profile(costs, list(FACTORS)) if known else {}
    for ax, (name, group) in zip(axes, families().items(), strict=True):
        for index, method in enumerate(profiles):
            look = {"label": title(method), "markevery": (11 * index % 40, 40)} | LOOKS[method]
            # Methods that solve the same tasks would hide each other, so each is moved by a hair.
            shifted = np.array(profiles[method]) + 0.004 * (index - 7)
            ax.plot(FACTORS, shifted, **(look if method in group else GREY))
        if untimed := sum(method in methods and method not in profiles for method in group):
            ax.text(0.98, 0.03, f"{untimed} not timed yet", transform=ax.transAxes, ha="right", fontsize=8.5)
        ax.set_title(name)
        ax.set_xscale("log", base=2)
        ax.set_xlabel(f"{what} / fewest")
        ax.set_ylim(-0.05, 1.05)
    axes[0].set_ylabel(f"part of {len(tasks)} tasks")


def _heat(ax: Any, found: Cells) -> None:
    """The last score divided by the target: below one is better than tuned AdamW."""
    tasks = analysis.tasks_of(found)
    methods = [name for name in METHODS if any((task, name) in found for task in tasks)]
    values = np.array([[_ratio(found.get((task, method))) for task in tasks] for method in methods])
    shades = np.log2(np.clip(values, 1 / 8, 8))
    ax.imshow(shades, cmap="PuOr_r", vmin=-3, vmax=3, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        value = values[row, column]
        text = (
            ""
            if math.isnan(value)
            else f"{value:.2f}"
            if value < 10
            else f"{value:.0f}"
            if value < 100
            else "–"
        )
        color = "white" if abs(shades[row, column]) > 2 else "black"
        ax.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    ax.set_xticks(range(len(tasks)), tasks, fontsize=8.5, rotation=40, ha="right")
    ax.set_yticks(range(len(methods)), [title(name) for name in methods], fontsize=8.5)
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
    ax.set_yticks(range(len(rows)), [title(method) for method, _ in rows], fontsize=8.5)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.set_xlabel("score / target, geometric mean over tasks")
    ax.set_title("one setting for all (marker),\nfor each (bar)")
