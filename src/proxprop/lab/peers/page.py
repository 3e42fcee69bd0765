"""docs/peers.md, written from the records alone: `python -m proxprop.lab.peers.page > docs/peers.md`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxprop.lab.peers import analysis, questions
from proxprop.lab.peers.analysis import Cell, Cells, Spread, tasks_of
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import REFERENCE, SEEDS, TRIALS
from proxprop.lab.peers.record import command
from proxprop.lab.peers.spaces import SPACES, setting
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.reproduction.markdown import table

FOLDER = Path("results/peers")
END = 1 / 8  # of the logarithm of a range of learning rates
BASES = ("sgd", "adamw", "muon")
FIGURES = {
    "all": "All tasks: profiles, last scores, one setting",
    "costs": "All tasks: steps, seconds, memory",
}
DIRECTIONS = {"exact": "`Exact()`", "cg3": "`CG(3)`", "running": "a running S"}

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
widened, the losses of the differential
equations were scaled to begin near one, and the image is scored on all its pixels. After AdamW's first recorded
runs the target became the median of its seeds instead of the worst, and the autoencoder got Glorot's weights,
because AdamW stayed on a plateau; its first 13 runs there were replaced. Shampoo's first 65 runs were replaced too:
its package sums momentum unless told to average it, so that its steps were ten times as long as its range of rates
is made for, and its best rate was the smallest in most tasks. The rule by which ProxProp wins or loses
was made stricter after results were seen: the best peer was first chosen by its trials too, which had counted
digits as won.
"""

SMALL = """\
The tasks below are sized for one CPU core: networks of some ten thousand weights and at most 1,000 steps. What they say
need not hold for large networks. Tasks for a GPU are listed at the end. They have not been run.
"""

VERDICTS = """\
A cell is the median last score over fresh seeds, lower is better, and in brackets that score divided by the target.
The best peer is the one whose fresh seeds ended lowest, the best ProxProp the one whose trials did, so that chance is
on the peers' side. ProxProp *wins* or *loses* if the 95 % bootstrap intervals of the two medians do not overlap. The
last columns name the methods that reach the target first.
"""

WRAPPED = """ So it is the
choice where time counts; where steps count, `CG(3)` is. There are reasons to leave S out for PINNs, and to compare with
Muon alone first. On a GPU, where `CG(3)` can cost less than a running S, the two have not been compared in any task."""

LIFTS = """## What S brings to an optimizer you already use

The last score with S, divided by that of the same optimizer without it, both tuned: below 1 S helps. An arrow marks
intervals that do not overlap: ↑ where S is better, ↓ where it is worse.
"""

ONE = f"""## One setting for all tasks

Trial k of a method is the same setting in every task. The table shows the trial with the lowest geometric mean over
tasks of score divided by target, that mean, and the mean with a setting for each task. A method that fails in some task
with every setting has none. "Decades" is the width of the range of learning rates that end within 5 % (in brackets:
within a factor of 2) of the method's best trial, mean over tasks. It is estimated as the part of the trials that do,
times the decades searched. {TRIALS} trials vary everything at once, so it is coarse.
"""

TO_TARGET = f"""## To the target, task by task

Steps and seconds to the target are medians over seeds with the 95 % interval of their bootstrap, ∞ where the target was
not reached. Seconds are steps times the time of a step, which is measured apart from training, with all methods in
turns and nothing else running (`proxprop bench time`). Memory is the most that a method holds, weights included and
data excluded. "Failed" counts trials. A learning rate is marked as an end if it lies in the outermost eighth of its
range, so that a better one may lie beyond. Every row is run again by its command, with seeds 1 to {SEEDS}.
"""

UNTIMED = "Steps were not timed yet, so there are no seconds.\n"


