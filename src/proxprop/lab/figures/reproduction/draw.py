"""What several of the reproduction's figures draw: names, and a loss over a setting."""

import math
from collections.abc import Mapping
from typing import Any

from proxprop.lab import paper
from proxprop.lab.reproduction.claims.verdict import short
from proxprop.lab.reproduction.measured import Seeds

OFF_SCALE = 1000.0  # A finite loss beyond this is as lost as an infinite one, and would flatten the rest.

NARROW = 100.0  # A range of losses below this factor gets more than one label a decade.


def label(solver: str) -> str:
    """A solver in a legend.

    >>> [label(solver) for solver in ("backprop", "cg:3", "published:3", "exact")]
    ['BackProp', 'cg3', 'cg3 as released', 'exact']
    """
    family, _, steps = solver.partition(":")
    names = {"backprop": "BackProp", "published": f"cg{steps} as released", "cg": f"cg{steps}"}
    return (names | {"running": f"running average, inverted every {steps} steps"}).get(family, solver)


def theirs(solver: str) -> str:
    """The paper's curve of a method in a legend; it has one iteration only.

    >>> theirs("published:3"), theirs("cg:3")
    ("cg3, the paper's", "cg3, the paper's")
    """
    return f"{short(paper.name(solver))}, the paper's"


def sweep(ax: Any, found: Mapping[float, Seeds], name: str, style: dict[str, Any], row: int) -> None:
    """Means over a setting with bars from the lowest to the highest seed; × at the top where a run diverged.

    Args:
        ax: the panel.
        found: the setting's value to the final losses.
        name: for the legend.
        style: colour, dash and marker.
        row: which row of × to use, so that no method hides another's.
    """
    kept = {value: loss for value, loss in found.items() if loss.mean <= OFF_SCALE}
    means = [loss.mean for loss in kept.values()]
    # A mean of equal numbers can differ from them by a rounding.
    below = [max(0.0, loss.mean - min(loss.values)) for loss in kept.values()]
    above = [max(0.0, max(loss.values) - loss.mean) for loss in kept.values()]
    if kept:
        ax.errorbar(list(kept), means, yerr=[below, above], label=name, capsize=2.5, elinewidth=1, **style)
    lost = [value for value, loss in found.items() if value not in kept and not math.isnan(loss.mean)]
    if not lost:
        return
    marks = {"linestyle": "", "marker": "x", "markersize": 7, "markeredgewidth": 1.8, "color": style["color"]}
    heights = [0.985 - 0.035 * row] * len(lost)
    ax.plot(lost, heights, transform=ax.get_xaxis_transform(), clip_on=False, **marks)


def log_scale(ax: Any) -> None:
    """A logarithmic axis of losses in plain numbers, with more of them where it spans less than two decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0) if high < NARROW * low else (1.0,)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
