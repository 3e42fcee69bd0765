"""Write docs/performance.md from the records under results/bench/.

python benchmarks/report.py > docs/performance.md
"""

import json
from pathlib import Path

from networks import NETWORKS
from step import METHODS, PRECISIONS
from tables import table
from ways import WAYS

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "results" / "bench"
GOALS = {
    ("mlp-500", "h200"): {"cg1": 1.10, "cg3": 1.25, "cg10": 1.8, "exact": 1.25},
    ("convnet-500", "h200"): {"cg3": 1.4, "cg10": 1.4, "exact": 1.5},
    ("mlp-500", "cpu"): {"cg1": 1.15, "cg3": 1.3, "cg10": 2.0, "exact": 1.15},
    ("convnet-500", "cpu"): {"cg3": 1.35, "cg10": 1.4, "exact": 1.4},
}
WAYS_GOALS = {
    ("mlp-500", "fp32", "eager"): {"cg3": 1.35, "exact": 1.40},
    ("mlp-500", "tf32", "eager"): {"cg3": 1.40, "exact": 1.45},
    ("mlp-500", "tf32", "compile"): {"cg1": 1.2, "cg3": 1.3, "exact": 1.35},
    ("mlp-500", "tf32", "reduce-overhead"): {"cg3": 1.05, "exact": 1.25},
    ("mlp-500", "tf32", "graph"): {"cg1": 1.0, "cg3": 1.10, "exact": 1.15},
    ("resnet18-last-128", "bf16", "eager"): {"cg1": 1.6, "cg3": 1.8, "exact": 2.3},
    ("resnet18-last-128", "bf16", "compile"): {"cg1": 1.6, "cg3": 1.8, "exact": 2.3},
    ("resnet18-last-128", "bf16", "graph"): {"cg1": 1.5, "cg3": 1.7, "exact": 2.2},
    ("gpt2-8x1024", "bf16", "eager"): {"cg1": 1.35, "cg3": 1.5, "exact": 1.9},
    ("gpt2-8x1024", "bf16", "compile"): {"cg1": 1.35, "cg3": 1.5, "exact": 1.9},
    ("autoencoder-1000", "tf32", "eager"): {"cg3": 1.7, "exact": 1.7},
    ("digits-100", "fp32", "eager"): {"cg3": 1.8, "exact": 1.6},
}
"""What a network's step may cost in each way, by its precision."""

PAPER = {"mlp-500": {"cg3": 2.75, "exact": 6.3}, "convnet-500": {"cg3": 3.1, "cg10": 7.0}}
"""Ratios read off the paper's own time axes (a Titan X)."""

SPACES_ON_A_GPU = ("h200-spaces", "h200-spaces-rest", "h200-spaces-cg1", "h200-spaces-bf16")

PROXIMAL = ("cg1", "cg3", "cg10", "exact")

MOST_MEMORY = 1.25
"""Of a proximal step, beside BackProp's."""

INTRODUCTION = """# What a step costs

Each number is the time of a whole training step (forward, backward, optimizer) divided by that of plain BackProp's in
the same run and precision, as a median over interleaved rounds. `benchmarks/step.py` measures them, and the records
are in `results/bench/`. `benchmarks/report.py` writes this page from those records. On the GPU both sides are
captured in a CUDA graph, unless a section says otherwise: [ordinary steps](#the-same-step-in-every-way-to-run-it) cost
more.

A name ends in its batch: `mlp-500` is the paper's MLP (3072-4000-1000-4000-10) with 500 samples, `convnet` the paper's
ConvNet, `resnet18` a ResNet-18 for images of 32², and `gpt2-block` one block of GPT-2 on so many sequences of so many
tokens. `mlp-wide` has three layers of 8192 inputs, `mlp-narrow` four of 128. `cg1`, `cg3` and `cg10` are `CG(1)`,
`CG(3)` and `CG(10)`, and `exact` is `Exact()`. For comparison, `adam` and `muon` are BackProp under those optimizers,
and `isaac` has the linear layers of [ISAAC](relatives.md).

A proximal step needs a Gram matrix and a small solve for every layer. In sample space they cost `2N²n + 2kN²m` FLOPs
beside BackProp's `6Nnm` (N samples, n features, m outputs, k iterations), in feature space `2Nn² + 2kn²m`. A
convolution's Gram matrix comes from autocorrelations and costs far less. So layers are cheap if they are much wider or
much narrower than the batch is large, and expensive if batch, inputs and outputs are of similar size.
`proxprop.summary(model, example)` counts a model's FLOPs before it runs. Launches and memory traffic are not in that
count.

On a GPU in float32 the products of a proximal step run on tensor cores. Each number is split into parts, so the error
stays within a few times float32's rounding. BackProp's products run on float32 units, as torch leaves them. This
explains part of the low ratios: the weight gradient's product, which a proximal step needs as well, is faster than
BackProp's. It is so in TF32 too, because a solve leaves its result in a layout that suits tensor cores.

On a CPU the gradients of large layers are written to huge pages, which Linux is asked for, as NumPy asks for its
arrays. torch asks for none unless `THP_MEM_ALLOC_ENABLE=1` is set. This explains part of the multilayer perceptron's
ratio. In the last of its tables torch asks for them as well, on both sides.
"""

