"""docs/peers.md, written from the records alone: `python -m proxprop.lab.peers.page > docs/peers.md`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxprop.lab.peers import analysis, questions
from proxprop.lab.peers.analysis import Cell, Cells, tasks_of
from proxprop.lab.peers.answer import answer, interval, later, lifts, title, verdicts
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import SEEDS, TRIALS
from proxprop.lab.peers.spaces import SPACES, setting
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.reproduction.markdown import table

FOLDER = Path("results/peers")
END = 1 / 8  # of the logarithm of a range of learning rates
FIGURES = {
    "all": "All tasks: profiles, last scores, one setting",
    "costs": "All tasks: steps, seconds, memory",
}

HEAD = "# Against its peers: is this for me?\n"

PROTOCOL = f"""\
Every method gets {TRIALS} quasi-random trials in a space that was written down before the recorded runs
(`lab/peers/spaces.py`). The trial with the lowest score at the end of its schedule is run again with {SEEDS} fresh
seeds. A task's target is the median last score of tuned AdamW, fixed before the recorded runs of other methods.
`proxprop bench` runs it all, and `make docs` writes this page from `results/peers/*.csv`.
"""

DECIDED = """## What was decided when

This was not registered in advance. Single runs of all methods on some of the small tasks, with the trials' seed and
without a record, came first. After them the ranges of SGD, of ProxProp's directions under SGD and of K-FAC were
widened, the losses of the differential equations were scaled to begin near one, and the image is scored on all its
pixels. After AdamW's first recorded runs the target became the median of its seeds instead of the worst, and the
autoencoder got Glorot's weights, because AdamW stayed on a plateau; its first 13 runs there were replaced. Shampoo's
first 65 runs were replaced too: its package sums momentum unless told to average it, so that its steps were ten times
as long as its range of rates is made for, and its best rate was the smallest in most tasks. The rule by which ProxProp
wins or loses was made stricter after results were seen: the best peer was first chosen by its trials too, which had
counted digits as won.

S under SOAP and √S came after that; *What was added later* says how. They do not count in the verdict on the seven
tasks that came before them. Then five tasks were written down and held out. Their sizes were set by runs of AdamW
alone, and every method, √S included, was fixed before its first run in them.
"""

ONE = f"""## One setting for all tasks

Trial k of a method is the same setting in every task. The table shows the trial with the lowest geometric mean over
tasks of score divided by target, that mean, and the mean with a setting for each task. A method that fails in some task
with every setting has none. "Decades" is the width of the range of learning rates that end within 5 % (in brackets:
within a factor of 2) of the method's best trial, mean over tasks. It is estimated as the part of the trials that do,
times the decades searched. {TRIALS} trials vary everything at once, so it is coarse.
S under SOAP and √S were added later.
"""

TO_TARGET = f"""## To the target, task by task

