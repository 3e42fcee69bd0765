"""Write docs/scaling.md: a model of a step on many GPUs, its terms fitted to the records under results/.

python benchmarks/scaling.py > docs/scaling.md
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaling_model import Network, Step, Terms, fit, predict
from scaling_shapes import MEASURED, MODELS, Model
from scaling_terms import Record, from_pieces, measured_ratio
from scaling_text import ASSUMED, EXACT, FROM_PIECES, INTRODUCTION, LIMITS
from tables import table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RANKS = (1, 8, 64, 512, 1024)
ASSUMPTION = Network(inside=450e9, between=50e9)
ALONE = Network(inside=1.0, between=1.0)
MODES = (("each batch's S", 0), ("running, update_every=1", 10))
MEASURED_AS = {"deferred": 0, "running-1": 1, "running-10": 10}
"""Timed methods that form S in feature space, and the model's `every` for them."""


def main() -> None:
    half = json.loads((RESULTS / "bench" / "h200-bf16.json").read_text())
    ranks = {n: json.loads((RESULTS / "scaling" / f"gloo-{n}.json").read_text()) for n in (1, 2, 4)}
    record = json.loads((RESULTS / "bench" / "deferred-h200.json").read_text())
    terms = from_pieces(record, half)
    parts = [INTRODUCTION, EXACT, f"## One H200\n\n{FROM_PIECES}", on_one_gpu(record, terms)]
    parts += ["## Processes on one machine\n", on_processes(ranks), ASSUMED]
    parts += [on_many(model, terms) for model in MODELS]
    parts += [LIMITS.format(**limits(terms))]
    print("\n".join(parts), end="")


def source(record: Record) -> str:
    made = record["environment"]
    return f"{made['device']}, torch {made['torch']}, commit `{made['commit'][:12]}`: `{record['command']}`\n"


def on_one_gpu(record: Record, terms: Terms) -> str:
    """The fitted terms, and measured steps beside predicted ones."""
    fits = [
        ["S from rows", terms.gram, "TFLOP/s"],
        ["factorisation", terms.factor, "TFLOP/s"],
        ["solve with a factor", terms.solve, "TFLOP/s"],
        ["product with a kept inverse", terms.product, "TFLOP/s"],
        ["packing and unpacking", terms.pack, "TB/s sent"],
    ]
    rows = [[name, f"{1e6 * t.latency:.0f} µs", f"{t.rate / 1e12:.3g} {unit}"] for name, t, unit in fits]
    text = source(record) + "\n" + table(["term, TF32", "latency", "rate"], rows)
    text += (
        f"\nS of a convolution from autocorrelations is taken as {terms.correlated:.1f} times its FLOPs.\n\n"
    )
    steps = []
    for model in MEASURED:
        for method, every in MEASURED_AS.items():
            ratio = measured_ratio(record, model.name, method)
            predicted = predict(model, terms, ALONE, 1, sharded=False, every=every).ratio
            steps.append([f"{model.name}, {method}", f"{ratio:.2f}", f"{predicted:.2f}"])
    return text + table(["TF32 step over BackProp's", "measured", "the model says"], steps)


