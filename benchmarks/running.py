"""Write docs/running.md from the records under results/: what deferred mode costs, and what running averages bring.

python benchmarks/running.py > docs/running.md
"""

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from proxprop.lab.reproduction.markdown import table

RESULTS = Path(__file__).parents[1] / "results"
PLAIN = "the gradient"
MUON = {"backprop": PLAIN, "exact": "S of the batch", "running:10": "a running S"}
Cells = dict[tuple[object, float], list[float]]
"""A method and a learning rate to the losses of its seeds."""

INTRODUCTION = """# What running averages cost and bring

A proximal step needs S = `AᵀA`, the products of a layer's inputs with each other. [Deferred mode](deferred.md) sums it
over a step. `proxprop.Running` averages it over steps, so that most steps form and invert nothing. This page has what
that costs in time, and what it brings to the loss under Muon and under AdamW. `benchmarks/running.py` writes it from
records. Losses are mean ± standard deviation over three seeds; lower is better.
"""

WAYS = """## What a step costs

`{command}` on {device}, torch {torch}, commit {commit:.7}; record in `results/bench/running-h200.json`. Ratios of whole
steps (forward, backward, optimizer), on average over all steps between two inversions, to the same optimizer without
proxprop in the same way of running: the median of {rounds} rounds and its quartiles. The longest step of a period is
beside the median one. All averages are inverted in the first step, then in turns. *Every 10* forms S in one step of ten
and inverts it as often; *deferred* forms and solves in every step, without an average. `gpt` is a GPT-2 of 12 layers,
`mlp` the paper's.

The library has changed since that commit, and no record of a GPU has today's ways yet. A layer takes fewer calls of the
host in every step. S of 16-bit rows takes half of its products, a step is taken into an average in one pass, and large
averages are inverted by blocks.
"""

GRAPHS = "In the graph columns every step of a period is a CUDA graph.\n"

MEMORY = """\
Peak memory, also of the first steps, beside the plain optimizer's, and the state (averages and inverses) in units of S:
"""

INVERSES = """\
The time of one inverse of `0.3·I + C` in float32, for a spectrum that decays by four orders of magnitude, and its
relative error. At that commit the library made inverses of over 1,024 features by products of blocks in float32, and
cuSOLVER was faster. Today's way, by blocks in float16 terms and for several matrices at a time, has no record yet:
"""

UNDER_MUON = """## Under Muon

The table shows the full-batch training loss of the paper's MLP on CIFAR-10 (a copy recompressed as JPEG and stored in
another order) after ten epochs at batch 500. Muon takes the hidden matrices and AdamW the rest, both at this learning
rate (Muon's scaled to match AdamW's). The running S is updated in every step. Made by `proxprop reproduce beyond`;
record in `results/paper/beyond.csv`.
"""

UNDER_ADAMW = """## Under AdamW, a small GPT

`examples/gpt.py` trains six layers, 384 wide, on Python's own source: 1,200 steps in bf16, with 64 windows of 256
bytes a step and `Running(decay=0.95, update_every=1, invert_every=10, damping=ρ, rows=...)`, unless a row says that S
comes from one step in ten. The table shows the loss on held-out text in nats a byte; records in `results/gpt/`.
"""

GPT_TIMES = """\
The gradient's best rate is the largest of its three, so a larger one may be better still, and S was tried at few
settings. The next table shows the time of an eager step in bf16, divided by that of AdamW on the gradient
(`results/gpt/time.json`). All of them wait for the host, which has more to do even if nine steps of ten run torch's
own layers:
"""


def main() -> None:
    print(INTRODUCTION)
    print(in_three_ways(json.loads((RESULTS / "bench" / "running-h200.json").read_text())))
    print(muon())
    print(gpt(), end="")


