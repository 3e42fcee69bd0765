"""How a method is drawn: the colour says the optimizer, dash and marker what it is fed; peers' lines are dashed."""

from collections.abc import Sequence
from typing import Any

from proxprop.lab.figures.style import FAINT
from proxprop.lab.peers.methods import METHODS

SGD, ADAMW, MUON, SOAP = "#0072B2", "#D55E00", "#009E73", "#3b3b3b"
ALONE: dict[str, Any] = {"linestyle": "--", "marker": "o"}
FED: dict[str, dict[str, Any]] = {
    "exact": {"linestyle": "-", "marker": "^"},
    "cg3": {"linestyle": ":", "marker": "s"},
    "running": {"linestyle": "-.", "marker": "*"},
    "root": {"linestyle": (0, (6, 1, 1, 1, 1, 1)), "marker": "P"},
}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "muon": MUON, "soap": SOAP}
LOOKS: dict[str, dict[str, Any]] = {
    **{base: {"color": color} | ALONE for base, color in OPTIMIZERS.items()},
    **{
        name: {"color": OPTIMIZERS[name.partition("+")[2]]} | FED[name.partition("+")[0]]
        for name, method in METHODS.items()
        if method.ours
    },
    "schedule-free": {"color": "#CC79A7", "linestyle": "--", "marker": "v"},
    "shampoo": {"color": "#56B4E9", "linestyle": "--", "marker": "X"},
    "ikfac": {"color": "#b39b00", "linestyle": "--", "marker": "D"},
}
GREY: dict[str, Any] = {"color": FAINT, "linewidth": 0.7, "alpha": 0.35, "zorder": 1}
"""A line that only says where the others are."""


def families() -> dict[str, list[str]]:
    """Methods that are drawn in one panel: each optimizer with what feeds it, and the rest."""
    made = {
        METHODS[base].title: [base, *(name for name in METHODS if name.endswith(f"+{base}"))]
        for base in OPTIMIZERS
    }
    taken = {name for names in made.values() for name in names}
    return {**made, "other peers": [name for name in METHODS if name not in taken]}


def title(method: str) -> str:
    """A method's title."""
    return METHODS[method].title


def legend(figure: Any, axes: Sequence[Any], columns: int) -> None:
    """One legend for all panels, in the methods' order, with lines long enough to tell dashes apart."""
    known = {
        name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    names = [method.title for method in METHODS.values() if method.title in known]
    handles = [known[name] for name in names]
    figure.legend(handles, names, loc="outside lower left", ncols=columns, fontsize=9, handlelength=3.6)