def page(store: Store) -> str:
    """The whole page."""
    found = analysis.cells(store.all(TASKS), store.targets(), store.times())
    if not tasks_of(found):
        return "\n".join([HEAD, PROTOCOL, "Nothing has been run yet.", "", *open_tasks(found)])
    parts = [HEAD, *answer(found), *lifts(found), *one(found)]
    parts += [f"![{words}](../results/peers/{name}.png)\n" for name, words in FIGURES.items()]
    parts += [TO_TARGET, timed(store.times())]
    for task in tasks_of(found):
        parts += to_target([found[task, name] for name in METHODS if (task, name) in found])
    parts += questions.section(store.folder.parent / "questions")
    return "\n".join([*parts, DECIDED, *open_tasks(found)])


def timed(times: Sequence[Mapping[str, str]]) -> str:
    """How busy the machine was when steps were timed."""
    if not times:
        return UNTIMED
    busiest = max(float(row["load"]) for row in times)
    return (
        f"While steps were timed, the machine's load was at most {busiest:g} with the timed process itself.\n"
    )


def answer(found: Cells) -> list[str]:
    """The first screen: counts, and a row for each task."""
    rows, outcomes = [], []
    for task in tasks_of(found):
        peers = [c for (name, m), c in found.items() if name == task and not METHODS[m].ours]
        ours = [c for (name, m), c in found.items() if name == task and METHODS[m].ours]
        peer = min(peers, key=lambda cell: cell.score.middle)
        mine = min(ours, key=lambda cell: cell.searched)
        outcomes.append(analysis.verdict(mine.score, peer.score))
        reference = found[task, REFERENCE]
        rows.append(
            [
                task,
                shown(reference),
                f"{title(peer)} {shown(peer)}",
                f"{title(mine)} {shown(mine)}",
                outcomes[-1],
                fewest([*peers, *ours], "steps", "{:.0f}"),
                fewest([*peers, *ours], "seconds", "{:.2g}"),
            ]
        )
    count = {word: outcomes.count(word) for word in ("wins", "ties", "loses")}
    said = (
        f"**Against the best peer of each task, the best ProxProp wins {count['wins']}, ties {count['ties']} and loses "
        f"{count['loses']} of {len(rows)} small tasks.**"
    )
    head = ["task", "AdamW", "best peer", "best ProxProp", "ProxProp", "fewest steps", "fewest seconds"]
    return [
        said,
        "",
        PROTOCOL,
        SMALL,
        table(head, rows),
        "",
        VERDICTS,
        *lacking(found),
        *bases(found),
        *wrapped(found),
    ]


def lacking(found: Cells) -> list[str]:
    """Methods that were not run in a task that is compared."""
    missing = {
        task: [METHODS[name].title for name in METHODS if (task, name) not in found]
        for task in tasks_of(found)
    }
    parts = [f"{task} ({', '.join(names)})" for task, names in missing.items() if names]
    return [f"Methods that are still missing: {'; '.join(parts)}.", ""] if parts else []


def fewest(group: Sequence[Cell], what: str, form: str) -> str:
    """The method that reaches the target in the fewest steps or seconds."""
    costs = [(getattr(cell, what).middle, cell) for cell in group]
    reached = [(cost, title(cell)) for cost, cell in costs if math.isfinite(cost)]
    cost, name = min(reached, default=(math.nan, ""))
    return f"{name} {form.format(cost)}" if reached else "–"


def bases(found: Cells) -> list[str]:
    """For each optimizer, in how many tasks S helps and harms it."""
    lines = []
    for base in BASES:
        parts = []
        for name in (name for name, method in METHODS.items() if method.ours and name.endswith(f"+{base}")):
            pairs = [(found.get((t, name)), found.get((t, base))) for t in tasks_of(found)]
            words = [analysis.verdict(fed.score, alone.score) for fed, alone in pairs if fed and alone]
            if words:
                better, worse = words.count("wins"), words.count("loses")
                parts.append(f"{DIRECTIONS[name.partition('+')[0]]} {better} better, {worse} worse")
        if parts:
            lines.append(f"- You use **{METHODS[base].title}**: {'; '.join(parts)}.")
    total = len(tasks_of(found))
    said = (
        f"In how many of {total} tasks S makes an optimizer's last score better or worse; the rest are ties:"
    )
    return [said, "", *lines, ""]


