"""Section 4.1: the largest eigenvalue and the orders below it, for every reading and every set of images."""

import math
from typing import Any

from proxprop.lab import paper
from proxprop.lab.figures.style import styled
from proxprop.lab.reproduction.claims.spectrum import off, orders, seven
from proxprop.lab.reproduction.results import Results


def readings(results: Results) -> Any | None:
    """A table in colours: the darker a cell, the nearer its largest eigenvalue is to the paper's."""
    rows = [row for row in results.spectrum if row["precision"] == "float64"]
    if not rows:
        return None
    from matplotlib.figure import Figure

    down, across = (list(dict.fromkeys(row[name] for row in rows)) for name in ("reading", "images"))
    cells = {(row["reading"], row["images"]): row for row in rows}
    nearness = [[-off(cells[one, other]) for other in across] for one in down]
    with styled():
        figure = Figure(figsize=(2.6 + 1.5 * len(across), 1.2 + 0.42 * len(down)), layout="constrained")
        ax = figure.subplots()
        ax.imshow(nearness, cmap="Blues", vmin=-math.log(30), vmax=1.5, aspect="auto")
        for y, one in enumerate(down):
            for x, other in enumerate(across):
                row = cells[one, other]
                weight = "bold" if seven(row) else "normal"
                ax.text(x, y, f"{row['largest']:.2g}, {orders(row)}", ha="center", va="center", weight=weight)
        ax.set_xticks(range(len(across)), across)
        ax.set_yticks(range(len(down)), down)
        ax.grid(visible=False)
        ax.set_title(
            f"largest eigenvalue of XXᵀ, orders of magnitude above the smallest; the paper's: "
            f"{paper.LARGEST_EIGENVALUE:.1e}, {paper.EIGENVALUE_ORDERS}\n"
            "darker: nearer to its largest eigenvalue; bold: seven orders; ∞: smallest is 0",
            fontsize=9,
        )
    return figure