def on_processes(ranks: dict[int, Record]) -> str:
    """All-reduce by size and number of ranks, and what summing S adds to a step."""
    found = {
        n: fit([a["bytes"] for a in r["all_reduce"]], [a["milliseconds"] / 1e3 for a in r["all_reduce"]])
        for n, r in ranks.items()
        if n > 1
    }
    rows = [
        [
            f"{n}",
            f"{1e3 * t.latency:.1f} ms",
            f"{t.rate / 1e9:.2g} GB/s",
            f"{2 * (n - 1) * t.rate / 1e9:.2g} GB/s",
        ]
        for n, t in found.items()
    ]
    text = source(ranks[2]) + "\n"
    text += table(["gloo ranks", "latency of an all-reduce", "rate", "past all ranks together"], rows)
    text += (
        "\nRanks on one machine share its memory and two cores, so the rate of each falls as ranks are added. The last "
        "column\nis what moves past all of them together, `2(ranks − 1)` times the bytes.\n\n"
    )
    steps = []
    for n, record in ranks.items():
        of = {(s["width"], s["method"]): s for s in record["steps"]}
        for width in sorted({s["width"] for s in record["steps"]}):
            size = 3 * 4 * (width + 1) * (width + 2) / 2
            sums = 1e3 * found[n](size) if n > 1 else 0.0
            steps.append(
                [
                    f"{n} rank{'s' if n > 1 else ''}, width {width}",
                    f"{of[width, 'backprop']['milliseconds']:.1f}",
                    *(f"{of[width, m]['ratio']:.2f}" for m in ("immediate", "deferred", "running-10")),
                    "{1:+.1f} ({0:+.1f} to {2:+.1f})".format(*of[width, "deferred"]["beyond_immediate"]),
                    f"{sums:.1f}",
                ]
            )
    header = ["step", "BackProp, ms", "immediate", "deferred", "running, update_every=1"]
    text += table([*header, "deferred − immediate, ms", "all-reduce of S predicts, ms"], steps)
    return text + (
        "\nBoth modes solve in feature space here, so they differ only by the sum of S over ranks. The difference is a "
        "median\nover rounds with its quartiles, on two cores shared with other work. If the quartiles include what "
        "the all-reduce\npredicts, nothing more can be said.\n"
    )


def on_many(model: Model, terms: Terms) -> str:
    """Predicted steps of one real model, by number of GPUs."""
    rows = []
    for sharded in (False, True):
        for ranks in RANKS if not sharded else RANKS[1:]:
            steps = [predict(model, terms, ASSUMPTION, ranks, sharded, every) for _, every in MODES]
            rows.append([f"{'FSDP2' if sharded else 'DDP'}, {ranks:,}", *cells(steps)])
    header = ["GPUs", "BackProp, ms", *(f"ratio, {name}" for name, _ in MODES)]
    header += ["gradients sent, GB", "S sent, GB", "state, GB", *(f"S, {name}, GB" for name, _ in MODES)]
    about = f"{model.parameters / 1e6:,.0f} M parameters, BackProp in {model.precision.upper()}"
    return f"### {model.name}\n\n{about}.\n\n{table(header, rows)}"


def cells(steps: list[Step]) -> list[str]:
    first = steps[0]
    plain = 1e3 * (first.plain + first.plain_waits)
    sizes = [first.gradient_bytes, first.system_bytes, first.plain_memory, *(s.system_memory for s in steps)]
    return [
        f"{plain:,.0f}",
        *(f"{s.ratio:.2f}" for s in steps),
        *(f"{size / 1e9:.3g}" for size in sizes),
    ]


def limits(terms: Terms) -> dict[str, str]:
    """Numbers for the text on where it stops paying."""
    resnet, gpt, llama = MODELS
    ethernet = replace(ASSUMPTION, between=1.25e9)

    def ratio(model: Model, ranks: int, sharded: bool, **options: Any) -> str:
        options = {"network": ASSUMPTION, "every": 10, **options}
        return f"{predict(model, terms, ranks=ranks, sharded=sharded, **options).ratio:.2f}"

    memory = predict(llama, terms, ASSUMPTION, 8, sharded=True, every=10).system_memory
    return {
        "resnet": ratio(resnet, 8, True),
        "gpt": ratio(gpt, 8, True),
        "llama": ratio(llama, 8, True),
        "fast": ratio(gpt, 1024, False),
        "strong": ratio(replace(gpt, items=1), 1024, False),
        "batch": ratio(gpt, 8, False, every=0),
        "slow": ratio(gpt, 1024, False, network=ethernet),
        "whole": ratio(llama, 1024, True),
        "sampled": ratio(llama, 1024, True, rows=2048),
        "memory": f"{memory / 1e9:.0f}",
    }


if __name__ == "__main__":
    main()