Steps and seconds to the target are medians over seeds with the 95 % interval of their bootstrap, ∞ where the target was
not reached. Seconds are steps times the time of a step, which is measured apart from training, with all methods in
turns and nothing else running (`proxprop bench time`). Memory is the most that a method holds, weights included and
data excluded. "Failed" counts trials. A learning rate is marked as an end if it lies in the outermost eighth of its
range, so that a better one may lie beyond. The last column has what runs the seeds of a row again:
`proxprop bench --task TASK --method METHOD --trial TRIAL --seed S`, with S from 1 to {SEEDS}.
"""

UNTIMED = "Steps were not timed yet, so there are no seconds.\n"


def page(store: Store) -> str:
    """The whole page."""
    found = analysis.cells(store.all(TASKS), store.targets(), store.times())
    if not tasks_of(found):
        return "\n".join([HEAD, PROTOCOL, "Nothing has been run yet.", "", *open_tasks(found)])
    parts = [HEAD, *answer(found), *verdicts(found), PROTOCOL, *lifts(found), *later(found), *one(found)]
    parts += [f"![{words}](../results/peers/{name}.png)\n" for name, words in FIGURES.items()]
    parts += [TO_TARGET, timed(found, store.times())]
    for task in tasks_of(found):
        parts += to_target([found[task, name] for name in METHODS if (task, name) in found])
    parts += questions.section(store.folder.parent / "questions")
    return "\n".join([*parts, DECIDED, *open_tasks(found)])


def timed(found: Cells, times: Sequence[Mapping[str, str]]) -> str:
    """How busy the machine was when steps were timed, and which methods were not."""
    if not times:
        return UNTIMED
    busiest = max(float(row["load"]) for row in times)
    said = (
        f"While steps were timed, the machine's load was at most {busiest:g} with the timed process itself."
    )
    there = {row["task"] for row in times}
    names = [f"all methods in {task}" for task in tasks_of(found) if task not in there]
    names += [
        f"{title(cell)} in {cell.task}"
        for cell in found.values()
        if cell.task in there and cell.chosen is not None and not cell.way
    ]
    return said + (f" Not timed yet: {', '.join(names)}." if names else "") + "\n"


def one(found: Cells) -> list[str]:
    """One setting for all tasks."""
    tasks, methods = analysis.across(found)
    rows = []
    for name in methods:
        chosen = [found[task, name] for task in tasks]
        widths = [
            sum(analysis.width(cell, close) for cell in chosen) / len(chosen)
            for close in (analysis.CLOSE, 2.0)
        ]
        failed = sum(cell.failures for cell in chosen)
        result = analysis.one_setting(chosen)
        cells = (
            ["none", "", ""]
            if result is None
            else [_setting(name, result[0]), f"{result[1]:.2f}", f"{result[2]:.2f}"]
        )
        searched = math.log10(SPACES[name].lr[1] / SPACES[name].lr[0])
        decades = f"{widths[0]:.1f} ({widths[1]:.1f}) of {searched:.1f}"
        rows.append(
            (math.inf if result is None else result[1], [METHODS[name].title, *cells, decades, str(failed)])
        )
    rows.sort(key=lambda row: row[0])
    total = TRIALS * len(tasks)
    head = ["method", "setting", "one for all", "one for each", "decades", f"failed of {total} trials"]
    return [ONE, f"Over {', '.join(tasks)}:", "", table(head, [cells for _, cells in rows]), ""]


def _setting(name: str, trial: int) -> str:
    """A trial's setting in words."""
    chosen = setting(name, trial)
    parts = [f"lr {chosen.lr:.2g}", f"weight decay {chosen.weight_decay:.1g}", chosen.schedule]
    parts += [f"warm-up {chosen.warmup:.2g}"]
    parts += [] if chosen.tau_theta is None else [f"τ_θ {chosen.tau_theta:.2g}"]
    parts += [] if chosen.damping is None else [f"damping {chosen.damping:.2g}"]
    return ", ".join(parts)


def to_target(chosen: Sequence[Cell]) -> list[str]:
    """One task: what it is, and a row for each method."""
    task, first = TASKS[chosen[0].task], chosen[0].trials[0]
    accuracy = not math.isnan(chosen[0].mean("accuracy"))
    head = ["method", "lr", "steps", "seconds", "ms a step", task.score, "training loss"]
    head += ["accuracy", "test accuracy"] if accuracy else []
    head += ["MB", "failed", "method, trial"]
    rows = []
    for cell in sorted(chosen, key=lambda cell: cell.score.middle):
        row = [title(cell), rate(cell), interval(cell.steps, "{:.0f}"), interval(cell.seconds, "{:.2g}")]
        row += [f"{cell.ms:.2f} ({cell.way})" if cell.way else "–"]
        row += [interval(cell.score, "{:.3g}"), _number(cell.mean("train_loss"))]
        if accuracy:
            row += [f"{100 * cell.mean(name):.1f} %" for name in ("accuracy", "test_accuracy")]
        row += [_number(cell.megabytes), f"{cell.failures} of {len(cell.trials)}"]
        rows.append([*row, f"`{cell.method}`" + (f" {cell.chosen}" if cell.chosen is not None else "")])
    commits = dict.fromkeys(f"{run.commit:.7}" for cell in chosen for run in (*cell.trials, *cell.seeds))
    about = (
        f"{task.about}. {task.steps:,} steps; target {chosen[0].target:g}. Run on {first.device} with {first.threads} "
        f"thread, torch {first.torch}, commits {', '.join(commits)}."
    )
    figure = f"![{task.name}](../results/peers/{task.name}.png)"
    return [f"### {task.name}", "", about, "", table(head, rows), "", figure, ""]


def rate(cell: Cell) -> str:
    """The chosen learning rate, and whether it lies at an end of its range."""
    if cell.chosen is None:
        return "–"
    lr = setting(cell.method, cell.chosen).lr
    low, high = map(math.log, SPACES[cell.method].lr)
    place = (math.log(lr) - low) / (high - low)
    return f"{lr:.2g}" + ("" if END <= place <= 1 - END else " (end)")


def open_tasks(found: Cells) -> list[str]:
    """What was not run."""
    missing = [
        f"- `{name}` ({task.size}): {task.about}. `proxprop bench --task {name}`"
        for name, task in TASKS.items()
        if name not in tasks_of(found)
    ]
    return ["## Not yet run", "", "In these tasks at most AdamW has been tuned:", "", *missing, ""]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


if __name__ == "__main__":
    print(page(Store(FOLDER)), end="")