MEMORY = """\
Memory is the peak of a step with cg3, divided by BackProp's. The step is not captured but solves beside the backward
pass as a captured one does; in tables of other ways it is a step of that way, and what its captured solves hold is
counted. It leaves out what cuBLAS keeps for every stream, including the four on which systems are solved beside the
backward pass. It differs by a few hundredths from run to run, because the allocator hands out larger blocks than it is
asked for. On a CPU it is what torch's profiler sees allocated, at most {most:.2f} times BackProp's in
`results/bench/cpu.json` ({which}).
"""

GROWTH = """## How it grows

![Ratios to BackProp over batch size, iterations and width, H200 and two CPU cores](../results/bench/growth.png)

`benchmarks/growth.py` draws this from the records above. A linear layer with fewer samples than features is solved in
sample space, where the cost beyond BackProp grows with the batch. A convolution is solved in feature space, where
that cost is spread over the batch. A proximal step does not pay if batch, inputs and outputs are of similar size and
products are fast, as for the paper's MLP at batch 5000 in TF32.
"""

SPACES = """## Whether the plan chooses well

Here each space is pinned in turn and its time divided by that of the chosen one, unless it takes over five times the
FLOPs. A choice would be wrong if a pinned space were 1.3 times as fast, a ratio below 0.77. The chosen space pinned
differs from 1 by noise, and by which method ran before it.
"""

IN_EVERY_WAY = """## The same step in every way to run it

`eager` is a script as it is, `compile` calls `torch.compile(model)`, `reduce-overhead` is its mode of that name,
`passes` is `torch.cuda.make_graphed_callables(model, (x,))`, and `graph` captures the whole step. BackProp's step is
run in the same way. A ratio is followed by what it may be, where a goal was set.
"""

LIMITS = """## Where it falls short, and why

- **GPU in TF32, the MLP**: BackProp's whole step takes {step:.2f} ms there. An iteration takes {iteration:.0f} µs for
  all layers, much of it for four arrays that are read and written between two products. An exact step waits for 500
  pivots, one after another, although the layers do so at the same time.
- **GPU in bf16**: the same holds more strongly. BackProp's products are faster there, a solve's are not. The patches
  of a convolution are unfolded, which takes longer than their product.
- **GPU, the MLP at batch 5000**: bound by FLOPs. Half of S would be enough, but cuBLAS has no such call for products
  in parts.
- **GPU, exact with thousands of features** (ResNet-18, the GPT-2 block): much of a solve by blocks waits for pivots,
  one diagonal block after another. These could be factorised while the rest is still being updated.
- **GPU, convolutions at batch 50**: bound by launches, most of them for a Gram matrix.
- **CPU, multilayer perceptron**: BackProp needs no gradient for the first layer's input. So FLOPs alone come close to
  the goals for one iteration and for an exact step, and everything else that is read and written adds to that.
  Several iterations are solved in the eigenbasis of K: three cost about what FLOPs predict, ten far less. Most of the
  cost of three is K, its eigenvectors, and products with them. On two shared cores a median differs by a few
  hundredths from run to run.
- **CPU, convolutions**: most of the extra time is S, and most of that is products with narrow matrices of cosines. At
  batch 50 the step is bound by calls.
- **CPU, the digits' MLP**: its goals, 1.8 for cg3 and 1.6 for exact, are missed. FLOPs alone would come close to them.
  Small products and factorisations run far below a core's speed, arrays of 100 rows are read some dozens of times for
  three iterations, and every call of torch takes about as long as it computes.
- **Eager and compiled GPU steps**: solves of small layers are replayed as CUDA graphs, so that the host launches a
  handful of kernels for each layer instead of dozens. For the MLP the host still takes longer than its GPU: an eager
  step with cg3 takes {eager:.1f} ms, and {captured:.1f} ms as one CUDA graph. The graphs of solves hold memory for the
  largest of them; the records above count it.
- **GPT-2 in bf16**: bound by the GPU. S of 3,072 features and the copies that border it with the bias take most of the
  time; an exact step also waits for pivots.
- **The cost model counts FLOPs**, weighted by their prices on a GPU, but neither launches nor bytes.
"""


