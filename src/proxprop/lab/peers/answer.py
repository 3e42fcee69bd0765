"""The first screen of docs/peers.md: who wins, and what S does for the optimizer you use. From the records alone."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from proxprop.lab.peers import analysis
from proxprop.lab.peers.analysis import Cell, Cells, Spread, tasks_of
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import REFERENCE
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.reproduction.markdown import table

BASES = ("sgd", "adamw", "muon", "soap")
DIRECTIONS = {"exact": "`Exact()`", "cg3": "`CG(3)`", "running": "a running S", "root": "a running √S"}

HELD_OUT = """\
The other tasks were held out: they were written down after all methods and ranges were fixed, with AdamW's runs alone,
so that none was chosen by them. Only what `wrap` takes was, afterwards. `√S` is `Running(power=0.5)`."""

ADVICE = """\
In how many tasks S made an optimizer's last score better or worse, both tuned (the rest are ties), in brackets in those
that were held out, and the direction that did best in all of them:
"""

SMALL = """\
All tasks are sized for one CPU core: networks of some ten thousand weights and at most 1,000 steps. What they say need
not hold for large networks. Tasks for a GPU are listed at the end. They have not been run.
"""

FIRST, HELD = "## Task by task", "## Tasks that were held out"

VERDICTS = """\
A cell is the median last score over fresh seeds, lower is better, and in brackets that score divided by the target.
The best peer is the one whose fresh seeds ended lowest, the best ProxProp the one whose trials did, so that chance is
on the peers' side. ProxProp *wins* or *loses* if the 95 % bootstrap intervals of the two medians do not overlap. The
last columns name the methods that reach the target first.
"""

LIFTS = """## What S brings to an optimizer you already use

The last score with S, divided by that of the same optimizer without it, both tuned: below 1 S helps. An arrow marks
intervals that do not overlap: ↑ where S is better, ↓ where it is worse.
"""

WRAPPED = """\
`wrap` makes the root anew in one step of 40 instead of 10, because it takes about four inverses: *Which learning rate
carries over* compares that at learning rates that were tuned without S. On a GPU no task has been run with a root, nor
has a root been timed.
"""

LATER = """## What was added later

Two things came after results of all other methods had been seen in the first seven tasks, so the verdict there leaves
them out. S under SOAP was tried because SOAP was the best peer; its ranges, trials, seeds and targets were written down
before its first run. √S was found by runs without a record in these very seven tasks, among other variants (the fourth
root, mixtures with the gradient, Adam in the eigenbasis of S). What it brings here is therefore flattered, and that is
why other tasks were held out. The table has the best ProxProp of each task as it was, and counting what was added.
"""


def answer(found: Cells) -> list[str]:
    """The first screen: who wins, and what that means for the optimizer you use."""
    first, held = parted(tasks_of(found))
    results = [outcome(found, task) for task in first]
    said = f"**Against the best peer of each task, the best ProxProp {counted(results)} small tasks.**"
    if held:
        added = [outcome(found, task, later=True) for task in first]
        fresh = [outcome(found, task) for task in held]
        said += (
            f" With what was added after these results were seen it {counted(added)}. **In tasks that were held out "
            f"it {counted(fresh)}.**\n\n{HELD_OUT}"
        )
    return [said, "", *advice(found), SMALL]


def parted(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """The tasks that methods were developed on, and those that were held out."""
    first = [task for task in tasks if not TASKS[task].held_out]
    return first, [task for task in tasks if TASKS[task].held_out]


def verdicts(found: Cells) -> list[str]:
    """A row for each task: the best peer against the best ProxProp."""
    head = ["task", "AdamW", "best peer", "best ProxProp", "ProxProp", "fewest steps", "fewest seconds"]
    first, held = ([_verdict(found, task) for task in tasks] for tasks in parted(tasks_of(found)))
    below = [HELD, "", table(head, held), ""] if held else []
    return [FIRST, "", table(head, first), "", *below, VERDICTS, *lacking(found)]


def _verdict(found: Cells, task: str) -> list[str]:
    peer, mine = rivals(found, task)
    everyone = fixed(found, task)
    return [
        task,
        shown(found[task, REFERENCE]),
        f"{title(peer)} {shown(peer)}",
        f"{title(mine)} {shown(mine)}",
        analysis.verdict(mine.score, peer.score),
        fewest(everyone, "steps", "{:.0f}"),
        fewest(everyone, "seconds", "{:.2g}"),
    ]


def fixed(found: Cells, task: str) -> list[Cell]:
    """A task's methods that were there before its recorded results were seen."""
    all_of = TASKS[task].held_out
    return [
        cell
        for (name, method), cell in found.items()
        if name == task and (all_of or not METHODS[method].later)
    ]


