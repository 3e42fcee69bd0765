"""The first screen of docs/peers.md: who wins, and what S does for the optimizer you use. From the records alone."""

import math
from collections import Counter
from collections.abc import Sequence

from proxprop.lab.peers import analysis
from proxprop.lab.peers.analysis import Cell, Cells, Spread, tasks_of
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.protocol import REFERENCE
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.reproduction.markdown import table

BASES = ("sgd", "adamw", "muon", "soap")
DIRECTIONS = {"exact": "`Exact()`", "cg3": "`CG(3)`", "running": "a running S"}

ADVICE = """\
So ProxProp is a direction for the optimizer you have, not one to switch to. In how many of the {total} tasks S made an
optimizer's last score better or worse, both tuned (the rest are ties), and the direction that did best in these very
tasks:
"""

SMALL = """\
All tasks are sized for one CPU core: networks of some ten thousand weights and at most 1,000 steps. What they say need
not hold for large networks. Tasks for a GPU are listed at the end. They have not been run.
"""

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
So a running S is the choice where time counts; where steps count, `CG(3)` is. There are reasons to leave S out for
PINNs, and to compare with the optimizer alone first if it is Muon or SOAP. On a GPU, where `CG(3)` can cost less than a
running S, the two have not been compared in any task.
"""

LATER = """## S under SOAP, added later

No direction had been tried under SOAP, the best peer. These were added for that reason, after all other results had
been seen, so the verdict, its table and the methods named there leave them out. All else is as for the others: SOAP's
own ranges, those of τ_θ and damping that the other directions have, all written down before the first of these runs,
the same trials, seeds and targets. A cell is the median last score over fresh seeds with its interval; ↑ and ↓ mark
where S is better and worse than SOAP alone.
"""


def answer(found: Cells) -> list[str]:
    """The first screen: who wins, and what that means for the optimizer you use."""
    results = [outcome(found, task) for task in tasks_of(found)]
    said = f"**Against the best peer of each task, the best ProxProp {counted(results)} small tasks.**"
    return [said, "", *advice(found), SMALL]


def verdicts(found: Cells) -> list[str]:
    """A row for each task: the best peer against the best ProxProp, of the methods that were there from the start."""
    rows = []
    for task in tasks_of(found):
        peer, mine = rivals(found, task)
        everyone = fixed(found, task)
        rows.append(
            [
                task,
                shown(found[task, REFERENCE]),
                f"{title(peer)} {shown(peer)}",
                f"{title(mine)} {shown(mine)}",
                analysis.verdict(mine.score, peer.score),
                fewest(everyone, "steps", "{:.0f}"),
                fewest(everyone, "seconds", "{:.2g}"),
            ]
        )
    head = ["task", "AdamW", "best peer", "best ProxProp", "ProxProp", "fewest steps", "fewest seconds"]
    return ["## Task by task", "", table(head, rows), "", VERDICTS, *lacking(found)]


def fixed(found: Cells, task: str) -> list[Cell]:
    """A task's methods that were there before the recorded results were seen."""
    return [cell for (name, method), cell in found.items() if name == task and not METHODS[method].later]


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
    tasks = tasks_of(found)
    lines = [free(found), *(line for base in BASES if (line := under(found, base))), pinn(found)]
    return [ADVICE.format(total=len(tasks)), *(line for line in lines if line), ""]


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
    counts: dict[str, tuple[int, int]] = {}
    for name in (name for name, method in METHODS.items() if method.ours and name.endswith(f"+{base}")):
        words = [word for word in against(found, name).values() if word]
        if words:
            counts[DIRECTIONS[name.partition("+")[0]]] = words.count("wins"), words.count("loses")
    if not counts:
        return ""
    parts = [f"{name} {better} better, {worse} worse" for name, (better, worse) in counts.items()]
    best = max(counts, key=lambda name: (counts[name][0] - counts[name][1], -counts[name][1]))
    so = f"Try {best}" if counts[best][0] > counts[best][1] else "Stay without S"
    return f"- You use **{METHODS[base].title}**: {'; '.join(parts)}. {so}."


def against(found: Cells, name: str) -> dict[str, str]:
    """By task, whether an optimizer with S wins against the same without; only where both were run."""
    base = name.partition("+")[2]
    return {
        task: analysis.verdict(found[task, name].score, found[task, base].score)
        for task in tasks_of(found)
        if (task, name) in found and (task, base) in found
    }


def pinn(found: Cells) -> str:
    """What S does where the loss holds derivatives of the network."""
    tasks = [task for task in tasks_of(found) if TASKS[task].derivatives]
    ours = [name for name, method in METHODS.items() if method.ours]
    words = [(word, name) for name in ours for task, word in against(found, name).items() if task in tasks]
    if not words:
        return ""
    parts = []
    for word, said in (("wins", "better"), ("loses", "worse")):
        bases = [METHODS[name.partition("+")[2]].title for which, name in words if which == word]
        parts.append(
            f"{len(bases)} {said}" + (f" (under {'; '.join(dict.fromkeys(bases))})" if bases else "")
        )
    counts = Counter(word for word, _ in words)
    so = "Leave S out" if counts["loses"] >= counts["wins"] else "Compare"
    return (
        f"- Your loss holds **derivatives of the network** (a PINN: {' and '.join(tasks)}): of {len(words)} pairs of "
        f"an optimizer with S and without, {', '.join(parts)}. {so}."
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
    tasks = tasks_of(found)
    rows = []
    for name, method in METHODS.items():
        if method.ours and any((task, name) in found for task in tasks):
            base = name.partition("+")[2]
            rows.append([method.title, *(_lift(found.get((t, name)), found.get((t, base))) for t in tasks)])
    return [LIFTS, table(["direction", *tasks], rows), "", *wrapped(found)]


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
    return [said + cost, WRAPPED]


def later(found: Cells) -> list[str]:
    """What the methods that were added later do to their optimizer, and what they would do to the verdict."""
    names = [name for name, method in METHODS.items() if method.later]
    rows, results = [], []
    tasks = [t for t in tasks_of(found) if (t, "soap") in found and any((t, name) in found for name in names)]
    for task in tasks:
        alone = found[task, "soap"]
        added = [found.get((task, name)) for name in names]
        best = min((cell for cell in added if cell), key=lambda cell: cell.searched)
        results.append(analysis.verdict(best.score, alone.score))
        cells = [
            f"{interval(cell.score, '{:.3g}')}{_arrow(cell.score, alone.score)}" if cell else ""
            for cell in added
        ]
        choice = f"{title(best)} {results[-1]}"
        rows.append([task, interval(alone.score, "{:.3g}"), *cells, choice, outcome(found, task, later=True)])
    if not rows:
        return []
    head = ["task", "SOAP", *(METHODS[name].title for name in names), "best of these, by its trials"]
    head += ["ProxProp, counting these"]
    said = (
        f"Against SOAP alone the best of these {counted(results)} tasks. It was chosen from {len(names)} times as many "
        "trials as SOAP had, which is in its favour. If these methods counted, the verdict would say that the best "
        f"ProxProp {counted([row[-1] for row in rows])}."
    )
    return [LATER, table(head, rows), "", said, ""]


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
