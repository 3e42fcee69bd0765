"""Figure 1: the MLP with Nesterov momentum; BackProp with τ = 0.05 against τ_θ = 0.05, τ = 1."""

import math
from functools import partial
from itertools import pairwise

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
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
    short,
    theirs,
)
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import (
    LOSS,
    TEST,
    VALIDATION,
    Seeds,
    at,
    band,
    distance,
    final,
    pace,
    within,
)
from proxprop.lab.reproduction.results import Results

CG = ("ProxProp (cg3)", "ProxProp (cg5)", "ProxProp (cg10)")
IMPLICIT = (*CG, "ProxProp (exact)")
METHODS = ("BackProp", *IMPLICIT)
EARLY, LATE = 10, 49  # the paper's curves end after 49 epochs
ITERATIONS = Both("published", "correct")

Mine = dict[str, Both[list[Row]]]


def claims(results: Results) -> list[Verdict]:
    """The three panels, the caption's sentences and the test accuracies."""
    mine, seeds = {method: ours(results.fig1, method) for method in METHODS}, results.seeds
    return [
        *(claim for method in METHODS for claim in _losses(method, mine[method], seeds)),
        _rises(mine["ProxProp (exact)"].correct),
        _faster(mine),
        _outperforms(mine, seeds),
        *(_time(method, mine, seeds) for method in IMPLICIT),
        *(_in_the_same_time(method, mine, seeds) for method in IMPLICIT),
        *(_validation(method, mine[method], seeds) for method in METHODS),
        _generalises(mine),
        *(_test(method, mine[method], seeds) for method in METHODS),
    ]


def _losses(method: str, mine: Both[list[Row]], seeds: int) -> list[Verdict]:
    curve = theirs("fig1", method)
    single = [
        about_loss(
            f"{method}: loss after {epoch} epochs",
            curve[1][epoch],
            mine.map(partial(at, column=LOSS, epoch=epoch)),
            seeds,
        )
        for epoch in (EARLY, LATE)
    ]
    apart = mine.map(lambda rows: distance(rows, LOSS, curve))
    return [*single, about_distance(f"{method}: whole loss curve, mean \\|ln ratio\\|", apart)]


def _rises(rows: list[Row]) -> Verdict:
    """The figure: the exact solution's loss rises again before the end."""
    _, said = theirs("fig1", "ProxProp (exact)")
    epochs, _, mean, _ = band(rows, LOSS)
    found = {int(epoch): loss for epoch, loss in zip(epochs, mean, strict=True) if epoch <= LATE}
    known = found if LATE in found else {}
    return Verdict(
        f"ProxProp (exact): the loss is lowest before epoch {LATE} and then rises",
        _lowest(dict(enumerate(said))),
        "",
        _lowest(known) if known else words.NOTHING,
        grades.holds(min(known, key=lambda epoch: known[epoch]) < LATE if known else None),
    )


def _lowest(curve: dict[int, float]) -> str:
    epoch = min(curve, key=lambda epoch: curve[epoch])
    return f"{words.number(curve[epoch])} at epoch {epoch}, {words.number(curve[LATE])} at {LATE}"


def _faster(mine: Mine) -> Verdict:
    """The caption: a more precise solution leads to faster convergence."""
    order = tuple(reversed(METHODS))
    losses = ITERATIONS.map(lambda by: {m: at(mine[m].by(by), LOSS, EARLY) for m in order})
    return decided(
        f"a more precise solution converges faster: loss after {EARLY} epochs, lowest first",
        " < ".join(map(short, order)),
        losses.map(_ranked),
        losses.map(lambda found: grades.holds(*(grades.below(a, b) for a, b in pairwise(found.values())))),
    )


def _ranked(losses: dict[str, Seeds]) -> str:
    known = [method for method, loss in losses.items() if loss.count]
    return " < ".join(short(m) for m in sorted(known, key=lambda m: losses[m].mean)) or words.NOTHING


