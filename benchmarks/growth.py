"""Draw results/bench/growth.png and .svg from the records beside them: how a step's cost grows.

python benchmarks/growth.py
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from proxprop.lab.figures.style import LOOKS, styled

BENCH = Path(__file__).parents[1] / "results" / "bench"
MACHINES = {"h200": "one H200", "cpu": "two CPU cores"}
METHODS = {"cg1": "cg:1", "cg3": "cg:3", "cg10": "cg:10", "exact": "exact"}
DASHES = {"fp32": "-", "tf32": ":"}
BATCHES = (50, 500, 5000)
WIDTHS = {
    "mlp-narrow-2048": "128,\nbatch 2048",
    "mlp-500": "the paper's,\nbatch 500",
    "mlp-wide-256": "8192,\nbatch 256",
}
Ratios = dict[tuple[str, str, str], float]
"""By network, method and precision."""


def main() -> None:
    with styled():
        figure = Figure(figsize=(9, 11), layout="constrained")
        panels = figure.subplots(4, 2, sharey="col")
        for column, (machine, name) in zip(panels.T, MACHINES.items(), strict=True):
            rows = json.loads((BENCH / f"{machine}.json").read_text())["rows"]
            ratios: Ratios = {(r["network"], r["method"], r["precision"]): r["ratio"] for r in rows}
            draw(column, ratios, name)
        solvers = [Line2D([], [], label=method, **LOOKS[METHODS[method]]) for method in METHODS]
        dashes = [Line2D([], [], color="black", linestyle=d, label=p) for p, d in DASHES.items()]
        figure.legend(handles=[*solvers, *dashes], loc="outside lower center", ncols=6)
        figure.savefig(BENCH / "growth.png", dpi=110)
        figure.savefig(BENCH / "growth.svg", metadata={"Date": None})


def draw(panels: Any, ratios: Ratios, machine: str) -> None:
    """One machine's panels: over batch sizes of two networks, over iterations, over widths."""
    by_batch = {name: {f"{name}-{size}": str(size) for size in BATCHES} for name in ("mlp", "convnet")}
    titles = {"mlp": "the paper's MLP", "convnet": "the paper's ConvNet"}
    for panel, (name, places) in zip(panels[:2], by_batch.items(), strict=True):
        lines(panel, ratios, places)
        panel.set(title=f"{titles[name]}\n{machine}", xlabel="batch size")
    iterations(panels[2], ratios)
    panels[2].set(title=f"MLP (filled) and ConvNet, batch 500\n{machine}", xlabel="CG iterations")
    lines(panels[3], ratios, WIDTHS)
    panels[3].set(title=f"MLPs by width\n{machine}")
    for panel in panels:
        panel.set_ylabel("time of a step / BackProp's")
        panel.axhline(1.0, color=LOOKS["backprop"]["color"], linestyle="--", linewidth=1)


def lines(panel: Any, ratios: Ratios, places: dict[str, str]) -> None:
    """A line a method and precision, over the networks that were timed."""
    there = [network for network in places if any(key[0] == network for key in ratios)]
    for precision, dash in DASHES.items():
        for method, solver in METHODS.items():
            found = [ratios.get((network, method, precision)) for network in there]
            if None not in found:
                panel.plot([places[n] for n in there], found, **LOOKS[solver] | {"linestyle": dash})
    panel.set_yscale("log")
    panel.set_yticks([0.75, 1, 1.5, 2, 3, 4, 6], labels=["0.75", "1", "1.5", "2", "3", "4", "6"])
    panel.minorticks_off()


def iterations(panel: Any, ratios: Ratios) -> None:
    """Over the number of iterations, both of the paper's networks at batch 500."""
    for network, filled in (("mlp-500", True), ("convnet-500", False)):
        for precision, dash in DASHES.items():
            found = {int(m[2:]): ratios.get((network, m, precision)) for m in METHODS if m.startswith("cg")}
            if None not in found.values():
                style = LOOKS["cg:3"] | {"linestyle": dash} | ({} if filled else {"markerfacecolor": "white"})
                panel.plot(list(found), list(found.values()), **style)
    panel.set_xticks([1, 3, 10])


if __name__ == "__main__":
    main()
