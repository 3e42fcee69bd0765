"""Write docs/performance.md from the records under results/bench/.

python benchmarks/report.py > docs/performance.md
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "results" / "bench"
GOALS = {
    ("mlp-500", "h200"): {"cg1": 1.10, "cg3": 1.25, "cg10": 1.8, "exact": 1.25},
    ("convnet-500", "h200"): {"cg3": 1.4, "cg10": 1.4, "exact": 1.5},
    ("mlp-500", "cpu"): {"cg1": 1.15, "cg3": 1.3, "cg10": 2.0, "exact": 1.15},
    ("convnet-500", "cpu"): {"cg3": 1.35, "cg10": 1.4, "exact": 1.4},
}
PAPER = {"mlp-500": {"cg3": 2.75, "exact": 6.3}, "convnet-500": {"cg3": 3.1, "cg10": 7.0}}
"""Ratios read off the paper's own time axes (a Titan X)."""

METHODS = ("cg1", "cg3", "cg10", "exact", "adam", "muon", "isaac")

INTRODUCTION = """# What a step costs

Ratios of one whole training step (forward, backward, optimizer) to plain BackProp's in the same run, same precision,
median over interleaved rounds; `benchmarks/step.py` measures them and the records are in `results/bench/`. This page is
written from those records by `benchmarks/report.py`. On the GPU both sides are captured in a CUDA graph.

How to read it: a proximal step needs a Gram matrix and a small solve for every layer. In sample space they cost
`2N²n + 2kN²m` FLOPs beside BackProp's `6Nnm` (N samples, n features, m outputs, k iterations), in feature space
`2Nn² + 2kn²m`; a convolution's Gram matrix comes from autocorrelations and costs far less. So layers that are wide
beside the batch, or narrow beside it, are cheap, and layers where batch, inputs and outputs are alike are not.
`proxprop.summary(model, example)` counts a model's FLOPs before it runs; launches and memory traffic come on top.

On a GPU in float32 the products of a proximal step run on tensor cores, each number split into parts so that nothing
of float32's accuracy is lost beyond a few times its rounding, while BackProp's run on float32 units as torch leaves
them. Part of the low ratios is that: the weight gradient's product, which a proximal step needs as well, takes half
the time.
"""

LIMITS = """## Where it falls short, and what limits it

- **GPU, exact**: each of 500 pivots waits for the one before, 0.2 ms a layer whatever the precision, and most of the
  cost of an exact step is that wait. It depends on the forward pass only, so that one factorisation for all layers
  at once, or other work beside it, could hide it.
- **GPU, convolutions at batch 500**: bound by launches: about ten for a Gram matrix, two for an iteration. One
  launch an iteration is next.
- **GPU in TF32 and bf16**: BackProp's own products run on tensor cores there, so the arrays that conjugate gradients
  read and write between two products weigh more.
- **GPU, small layers** (the narrow MLP): bound by launches.
- **GPU, exact with thousands of features** (ResNet-18, the GPT-2 block): cuSOLVER's Cholesky factor and triangular
  solves run in float32 whatever the precision of the rest.
- **CPU, multilayer perceptron**: conjugate gradients read six arrays between two products; where these do not stay in
  the cache, which on a shared machine depends on where they happen to lie, their part of a step doubles, and the
  quartiles are that far apart. An exact step is bound by its FLOPs.
- **CPU, convolutions at batch 50**: bound by calls of the transforms behind a Gram matrix.
- **GPU, peak memory**: the products of image rows need some 40 MB whatever the batch, which is more than all else
  at batch 50; and a float32 copy of the input under bf16.
- **Eager GPU steps** are bound by the host, which takes longer to launch a kernel of ours than one of torch's.
- **The cost model counts FLOPs**, by three prices on a GPU; not launches or bytes.
"""


def main() -> None:
    print(INTRODUCTION)
    for name, title in (("h200", "NVIDIA H200"), ("cpu", "Two CPU cores")):
        path = BENCH / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            print(f"## {title}\n")
            print(environment(record))
            for precision in dict.fromkeys(row["precision"] for row in record["rows"]):
                print(table([row for row in record["rows"] if row["precision"] == precision], precision))
            print(goals(record["rows"], name))
    for name, title in (
        ("h200-bf16", "H200, bf16 autocast"),
        ("h200-eager", "H200, eager, with the nearest relative"),
    ):
        record = json.loads((BENCH / f"{name}.json").read_text())
        print(f"## {title}\n")
        print(environment(record))
        print(table(record["rows"], record["rows"][0]["precision"]))
    print(LIMITS, end="")


def environment(record: dict) -> str:
    made = record["environment"]
    about = (
        f"{made['device']}, torch {made['torch']}, {made['threads']} threads, commit `{made['commit'][:12]}`"
    )
    return f"{about}: `{record['command']}`\n"


def table(rows: list[dict], precision: str) -> str:
    """A row a network: BackProp's milliseconds, every method's ratio, and the ratio that FLOPs predict for cg3."""
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    lines = [
        f"| {precision} | BackProp, ms | " + " | ".join(methods) + " | FLOPs predict for cg3 | memory, cg3 |",
        "| --- | ---: |" + " ---: |" * (len(methods) + 2),
    ]
    for network in dict.fromkeys(row["network"] for row in rows):
        of = {row["method"]: row for row in rows if row["network"] == network}
        ratios = [f"{of[m]['ratio']:.2f}" if m in of else "–" for m in methods]
        cg3 = of.get("cg3", {})
        predicted = f"{cg3['predicted']:.2f}" if cg3.get("predicted") else "–"
        memory = f"{cg3['memory']:.2f}" if cg3.get("memory") else "–"
        lines.append(
            f"| {network} | {of['backprop']['milliseconds']:.2f} | {' | '.join(ratios)} | {predicted} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def goals(rows: list[dict], machine: str) -> str:
    """What was asked of the paper's two networks, what is measured, and what the paper reports."""
    found = {(row["network"], row["method"], row["precision"]): f"{row['ratio']:.2f}" for row in rows}
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    lines = [
        f"| batch 500 | goal | {' | '.join(precisions)} | the paper's own code, from its figures |",
        "| --- | ---: |" + " ---: |" * (len(precisions) + 1),
    ]
    for (network, where), wanted in GOALS.items():
        for method, goal in wanted.items() if where == machine else ():
            measured = " | ".join(found[network, method, precision] for precision in precisions)
            paper = PAPER[network].get(method, "–")
            lines.append(f"| {network} {method} | {goal:.2f} | {measured} | {paper} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
