"""Figure 2: the ConvNet with Adam, τ = 0.001, τ_θ = 1; as released (two poolings) and as in the text (three)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.fig1 import ITERATIONS, Mine
from proxprop.lab.reproduction.claims.verdict import (
    Both,
    Verdict,
    about_accuracy,
    about_distance,
    about_loss,
    about_time,
    decided,
    ours,
    relative,
    theirs,
)
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import (
    LOSS,
    TEST,
    VALIDATION,
    Seeds,
    arm,
    at,
    best,
    distance,
    final,
    pace,
)
from proxprop.lab.reproduction.results import Results

ARCHITECTURES = {"convnet-2pool": "two poolings", "convnet": "three poolings"}
TEXT = ARCHITECTURES["convnet"]
CG = ("ProxProp (cg3)", "ProxProp (cg10)")
METHODS = ("BackProp", *CG)
EPOCHS = (10, 50)


def claims(results: Results) -> list[Verdict]:
    """The four panels for both architectures, the text's accuracies, and which architecture it was."""
    found = [claim for model in ARCHITECTURES for claim in _architecture(model, results)]
    return [*found, *_which(results)]


def _architecture(model: str, results: Results) -> list[Verdict]:
    mine = {method: ours(results.fig2, method, model=model) for method in METHODS}
    before, seeds = f"{ARCHITECTURES[model]}, ", results.seeds
    return [
        *(claim for method in METHODS for claim in _losses(before + method, method, mine[method], seeds)),
        _faster(before, mine),
        *(_time(before + method, method, mine, seeds) for method in CG),
        *(claim for method in METHODS for claim in _accuracies(before + method, method, mine[method], seeds)),
        *_higher(before, mine, seeds),
        _exact(before, arm(results.fig2, solver="exact", model=model), seeds),
    ]


def _losses(title: str, method: str, mine: Both[list[Row]], seeds: int) -> list[Verdict]:
    curve = theirs("fig2", method)
    single = [
        about_loss(
            f"{title}: loss after {epoch} epochs",
            curve[1][epoch],
            mine.map(partial(at, column=LOSS, epoch=epoch)),
            seeds,
        )
        for epoch in EPOCHS
    ]
    apart = mine.map(lambda rows: distance(rows, LOSS, curve))
    return [*single, about_distance(f"{title}: whole loss curve, mean \\|ln ratio\\|", apart)]


def _faster(before: str, mine: Mine) -> Verdict:
    """The text: a significantly faster decrease of the loss in epochs."""
    order = tuple(reversed(METHODS))
    losses = ITERATIONS.map(lambda by: [[at(mine[m].by(by), LOSS, e) for m in order] for e in EPOCHS])
    said = [" / ".join(words.number(theirs("fig2", m)[1][e]) for m in order) for e in EPOCHS]
    return decided(
        f"{before}loss after 10 and after 50 epochs rises in the order cg10 / cg3 / BackProp",
        "; ".join(said),
        losses.map(lambda found: "; ".join(" / ".join(words.number(o.mean) for o in row) for row in found)),
        losses.map(
            lambda found: grades.holds(*(grades.below(a, b) for row in found for a, b in pairwise(row)))
        ),
    )


def _time(title: str, method: str, mine: Mine, seeds: int) -> Verdict:
    base = pace(mine["BackProp"].correct)
    said = paper.pace("fig2", method) / paper.pace("fig2", "BackProp")
    measured = mine[method].map(lambda rows: relative(pace(rows), base))
    return about_time(f"{title}: time per epoch, relative to BackProp's", said, measured, seeds)


def _accuracies(title: str, method: str, mine: Both[list[Row]], seeds: int) -> list[Verdict]:
    peak = max(theirs("fig2", method, "validation_accuracy")[1])
    said = paper.TEST_ACCURACY["fig2", method.partition(" ")[0]]
    highest, last = mine.map(lambda rows: best(rows, VALIDATION)), mine.map(lambda rows: final(rows, TEST))
    return [
        about_accuracy(f"{title}: best validation accuracy within 50 epochs", peak, highest, seeds),
        about_accuracy(f"{title}: test accuracy after 50 epochs", said, last, seeds),
    ]