def _outperforms(mine: Mine, seeds: int) -> Verdict:
    """The caption: even three iterations outperform BackProp."""
    epochs = (EARLY, LATE)
    backprop = [at(mine["BackProp"].correct, LOSS, epoch) for epoch in epochs]
    cg3 = mine["ProxProp (cg3)"].map(lambda rows: [at(rows, LOSS, epoch) for epoch in epochs])
    curves = [theirs("fig1", method)[1] for method in ("ProxProp (cg3)", "BackProp")]
    return decided(
        f"cg3's loss is below BackProp's after {EARLY} and after {LATE} epochs",
        "; ".join(f"{words.number(curves[0][e])} against {words.number(curves[1][e])}" for e in epochs),
        cg3.map(
            lambda found: "; ".join(
                f"{words.loss(a, seeds)} against {words.loss(b, seeds)}"
                for a, b in zip(found, backprop, strict=True)
            )
        ),
        cg3.map(
            lambda found: grades.holds(*(grades.below(a, b) for a, b in zip(found, backprop, strict=True)))
        ),
    )


def _time(method: str, mine: Mine, seeds: int) -> Verdict:
    base = pace(mine["BackProp"].correct)
    said = paper.pace("fig1", method) / paper.pace("fig1", "BackProp")
    claim = f"{method}: time per epoch, relative to BackProp's"
    return about_time(claim, said, mine[method].map(lambda rows: relative(pace(rows), base)), seeds)


def _in_the_same_time(method: str, mine: Mine, seeds: int) -> Verdict:
    """The text: competitive with BackProp even in terms of runtime."""
    backprop = mine["BackProp"].correct
    clock, base = final(backprop, "seconds").mean, final(backprop, LOSS)
    found = mine[method].map(lambda rows: within(rows, LOSS, clock) if math.isfinite(clock) else Seeds(()))
    curves = [theirs("fig1", name, over="seconds") for name in (method, "BackProp")]
    shared = min(curve[0][-1] for curve in curves)
    said = [words.number([y for x, y in zip(*curve, strict=True) if x <= shared][-1]) for curve in curves]
    return decided(
        f"{method}: lower loss than BackProp in the same time",
        " against ".join(said),
        found.map(lambda one: words.loss(one, seeds)),
        found.map(lambda one: grades.holds(grades.below(one, base))),
        f"BackProp {words.loss(base, seeds)} at the end of its run" if base.count else "",
    )


def _validation(method: str, mine: Both[list[Row]], seeds: int) -> Verdict:
    said = theirs("fig1", method, "validation_accuracy")[1][LATE]
    claim = f"{method}: validation accuracy after {LATE} epochs"
    return about_accuracy(claim, said, mine.map(lambda rows: at(rows, VALIDATION, LATE)), seeds)


def _generalises(mine: Mine) -> Verdict:
    """The text: approximations generalise better than BackProp and than the exact solution."""
    rivals = [at(mine[method].correct, VALIDATION, LATE) for method in ("BackProp", "ProxProp (exact)")]
    better = ITERATIONS.map(
        lambda by: [grades.below(rival, at(mine[m].by(by), VALIDATION, LATE)) for m in CG for rival in rivals]
    )
    return decided(
        f"cg3, cg5, cg10 have a higher validation accuracy than BackProp and than exact after {LATE} epochs",
        "6 of 6 comparisons",
        better.map(
            lambda known: f"{sum(map(bool, known))} of {sum(k is not None for k in known)} comparisons"
        ),
        better.map(lambda known: grades.holds(*known)),
    )


def _test(method: str, mine: Both[list[Row]], seeds: int) -> Verdict:
    """The caption: about 54 % for BackProp and about 56 % for "ours", without saying with which solver."""
    said = paper.TEST_ACCURACY["fig1", method.partition(" ")[0]]
    return about_accuracy(
        f"{method}: test accuracy, about", said, mine.map(lambda rows: final(rows, TEST)), seeds
    )
