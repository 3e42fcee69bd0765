"""A verdict, and the ways in which claims about one method's number become one."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.measured import Seeds, arm

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Verdict:
    """One line of the verdict table.

    Args:
        claim: what the paper says.
        paper: its number.
        published: ours with the released iteration; empty where nothing is iterated.
        correct: ours with correct conjugate gradients, with the exact solution, or BackProp's.
        reproduced: yes, roughly, no, not run, or by which of the two.
        why: what is different, in numbers.
        graded: the grades behind `reproduced`, where the claim is about one number.
    """

    claim: str
    paper: str
    published: str
    correct: str
    reproduced: str
    why: str = ""
    graded: "Both[str] | None" = None


@dataclass(frozen=True)
class Both(Generic[T]):
    """Something with the released iteration, None where nothing is iterated, and without its faults."""

    published: T | None
    correct: T

    def map(self, change: Callable[[T], U]) -> "Both[U]":
        """Something else of both."""
        return Both(None if self.published is None else change(self.published), change(self.correct))

    def by(self, iteration: str) -> T:
        """One of the two; what does not iterate is the same in both."""
        return self.published if iteration == "published" and self.published is not None else self.correct


def ours(rows: Iterable[Row], method: str, **wanted: object) -> Both[list[Row]]:
    """A method's rows by its name in the paper."""
    found = arm(rows, method=method, **wanted)
    correct = [row for row in found if row["iteration"] != "published"]
    return Both([r for r in found if r["iteration"] == "published"] if "cg" in method else None, correct)


def theirs(figure: str, method: str, quantity: str = "loss", over: str = "epoch") -> paper.Curve:
    """A curve that the paper has."""
    found = paper.drawn(figure, method, quantity, over)
    assert found is not None, f"{figure} has no {quantity} of {method} over {over}"
    return found


def decided(claim: str, said: str, told: Both[str], graded: Both[str], why: str = "") -> Verdict:
    """A verdict from what was measured and how it is graded, with either iteration."""
    one = graded.correct if graded.published is None else grades.either(graded.published, graded.correct)
    return Verdict(claim, said, told.published or "", told.correct, one, why)


def about_loss(claim: str, said: float, found: Both[Seeds], seeds: int) -> Verdict:
    """A claim about one loss."""
    graded = found.map(lambda one: grades.loss(said, one))
    shown = found.map(lambda one: words.loss(one, seeds))
    why = _told(found.map(lambda one: f"{one.mean / said:.3g}× the paper's" if _whole(one) else ""))
    return replace(decided(claim, words.number(said), shown, graded, why), graded=graded)


def about_accuracy(claim: str, said: float, found: Both[Seeds], seeds: int) -> Verdict:
    """A claim about one accuracy."""
    graded = found.map(lambda one: grades.accuracy(said, one))
    shown = found.map(lambda one: words.percent(one, seeds))
    why = _told(found.map(lambda one: f"{100 * (one.mean - said):+.1f} points" if _whole(one) else ""))
    return replace(decided(claim, f"{100 * said:.1f} %", shown, graded, why), graded=graded)


def about_distance(claim: str, found: Both[float]) -> Verdict:
    """A claim about a whole curve, by its mean |ln(ours / the paper's)|."""
    why = ""
    if found.published is not None and math.isfinite(found.published + found.correct):
        why = f"the {'published iteration' if found.published < found.correct else 'correct CG'} is nearer"
    return decided(claim, "0", found.map(lambda one: words.number(one, 2)), found.map(grades.distance), why)


def about_time(claim: str, said: float, found: Both[Seeds], seeds: int) -> Verdict:
    """A ratio of times: another GPU and other code, so the question is only which is cheaper."""
    correct = found.correct
    verdict, why = grades.NOT_RUN, ""
    if correct.values:
        verdict = "cheaper here" if correct.mean < said else "dearer here"
        why = f"{correct.mean / said:.2f} times the paper's ratio"
    shown = found.map(lambda one: words.times(one, seeds))
    return Verdict(claim, f"{said:.2f}×", shown.published or "", shown.correct, verdict, why)


def relative(found: Seeds, base: Seeds) -> Seeds:
    """Values as multiples of the mean of others."""
    return found.map(lambda value: value / base.mean) if base.values else Seeds(())


def short(method: str) -> str:
    """A method's name where there is little room.

    >>> short("ProxProp (cg3)"), short("BackProp")
    ('cg3', 'BackProp')
    """
    return method.removeprefix("ProxProp (").removesuffix(")")


def _whole(one: Seeds) -> bool:
    return bool(one.values) and not one.lost


def _told(found: Both[str]) -> str:
    """What to say of each; which is which where there are two."""
    if found.published is None:
        return found.correct
    parts = {"published": found.published, "correct": found.correct}
    return ", ".join(f"{name} {text}" for name, text in parts.items() if text)