def in_three_ways(record: dict) -> str:
    """Whole steps of deferred mode, eager, in CUDA graphs and compiled."""
    found = {(f"{r['network']}, {r['precision']}", r["method"], r["way"]): r for r in record["rows"]}
    names = list(dict.fromkeys((network, method) for network, method, _ in found))
    ways = [way for way in ("eager", "compile", "graph") if any(key[2] == way for key in found)]
    rows = [
        [network, method, *(cell for way in ways for cell in _way(found.get((network, method, way))))]
        for network, method in names
    ]
    head = ["network", "method", *(title for way in ways for title in (way, f"{way}: median, longest ms"))]
    memory = [
        [network, method, f"{row['memory']:.2f}", f"{row['state']:.2f}" if row["state"] else ""]
        for (network, method, way), row in found.items()
        if way == "eager" and row["memory"]
    ]
    inverses = [
        [
            str(r["size"]),
            f"{r['ms']:.2f}",
            f"{r['error']:.1e}",
            f"{r['library_ms']:.2f}",
            f"{r['library_error']:.1e}",
        ]
        for r in record["inverses"]
    ]
    titles = ["features", "then: ms", "then: error", "cuSOLVER: ms", "cuSOLVER: error"]
    return "\n".join(
        [
            WAYS.format(command=record["command"], rounds=record["rounds"], **record["environment"]),
            *([GRAPHS] if "graph" in ways else []),
            table(head, rows),
            "",
            *([MEMORY, table(["network", "method", "memory", "state"], memory), ""] if memory else []),
            INVERSES,
            table(titles, inverses),
            "",
        ]
    )


def _way(row: dict | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    return (
        f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})",
        f"{row['step']:.2f}, {row['longest']:.2f}",
    )


def muon() -> str:
    """Under Muon: the paper's MLP on CIFAR-10 for ten epochs."""
    cells: Cells = defaultdict(list)
    with (RESULTS / "paper" / "beyond.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["experiment"], row["epoch"]) == ("muon", "10"):
                cells[row["solver"], float(row["tau"])].append(float(row["train_loss"]))
    return "\n".join([UNDER_MUON, losses("Muon is fed", MUON, cells)])


def gpt() -> str:
    """Under AdamW: a byte-level GPT."""
    cells: Cells = defaultdict(list)
    for path in sorted((RESULTS / "gpt").glob("seed*.json")):
        for row in json.loads(path.read_text())["rows"]:
            cells[fed(row), row["lr"]].append(row["validation_loss"])
    timed: dict[str, list[float]] = defaultdict(list)
    for row in json.loads((RESULTS / "gpt" / "time.json").read_text())["rows"]:
        timed[fed(row)].append(row["seconds_per_step"])
    plain = fmean(timed.pop(PLAIN))
    slower = [[name, f"{fmean(times) / plain:.2f}"] for name, times in timed.items()]
    names = dict.fromkeys([PLAIN, *sorted({name for name, _ in cells})])
    parts = [
        UNDER_ADAMW,
        losses("AdamW is fed", {name: name for name in names}, cells),
        GPT_TIMES,
        table(["AdamW is fed", "time of a step"], slower),
    ]
    return "\n".join([*parts, ""])


def fed(row: dict) -> str:
    """What AdamW was fed in a run."""
    if row.get("optimizer") == "muon":
        return f"Muon on {fed(row | {'optimizer': 'adamw'})}"
    if row["damping"] is None:
        return PLAIN
    rows = "" if row["rows"] is None else f", {row['rows']:,} rows"
    every = row.get("update_every", row.get("observe", 1))  # records from before 0.2 say "observe"
    steps = "" if every == 1 else f", S of one step in {every}"
    return f"a running S, ρ = {row['damping']:g}{rows}{steps}"


def losses(corner: str, names: dict, cells: Cells) -> str:
    """A table of losses over learning rates, and the best of each method in words."""
    rates = sorted({rate for _, rate in cells})
    lines, best = [], {}
    for method, name in names.items():
        found = {rate: cells[method, rate] for rate in rates if (method, rate) in cells}
        lines.append([name, *(_spread(found.get(rate, [])) for rate in rates)])
        rate = min(found, key=lambda rate: fmean(found[rate]))
        best[name] = f"{name}: {_spread(found[rate])} (lr {rate:g})"
    head = [corner, *(f"lr {rate:g}" for rate in rates)]
    return "\n".join(
        [table(head, lines), "", f"Each at its best learning rate here: {'; '.join(best.values())}.", ""]
    )


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values):.2g}" if len(values) > 1 else " (one seed)"
    return f"{fmean(values):#.4g}{spread}"


if __name__ == "__main__":
    main()