def _higher(before: str, mine: Mine, seeds: int) -> list[Verdict]:
    """The text: 72.9 % against 71.7 % on the validation set, 70.7 % against 69.6 % on the test set."""
    longer = theirs("fig2", "BackProp", "validation_accuracy", "seconds")
    why = f"the paper's BackProp reaches {100 * max(longer[1]):.1f} % within the {len(longer[0]) - 1} epochs over time"
    which = "the paper does not say with how many iterations; ours is the better of cg3 and cg10"
    tests = {family: paper.TEST_ACCURACY["fig2", family] for family in ("BackProp", "ProxProp")}
    peaks = paper.BEST_VALIDATION
    return [
        _better(f"{before}best validation accuracy", peaks, lambda r: best(r, VALIDATION), mine, seeds, why),
        _better(f"{before}test accuracy", tests, lambda r: final(r, TEST), mine, seeds, which),
    ]


def _better(
    what: str, said: dict[str, float], measure: Callable[[list[Row]], Seeds], mine: Mine, seeds: int, why: str
) -> Verdict:
    base = measure(mine["BackProp"].correct)
    found = ITERATIONS.map(lambda by: max((measure(mine[m].by(by)) for m in CG), key=_or_least))
    return decided(
        f"{what}: ProxProp's is higher than BackProp's",
        f"{100 * said['ProxProp']:.1f} % against {100 * said['BackProp']:.1f} %",
        found.map(lambda one: f"{words.percent(one, seeds)} against {words.percent(base, seeds)}"),
        found.map(lambda one: grades.holds(grades.below(base, one))),
        why,
    )


def _or_least(one: Seeds) -> float:
    return one.mean if one.values else -math.inf


def _exact(before: str, rows: list[Row], seeds: int) -> Verdict:
    """The row the paper leaves out."""
    told = [f"loss {words.loss(at(rows, LOSS, epoch), seeds)} after {epoch} epochs" for epoch in EPOCHS]
    told.append(f"best validation {words.percent(best(rows, VALIDATION), seeds)}")
    told.append(f"test {words.percent(final(rows, TEST), seeds)}")
    claim = f"{before}ProxProp (exact), which the paper leaves out"
    return Verdict(claim, words.NOTHING, "", "; ".join(told), "not claimed" if rows else grades.NOT_RUN)


def apart(results: Results, methods: Sequence[str], iteration: str) -> dict[str, float]:
    """Architecture to the mean distance of some methods' loss curves from the paper's, with one iteration."""
    return {
        model: fmean(
            distance(ours(results.fig2, m, model=model).by(iteration), LOSS, theirs("fig2", m))
            for m in methods
        )
        for model in ARCHITECTURES
    }


def nearer(distances: dict[str, float]) -> str | None:
    """The architecture that is nearer to the paper's curves; None while either was not run."""
    known = all(math.isfinite(value) for value in distances.values())
    return ARCHITECTURES[min(distances, key=lambda model: distances[model])] if known else None


def _which(results: Results) -> list[Verdict]:
    """Which architecture drew the paper's curves: by BackProp's alone, which no iteration blurs, and by all three."""
    alone = apart(results, METHODS[:1], "correct")
    every = ITERATIONS.map(lambda by: apart(results, METHODS, by))
    claim = "the architecture has three poolings: distance from the paper's loss curve"
    return [
        Verdict(f"{claim} of BackProp", TEXT, "", _listed(alone), _right(alone), _named(alone)),
        decided(f"{claim}s, mean of all three methods", TEXT, every.map(_listed), every.map(_right)),
    ]


def _right(distances: dict[str, float]) -> str:
    found = nearer(distances)
    return grades.holds(None if found is None else found == TEXT)


def _named(distances: dict[str, float]) -> str:
    found = nearer(distances)
    return f"the network with {found} is nearer" if found else ""


def _listed(distances: dict[str, float]) -> str:
    return ", ".join(f"{ARCHITECTURES[model]} {words.number(value, 2)}" for model, value in distances.items())
