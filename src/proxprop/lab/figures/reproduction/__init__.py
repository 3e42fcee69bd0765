"""The reproduction's figures: pure functions of its tables. Ours with the range over seeds, the paper's behind."""

from collections.abc import Callable
from typing import Any

from proxprop.lab.figures.reproduction.beyond import beyond
from proxprop.lab.figures.reproduction.curves import fig1, fig2
from proxprop.lab.figures.reproduction.propositions import propositions
from proxprop.lab.figures.reproduction.readings import readings
from proxprop.lab.figures.reproduction.steps import table1
from proxprop.lab.reproduction.results import Results

FIGURES: dict[str, Callable[[Results], Any | None]] = {
    "fig1": fig1,
    "table1": table1,
    "fig2-convnet-2pool": lambda results: fig2(results, "convnet-2pool"),
    "fig2-convnet": lambda results: fig2(results, "convnet"),
    "spectrum": readings,
    "propositions": propositions,
    "beyond": beyond,
}


def figures(results: Results) -> dict[str, Any]:
    """File name, without its end, to figure; those for which nothing was measured are left out."""
    drawn = {name: draw(results) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


__all__ = ["FIGURES", "figures"]