def main() -> None:
    print(INTRODUCTION)
    for name, title, *longer in (
        ("h200", "NVIDIA H200"),
        ("cpu", "Two CPU cores", "cpu-mlp", "cpu-convnet", "cpu-mlp-huge-pages"),
    ):
        record = read(name)
        print(f"## {title}\n")
        print_steps(record)
        print(goals(record["rows"], name))
        for again in longer:
            record = read(again)
            print(environment(record))
            print(goals(record["rows"], name))
    for title, name in (
        ("Two CPU cores, a newer commit and a small network", "cpu-calm"),
        ("H200, bf16 autocast", "h200-bf16"),
        ("H200, both passes in graphs by one line, the optimizer eager", "h200-passes"),
    ):
        print(f"## {title}\n")
        print_steps(read(name))
    print_ways()
    print(MEMORY.format(**most_on_a_cpu()))
    print(over_the_limit())
    print(GROWTH)
    print(SPACES)
    for name in (*SPACES_ON_A_GPU, "cpu-spaces"):
        record = read(name)
        print(environment(record))
        print(spaces(record["rows"]))
        if missing := not_reached(record):
            print(missing)
    print(LIMITS.format(**numbers_of_limits()), end="")


def read(name: str) -> dict:
    """A record, with the rows that have an error apart."""
    record: dict = json.loads((BENCH / f"{name}.json").read_text())
    failed = [row for row in record["rows"] if row.get("error")]
    return record | {"rows": [row for row in record["rows"] if row not in failed], "failed": failed}


def print_ways() -> None:
    """The records of several ways, where there are any."""
    if found := sorted(BENCH.glob("*-ways*.json")):
        print(IN_EVERY_WAY)
    for path in found:
        record = read(path.stem)
        print(environment(record))
        print(ways(record["rows"]))
        print("".join(f"{failure(row)}\n\n" for row in record["failed"]), end="")
        if missing := not_reached(record):
            print(missing)


def ways(rows: list[dict]) -> str:
    """A row a network, precision and way: BackProp's milliseconds, and every method's ratio beside its goal."""
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    found = {(row["network"], row["precision"], row["way"], row["method"]): row for row in rows}
    lines = []
    for place in dict.fromkeys(key[:3] for key in found):
        of = {method: found.get((*place, method), {}) for method in ("backprop", *methods)}
        goals = WAYS_GOALS.get(place, {})
        took = [number(of["backprop"].get("milliseconds"))]
        ratios = [number(of[m].get("ratio")) + (f" ({goals[m]:.2f})" if m in goals else "") for m in methods]
        memory = [number(of[m].get("memory")) for m in ("cg3", "exact") if m in of]
        lines.append([f"{place[0]}, {place[1]}", place[2], *took, *ratios, *memory])
    held = [f"memory, {m}" for m in ("cg3", "exact") if m in methods]
    return table(["network, precision", "way", "BackProp, ms", *methods, *held], lines)


def number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "–"


def failure(row: dict) -> str:
    place = f"{row['network']} in {row['precision']}, {row['way']}, {row['method']}"
    return f"Not timed: {place}: `{row['error']}`"


def print_steps(record: dict) -> None:
    """How a record was made, a table for each precision, and what was not reached."""
    print(environment(record))
    for precision in dict.fromkeys(row["precision"] for row in record["rows"]):
        print(steps([row for row in record["rows"] if row["precision"] == precision], precision))
    if missing := not_reached(record):
        print(missing)


def environment(record: dict) -> str:
    made = record["environment"]
    about = (
        f"{made['device']}, torch {made['torch']}, {made['threads']} threads, commit `{made['commit'][:12]}`"
    )
    return f"{about}: `{record['command']}`\n"


def steps(rows: list[dict], precision: str) -> str:
    """A row a network: BackProp's milliseconds, every method's ratio, and the ratio that FLOPs predict for cg3."""
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        of = {row["method"]: row for row in rows if row["network"] == network}
        ratios = [number(of.get(m, {}).get("ratio")) for m in methods]
        last = [number(of.get("cg3", {}).get(name)) for name in ("predicted", "memory")]
        lines.append([network, number(of["backprop"]["milliseconds"]), *ratios, *last])
    return table([precision, "BackProp, ms", *methods, "FLOPs predict for cg3", "memory, cg3"], lines)


