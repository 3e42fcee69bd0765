"""Table 1: final full-batch loss over nine step sizes, τ_θ = 1; and how wide a range of them serves a method."""

import math
from collections.abc import Callable

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.verdict import Both, Verdict, decided, ours, short
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import LOSS, Seeds, arm, final
from proxprop.lab.reproduction.results import Results

CG = ("ProxProp (cg1)", "ProxProp (cg3)", "ProxProp (cg5)")
METHODS = ("BackProp", *CG, "ProxProp (exact)")
TAUS = tuple(sorted({tau for _, tau in paper.table()}, reverse=True))
UNTRAINED = math.log(10)
BY = {"published": "by the published iteration", "correct": "by correct CG"}

Losses = dict[float, Seeds]


def losses(rows: list[Row]) -> Losses:
    """τ, largest first, to the final loss; only what was run."""
    found = {tau: final(arm(rows, tau=tau), LOSS) for tau in TAUS}
    return {tau: loss for tau, loss in found.items() if loss.count}


def grade(method: str, tau: float, ours: Seeds) -> str:
    """One cell of the table."""
    return grades.loss(paper.table()[method, tau], ours, paper.rounding()[method, tau])


def span(ours: Losses, limit: float) -> float | None:
    """Orders of magnitude of τ, on the grid, around the best one at which the mean final loss is at most `limit`.

    >>> span({10.0: Seeds((3.0,)), 1.0: Seeds((1.0,)), 0.1: Seeds((1.5,)), 0.01: Seeds((9.0,))}, 2.0)
    1.0
    """
    taus = sorted(ours)
    if not taus or best(ours) > limit:
        return None
    low = high = taus.index(min(taus, key=lambda tau: ours[tau].mean))
    while low and ours[taus[low - 1]].mean <= limit:
        low -= 1
    while high + 1 < len(taus) and ours[taus[high + 1]].mean <= limit:
        high += 1
    return math.log10(taus[high] / taus[low])


def best(ours: Losses) -> float:
    """The lowest mean final loss; infinite where there is none."""
    return min((loss.mean for loss in ours.values()), default=math.inf)


def theirs(method: str) -> Losses:
    """The paper's row in the same form."""
    cells = {tau: paper.table().get((method, tau)) for tau in TAUS}
    return {
        tau: Seeds((loss,)) if math.isfinite(loss) else Seeds((), 1)
        for tau, loss in cells.items()
        if loss is not None
    }


Rows = dict[tuple[str, str | None], Losses]


def rows_of(results: Results) -> Rows:
    """(method, iteration) to its losses, in the order of the table, ours only."""
    found: Rows = {}
    for method in METHODS:
        mine = ours(results.table1, method).map(losses)
        if mine.published is not None:
            found[method, "published"] = mine.published
        found[method, "correct" if mine.published is not None else None] = mine.correct
    return {key: value for key, value in found.items() if value}


def claims(results: Results) -> list[Verdict]:
    """Cells counted by method, stability, and what a wrong step size costs."""
    found = rows_of(results)
    return [
        *(_cells(method, found) for method in METHODS[:-1]),
        _stable(found),
        _deviating(found),
        _wide(found),
    ]


def _cells(method: str, found: Rows) -> Verdict:
    marks = {by: [grade(method, *cell) for cell in found.get((method, by), {}).items()] for by in (None, *BY)}
    told = {by: _counted(known) for by, known in marks.items()}
    nearest = max(marks, key=lambda by: marks[by].count(grades.YES))
    reproduced = f"{marks[nearest].count(grades.YES)} of {len(TAUS)} {BY.get(nearest or '', '')}".strip()
    return Verdict(
        f"{method}: the nine cells",
        f"{len(TAUS)} numbers",
        told["published"],
        told["correct"] or told[None] or words.NOTHING,
        reproduced if any(marks.values()) else grades.NOT_RUN,
        "cell by cell below",
    )


def _counted(marks: list[str]) -> str:
    return ", ".join(
        f"{marks.count(mark)} {mark}" for mark in (grades.YES, grades.ROUGHLY, grades.NO) if marks
    )


def _stable(found: Rows) -> Verdict:
    """The caption: implicit steps remain stable for a significantly wider range of step sizes."""

    def judge(backprop: Losses, implicit: dict[str, Losses]) -> tuple[str, str]:
        counts = {method: sum(not loss.lost for loss in row.values()) for method, row in implicit.items()}
        base = sum(not loss.lost for loss in backprop.values())
        told = [f"BackProp {base}", *(f"{short(method)} {count}" for method, count in counts.items())]
        return grades.holds(*(count > base for count in counts.values())), ", ".join(told)

    return _judged("step sizes of nine at which no seed diverges", found, judge)


def _deviating(found: Rows) -> Verdict:
    """The text: an order of magnitude off, BackProp diverges and cg3 and cg5 give reasonable results."""

    def judge(backprop: Losses, implicit: dict[str, Losses]) -> tuple[str, str]:
        off = {method: _off(implicit[method]) for method in CG[1:]}
        base = _off(backprop)
        told = [f"{short(method)} {_listed(row)}" for method, row in ({"BackProp": base} | off).items()]
        useful = [loss.mean < UNTRAINED for row in off.values() for loss in row.values()]
        return grades.holds(any(loss.lost for loss in base.values()), *useful), "; ".join(told)

    claim = (
        "ten times more or less than the best τ: BackProp diverges, cg3 and cg5 end below the untrained loss"
    )
    return _judged(claim, found, judge)


def _off(row: Losses) -> Losses:
    tau = min(row, key=lambda tau: row[tau].mean)
    return {other: loss for other, loss in row.items() if math.isclose(abs(math.log10(other / tau)), 1.0)}


def _listed(row: Losses) -> str:
    cells = [
        f"{'diverged' if loss.lost else words.number(loss.mean)} at {tau:g}" for tau, loss in row.items()
    ]
    return ", ".join(cells)


def _wide(found: Rows) -> Verdict:
    """Robustness as one number: orders of magnitude of τ at which a method ends no higher than BackProp's best."""

    def judge(backprop: Losses, implicit: dict[str, Losses]) -> tuple[str, str]:
        spans = {method: span(row, best(backprop)) for method, row in implicit.items()}
        told = [f"{short(method)} {words.number(value, 2)}" for method, value in spans.items()]
        return grades.holds(*((spans[method] or 0.0) > 0.0 for method in CG[1:])), ", ".join(told)

    claim = (
        "orders of magnitude of τ at which cg3 and cg5 end no higher than BackProp at its best τ: more than 0"
    )
    return _judged(claim, found, judge)


def _judged(
    claim: str, found: Rows, judge: Callable[[Losses, dict[str, Losses]], tuple[str, str]]
) -> Verdict:
    """Judge BackProp's row against the CG rows: the paper's, and ours with either iteration."""

    def whole(iteration: str) -> tuple[str, str]:
        backprop = found.get(("BackProp", None), {})
        implicit = {method: found.get((method, iteration), {}) for method in CG}
        return (
            judge(backprop, implicit)
            if backprop and all(implicit.values())
            else (grades.NOT_RUN, words.NOTHING)
        )

    said = judge(theirs("BackProp"), {method: theirs(method) for method in CG})[1]
    judged = Both(whole("published"), whole("correct"))
    return decided(claim, said, judged.map(lambda one: one[1]), judged.map(lambda one: one[0]))