def wrapped(found: Cells) -> list[str]:
    """How the running S of `proxprop.wrap` compares with `CG(3)` under the same optimizer, in score and in time."""
    parts, times = [], []
    for base in BASES:
        pairs = [(found.get((t, f"running+{base}")), found.get((t, f"cg3+{base}"))) for t in tasks_of(found)]
        both = [(ours, cg) for ours, cg in pairs if ours and cg]
        times += [ours.ms / cg.ms for ours, cg in both if math.isfinite(ours.ms / cg.ms)]
        outcomes: dict[str, list[str]] = {"wins": [], "ties": [], "loses": []}
        for ours, cg in both:
            outcomes[analysis.verdict(ours.score, cg.score)].append(ours.task)
        if both:
            better, worse = (", ".join(outcomes[word]) or "no task" for word in ("wins", "loses"))
            parts.append(f"under {METHODS[base].title} better in {better} and worse in {worse}")
    if not parts:
        return []
    said = f"`proxprop.wrap` takes a running S. Beside `CG(3)` it ended {'; '.join(parts)}."
    cost = f" Its step took {min(times):.2f} to {max(times):.2f} times as long as `CG(3)`'s." if times else ""
    return [said + cost + WRAPPED, ""]


def lifts(found: Cells) -> list[str]:
    """Each way to feed an optimizer, against the optimizer alone."""
    tasks = tasks_of(found)
    rows = []
    for name, method in METHODS.items():
        if method.ours:
            base = name.partition("+")[2]
            rows.append([method.title, *(_lift(found.get((t, name)), found.get((t, base))) for t in tasks)])
    return [LIFTS, table(["direction", *tasks], rows), ""]


def _lift(fed: Cell | None, alone: Cell | None) -> str:
    if fed is None or alone is None:
        return ""
    if not math.isfinite(fed.score.middle):
        return "fails"
    if not math.isfinite(alone.score.middle):
        return "fails alone ↑"
    mark = {"wins": " ↑", "loses": " ↓", "ties": ""}[analysis.verdict(fed.score, alone.score)]
    return f"{fed.score.middle / alone.score.middle:.2f}{mark}"


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
    head += ["MB", "failed", "command"]
    rows = []
    for cell in sorted(chosen, key=lambda cell: cell.score.middle):
        row = [title(cell), rate(cell), interval(cell.steps, "{:.0f}"), interval(cell.seconds, "{:.2g}")]
        row += [f"{cell.ms:.2f} ({cell.way})" if cell.way else "–"]
        row += [interval(cell.score, "{:.3g}"), _number(cell.mean("train_loss"))]
        if accuracy:
            row += [f"{100 * cell.mean(name):.1f} %" for name in ("accuracy", "test_accuracy")]
        row += [_number(cell.megabytes), f"{cell.failures} of {len(cell.trials)}"]
        again = command(cell.task, cell.method, cell.chosen, 1) if cell.chosen is not None else "–"
        rows.append([*row, f"`{again}`"])
    about = (
        f"{task.about}. {task.steps:,} steps; target {chosen[0].target:g}. Run on {first.device} with {first.threads} "
        f"thread, torch {first.torch}, commit {first.commit:.7}."
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


def title(cell: Cell) -> str:
    """A method's title."""
    return METHODS[cell.method].title


def shown(cell: Cell) -> str:
    """A score, and its ratio to the target."""
    middle = cell.score.middle
    return f"{middle:.3g} ({middle / cell.target:.2f})" if math.isfinite(middle) else "failed"


def interval(spread: Spread, form: str) -> str:
    """A median and its interval."""
    cells = [
        "∞" if math.isinf(v) else "–" if math.isnan(v) else form.format(v)
        for v in (spread.middle, spread.low, spread.high)
    ]
    return cells[0] if len(set(cells)) == 1 else f"{cells[0]} ({cells[1]}–{cells[2]})"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


if __name__ == "__main__":
    print(page(Store(FOLDER)), end="")