def numbers_of_limits() -> dict[str, float]:
    """Of the MLP: milliseconds of BackProp's step, microseconds of an iteration, and cg3's step eager and captured."""
    rows = read("h200")["rows"]
    took = {
        row["method"]: row["milliseconds"]
        for row in rows
        if (row["network"], row["precision"]) == ("mlp-500", "tf32")
    }
    alone = {"step": took["backprop"], "iteration": 1e3 * (took["cg10"] - took["cg3"]) / 7}
    captured = {(row["network"], row["method"], row["precision"]): row["milliseconds"] for row in rows}
    eager = {(row["way"], row["method"]): row["milliseconds"] for row in read("h200-ways-mlp-fp32")["rows"]}
    return {**alone, "eager": eager["eager", "cg3"], "captured": captured["mlp-500", "cg3", "fp32"]}


def most_on_a_cpu() -> dict[str, object]:
    """The proximal step that takes most memory on a CPU, beside BackProp's."""
    rows = [row for row in read("cpu")["rows"] if row["method"] in PROXIMAL]
    most = max(rows, key=lambda row: row["memory"])
    return {"most": most["memory"], "which": f"{most['network']} {most['method']}"}


def over_the_limit() -> str:
    """Which proximal steps take more memory than they may, in any of the captured records or on a CPU."""
    found = [
        f"{row['network']} {row['method']} in {row['precision']} ({row['memory']:.3f} in {name}.json)"
        for name in ("h200", "h200-bf16", *SPACES_ON_A_GPU, "cpu", "cpu-calm")
        for row in read(name)["rows"]
        if row["method"] in PROXIMAL and row["memory"] > MOST_MEMORY
    ]
    steps = "Captured steps and steps on a CPU that take"
    return f"{steps} over {MOST_MEMORY} times BackProp's memory: {', '.join(found) or 'none'}.\n"


def spaces(rows: list[dict]) -> str:
    """A row a network, precision and solver: the chosen space's ratio to BackProp, and pinned ones' to that."""
    names, lines = ["sample", "feature", "matrix_free"], []
    for network, precision in dict.fromkeys((row["network"], row["precision"]) for row in rows):
        of = {
            row["method"]: row["ratio"]
            for row in rows
            if (row["network"], row["precision"]) == (network, precision)
        }
        for solver in dict.fromkeys(method.split("/")[0] for method in of if "/" in method):
            pinned = [of.get(f"{solver}/{name}") for name in names]
            shown = [f"{ratio / of[solver]:.2f}" if ratio else "–" for ratio in pinned]
            lines.append([f"{network}, {precision}, {solver}", f"{of[solver]:.2f}", *shown])
    return table(["network, precision, solver", "chosen, beside BackProp", *names], lines)


def not_reached(record: dict) -> str:
    """Networks that the command names but that the time did not suffice for, in all precisions or in some."""
    words = record["command"].split()
    networks = [word for word in words if word in NETWORKS]
    precisions = [word for word in words if word in PRECISIONS] or ["fp32"]
    asked = [word for word in words if word in WAYS] or [None]
    found = {
        (row["network"], row["precision"], row.get("way")) for row in [*record["rows"], *record["failed"]]
    }
    if asked == [None]:
        found = {(network, precision, None) for network, precision, _ in found}
    missing = {
        name: [f"{p} {way}" if way else p for p in precisions for way in asked if (name, p, way) not in found]
        for name in networks
    }
    shown = [f"{name} in {' and '.join(lacks)}" for name, lacks in missing.items() if lacks]
    return f"Not reached before the run was ended: {', '.join(shown)}.\n" if shown else ""


def goals(rows: list[dict], machine: str) -> str:
    """What was asked of the paper's two networks, what is measured, and what the paper reports."""
    found = {(row["network"], row["method"], row["precision"]): row for row in rows}
    precisions, lines = list(dict.fromkeys(row["precision"] for row in rows)), []
    for (network, where), wanted in GOALS.items():
        for method, goal in wanted.items() if where == machine else ():
            of = [found[network, method, p] for p in precisions if (network, method, p) in found]
            if not of:
                continue
            measured = [f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})" for row in of]
            paper = str(PAPER[network].get(method, "–"))
            lines.append([f"{network} {method}", f"{goal:.2f}", *measured, paper])
    return table(
        ["batch 500, median and quartiles", "goal", *precisions, "the paper's own code, from its figures"],
        lines,
    )


if __name__ == "__main__":
    main()
