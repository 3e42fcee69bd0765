"""How figures look: the Okabe-Ito palette, told apart in print by dash and marker as well."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from proxprop.lab.analysis import Arm

INK, FAINT = "#1a1a1a", "#8c8c8c"
LOOKS: dict[str, dict[str, Any]] = {
    "backprop": {"color": "#3b3b3b", "linestyle": "--", "marker": "o"},
    "cg:1": {"color": "#56B4E9", "linestyle": "-", "marker": "v"},
    "cg:3": {"color": "#0072B2", "linestyle": "-", "marker": "s"},
    "cg:5": {"color": "#009E73", "linestyle": "-", "marker": "D"},
    "cg:10": {"color": "#CC79A7", "linestyle": "-", "marker": "P"},
    "exact": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "running:10": {"color": "#E69F00", "linestyle": "-.", "marker": "X"},
}
DOTTED: Any = (0, (1.2, 1.2))
LOOKS |= {
    solver.replace("cg", "published"): style | {"linestyle": DOTTED, "markerfacecolor": "white"}
    for solver, style in LOOKS.items()
    if solver.startswith("cg:")
}  # the released iteration: the same method to the paper, so the same colour and marker
OTHERS = ("#E69F00", "#F0E442", "#56B4E9", "#009E73")
SETTINGS: Any = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
}


@contextmanager
def styled() -> Iterator[None]:
    """Within, figures are made in this style; matplotlib's own settings are not touched."""
    from matplotlib import rc_context

    with rc_context(SETTINGS):
        yield


def percent_tick(value: float, position: int | None = None) -> str:
    """A tick of an accuracy axis, with the digits it needs, so that no two ticks read alike.

    >>> percent_tick(0.975), percent_tick(0.6)
    ('97.5%', '60%')
    """
    return f"{100 * value:.6g}%"


def log_losses(ax: Any) -> None:
    """Draw losses on a logarithmic axis, unless there is no loss above 0, which matplotlib would warn of."""
    if math.isfinite(ax.dataLim.minposy):
        ax.set_yscale("log")


def look(arm: Arm, index: int, taus: list[float]) -> dict[str, Any]:
    """Colour, dash and marker of an arm; a solver looks the same in every figure, but for the dash of a second τ_θ."""
    found = LOOKS.get(arm.solver, {"color": OTHERS[index % len(OTHERS)], "linestyle": "-.", "marker": "X"})
    other = arm.tau_theta is not None and arm.tau_theta != taus[-1]
    return found | ({"linestyle": ":"} if other else {})


def label(arm: Arm, taus: list[float], rate: bool = False) -> str:
    """The arm's name in a legend, with τ_θ where several occur and with its learning rate where asked for."""
    tau = rf", $\tau_\theta$={arm.tau_theta:g}" if arm.tau_theta is not None and len(taus) > 1 else ""
    lr = f" (lr {arm.best_rate:g}{tau})" if rate else (f" ({tau[2:]})" if tau else "")
    return arm.name + lr