def rivals(found: Cells, task: str, later: bool = False) -> tuple[Cell, Cell]:
    """The best peer of a task by its seeds, and the best ProxProp by its trials.

    Args:
        later: whether methods count that were added later.
    """
    known = [cell for (name, _), cell in found.items() if name == task] if later else fixed(found, task)
    peers = [cell for cell in known if not METHODS[cell.method].ours]
    ours = [cell for cell in known if METHODS[cell.method].ours]
    return min(peers, key=lambda cell: cell.score.middle), min(ours, key=lambda cell: cell.searched)


def outcome(found: Cells, task: str, later: bool = False) -> str:
    """Whether the best ProxProp wins, ties or loses against the best peer."""
    peer, mine = rivals(found, task, later)
    return analysis.verdict(mine.score, peer.score)


def counted(results: Sequence[str]) -> str:
    """How often each came out.

    >>> counted(["wins", "loses", "loses"])
    'wins 1, ties 0 and loses 2 of 3'
    """
    wins, ties, loses = map(results.count, ("wins", "ties", "loses"))
    return f"wins {wins}, ties {ties} and loses {loses} of {len(results)}"


def advice(found: Cells) -> list[str]:
    """What follows for each optimizer."""
    lines = [free(found), *(line for base in BASES if (line := under(found, base))), pinn(found)]
    return [ADVICE, *(line for line in lines if line), ""]


def free(found: Cells) -> str:
    """Which method ended lowest most often."""
    tasks = tasks_of(found)
    lowest = Counter(title(min(fixed(found, task), key=lambda cell: cell.score.middle)) for task in tasks)
    most = max(lowest.values())
    names = [name for name, count in lowest.items() if count == most]
    alone = ", more often than any other" if len(names) == 1 else " each"
    return f"- You are **free to choose**: {' and '.join(names)} ended lowest in {most} of {len(tasks)} tasks{alone}."


def under(found: Cells, base: str) -> str:
    """In how many tasks each direction helps and harms an optimizer, and which to try."""
    names = [name for name, method in METHODS.items() if method.ours and name.endswith(f"+{base}")]
    outcomes = {DIRECTIONS[name.partition("+")[0]]: against(found, name) for name in names}
    if not any(outcomes.values()):
        return ""
    return (
        f"- You use **{METHODS[base].title}**: {_tried({k: [*v.items()] for k, v in outcomes.items() if v})}"
    )


Outcomes = list[tuple[str, str]]
"""Tasks and what came out."""


def _tried(outcomes: Mapping[str, Outcomes]) -> str:
    """How often each direction was better and worse, held-out tasks in brackets, and which to try."""
    parts, counts = [], {name: _better_and_worse(words) for name, words in outcomes.items()}
    for name, (better, worse) in counts.items():
        held = [(task, word) for task, word in outcomes[name] if TASKS[task].held_out]
        inside = " ({}, {})".format(*_better_and_worse(held)) if held else ""
        parts.append(f"{name} {better} better, {worse} worse{inside}")
    best = max(counts, key=lambda name: (counts[name][0] - counts[name][1], -counts[name][1]))
    so = f"Try {best}" if counts[best][0] > counts[best][1] else "Stay without S"
    return f"{'; '.join(parts)}. {so}."


def _better_and_worse(words: Outcomes) -> tuple[int, int]:
    """How many are better, and how many worse."""
    said = [word for _, word in words]
    return said.count("wins"), said.count("loses")


def against(found: Cells, name: str) -> dict[str, str]:
    """By task, whether an optimizer with S wins against the same without; only where both were run."""
    base = name.partition("+")[2]
    return {
        task: analysis.verdict(found[task, name].score, found[task, base].score)
        for task in tasks_of(found)
        if (task, name) in found and (task, base) in found
    }


