"""When a number counts as reproduced: one rule for losses, one for accuracies, one for divergence, all mechanical."""

import math

from proxprop.lab.reproduction.measured import Seeds

YES, ROUGHLY, NO, NOT_RUN = "yes", "roughly", "no", "not run"
LOSS_SLACK, LOSS_FACTOR = 1.15, 2.0
POINTS, MORE_POINTS = 0.01, 0.025

RULE = f"""\
- A **loss** is reproduced (*{YES}*) when the paper's number lies between our lowest and highest seed, both widened by
  {100 * (LOSS_SLACK - 1):.0f} %; *{ROUGHLY}* when it is within a factor of {LOSS_FACTOR:g} of our mean; else *{NO}*.
  A number that the paper prints rounded stands for all that round to it. A whole curve is reproduced when the mean over
  epochs of |ln(ours / the paper's)| is at most ln {LOSS_SLACK:g} = {math.log(LOSS_SLACK):.2f}, *{ROUGHLY}* at most
  ln {LOSS_FACTOR:g} = {math.log(LOSS_FACTOR):.2f}.
- An **accuracy** is reproduced when the paper's lies between our lowest and highest seed, both widened by
  {100 * POINTS:g} point; *{ROUGHLY}* within {100 * MORE_POINTS:g} points of our mean; else *{NO}*.
- **Divergence** ("–" in Table 1) is reproduced when every seed's loss stops being a finite number; *{ROUGHLY}* when
  some do.
- An **order** ("lower than", "faster than") is reproduced when it holds between our means over seeds.
- The paper gives one run each and no spread of its own. Ours is mean ± standard deviation over seeds."""


def loss(theirs: float, ours: Seeds, rounding: float = 0.0) -> str:
    """Grade a loss; NaN is the paper's divergence.

    >>> loss(0.52, Seeds((0.5, 0.6))), loss(0.9, Seeds((0.5, 0.6))), loss(math.nan, Seeds((), 3))
    ('yes', 'roughly', 'yes')
    """
    if not ours.count:
        return NOT_RUN
    if math.isnan(theirs):
        return YES if not ours.values else ROUGHLY if ours.lost else NO
    if ours.lost:
        return NO
    low, high = min(ours.values) / LOSS_SLACK, max(ours.values) * LOSS_SLACK
    if low <= theirs + rounding and theirs - rounding <= high:
        return YES
    return ROUGHLY if 1 / LOSS_FACTOR <= theirs / ours.mean <= LOSS_FACTOR else NO


def accuracy(theirs: float, ours: Seeds) -> str:
    """Grade an accuracy between 0 and 1.

    >>> accuracy(0.56, Seeds((0.54, 0.552))), accuracy(0.56, Seeds((0.5,)))
    ('yes', 'no')
    """
    if not ours.count:
        return NOT_RUN
    if ours.lost:
        return NO
    if min(ours.values) - POINTS <= theirs <= max(ours.values) + POINTS:
        return YES
    return ROUGHLY if abs(theirs - ours.mean) <= MORE_POINTS else NO


def distance(apart: float) -> str:
    """Grade a whole curve by its mean |ln(ours / the paper's)|, with the same widths as a loss.

    >>> distance(0.05), distance(0.5), distance(2.0)
    ('yes', 'roughly', 'no')
    """
    if math.isnan(apart):
        return NOT_RUN
    if apart <= math.log(LOSS_SLACK):
        return YES
    return ROUGHLY if apart <= math.log(LOSS_FACTOR) else NO


def holds(*conditions: bool | None) -> str:
    """Grade an order: whether all conditions hold; None is one that nothing was run for.

    >>> holds(True, True), holds(True, False), holds(None, True)
    ('yes', 'no', 'not run')
    """
    if any(condition is None for condition in conditions) or not conditions:
        return NOT_RUN
    return YES if all(conditions) else NO


def below(one: Seeds, other: Seeds) -> bool | None:
    """Whether one mean is below another, divergence counting as infinite; None where either is missing."""
    return one.mean < other.mean if one.count and other.count else None


def either(published: str, correct: str) -> str:
    """One grade from those of the two iterations.

    >>> either("yes", "no"), either("no", "yes"), either("yes", "yes"), either("roughly", "no")
    ('by the published iteration', 'by correct CG', 'yes', 'roughly, by the published iteration')
    """
    grades = {"by the published iteration": published, "by correct CG": correct}
    if published == correct:
        return published
    for wanted, before in ((YES, ""), (ROUGHLY, "roughly, ")):
        for words, grade in grades.items():
            if grade == wanted:
                return before + words
    return NO