def pinn(found: Cells) -> str:
    """What S does where the loss holds derivatives of the network, under all optimizers together."""
    tasks = [task for task in tasks_of(found) if TASKS[task].derivatives]
    outcomes: dict[str, Outcomes] = {}
    for name in (name for name, method in METHODS.items() if method.ours):
        words = [(task, word) for task, word in against(found, name).items() if task in tasks]
        outcomes.setdefault(DIRECTIONS[name.partition("+")[0]], []).extend(words)
    known = {name: words for name, words in outcomes.items() if words}
    if not known:
        return ""
    return (
        f"- Your loss holds **derivatives of the network** (a PINN: {', '.join(tasks)}), under any of these "
        f"optimizers: {_tried(known)}"
    )


def lacking(found: Cells) -> list[str]:
    """Methods that were not run in some task that is compared."""
    tasks = tasks_of(found)
    missing = {name: [task for task in tasks if (task, name) not in found] for name in METHODS}
    parts = [
        f"{METHODS[name].title} in {'all tasks' if without == tasks else ', '.join(without)}"
        for name, without in missing.items()
        if without
    ]
    return [f"Not run yet: {'; '.join(parts)}.", ""] if parts else []


def fewest(group: Sequence[Cell], what: str, form: str) -> str:
    """The method that reaches the target in the fewest steps or seconds."""
    costs = [(getattr(cell, what).middle, cell) for cell in group]
    reached = [(cost, title(cell)) for cost, cell in costs if math.isfinite(cost)]
    cost, name = min(reached, default=(math.nan, ""))
    return f"{name} {form.format(cost)}" if reached else "–"


def lifts(found: Cells) -> list[str]:
    """Each way to feed an optimizer, against the optimizer alone; and what `proxprop.wrap` takes of them."""
    return [
        LIFTS,
        *(line for tasks in parted(tasks_of(found)) for line in _lifts(found, tasks)),
        *wrapped(found),
    ]


def _lifts(found: Cells, tasks: Sequence[str]) -> list[str]:
    rows = []
    for name, method in METHODS.items():
        if method.ours and any((task, name) in found for task in tasks):
            base = name.partition("+")[2]
            rows.append([method.title, *(_lift(found.get((t, name)), found.get((t, base))) for t in tasks)])
    return [table(["direction", *tasks], rows), ""] if rows else []


def _lift(fed: Cell | None, alone: Cell | None) -> str:
    if fed is None or alone is None:
        return ""
    if not math.isfinite(fed.score.middle):
        return "fails"
    if not math.isfinite(alone.score.middle):
        return "fails alone ↑"
    return f"{fed.score.middle / alone.score.middle:.2f}{_arrow(fed.score, alone.score)}"


def _arrow(ours: Spread, theirs: Spread) -> str:
    return {"wins": "\u00a0↑", "loses": "\u00a0↓", "ties": ""}[analysis.verdict(ours, theirs)]


def wrapped(found: Cells) -> list[str]:
    """How the running √S of `proxprop.wrap` compares with S and with `CG(3)` under the same optimizer."""
    parts, times = [], []
    for other, base in product(("running", "cg3"), BASES):
        pairs = [(found.get((t, f"root+{base}")), found.get((t, f"{other}+{base}"))) for t in tasks_of(found)]
        both = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
        words = [analysis.verdict(ours.score, theirs.score) for ours, theirs in both]
        if words:
            counts = f"{words.count('wins')} better, {words.count('loses')} worse"
            parts.append(f"{DIRECTIONS[other]} under {METHODS[base].title}: {counts}")
        if other == "cg3":
            times += [ours.ms / cg.ms for ours, cg in both if math.isfinite(ours.ms / cg.ms)]
    if not parts:
        return []
    said = f"`proxprop.wrap` takes a running √S. Beside other directions it ended so: {'; '.join(parts)}."
    cost = f" Its step took {min(times):.2f} to {max(times):.2f} times as long as `CG(3)`'s." if times else ""
    return [said + cost, WRAPPED]


def later(found: Cells) -> list[str]:
    """What methods that were added later would do to the verdict."""
    known = {method for _, method in found}
    if not any(METHODS[name].later for name in known):
        return []
    rows = []
    for task in parted(tasks_of(found))[0]:
        peer, before = rivals(found, task)
        _, now = rivals(found, task, later=True)
        cells = [f"{title(c)} {interval(c.score, '{:.3g}')}" for c in (peer, before, now)]
        rows.append(
            [task, cells[0], cells[1], outcome(found, task), cells[2], outcome(found, task, later=True)]
        )
    head = ["task", "best peer", "best ProxProp before", "then", "counting what was added", "now"]
    return [LATER, table(head, rows), ""]


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
