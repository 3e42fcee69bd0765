"""Write docs/scaling.md: a model of a step on many GPUs, its terms fitted to the records under results/.

python benchmarks/scaling.py > docs/scaling.md
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaling_model import Network, Step, Term, Terms, fit, gram_seconds, plain_flops, predict, solve_seconds
from scaling_shapes import MEASURED, MODELS, Model
from scaling_text import ASSUMED, EXACT, INTRODUCTION, LIMITS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RANKS = (1, 8, 64, 512, 1024)
ASSUMPTION = Network(inside=450e9, between=50e9)
ALONE = Network(inside=1.0, between=1.0)
MODES = (("each batch's S", 0), ("running, every=10", 10))

Record = dict[str, Any]


def main() -> None:
    measured = json.loads((RESULTS / "bench" / "deferred-h200.json").read_text())
    half = json.loads((RESULTS / "bench" / "h200-bf16.json").read_text())
    ranks = {n: json.loads((RESULTS / "scaling" / f"gloo-{n}.json").read_text()) for n in (1, 2, 4)}
    terms = fitted(measured, half)
    parts = [INTRODUCTION, EXACT, "## One H200\n", on_one_gpu(measured, terms)]
    parts += ["## Processes on one machine\n", on_processes(ranks), ASSUMED]
    parts += [on_many(model, terms) for model in MODELS]
    parts += [LIMITS.format(**limits(terms))]
    print("\n".join(parts), end="")


def fitted(measured: Record, half: Record) -> Terms:
    """The model's terms from the pieces and the steps that were timed in TF32."""
    pieces = [piece for piece in measured["pieces"] if piece["precision"] == "tf32"]
    square = [2.0 * p["features"] ** 2 for p in pieces]

    def term(name: str, work: list[float]) -> Term:
        return fit(work, [p[name] / 1e3 for p in pieces])

    rows = [s * p["samples"] for s, p in zip(square, pieces, strict=True)]
    sent = [4 * p["features"] * (p["features"] + 1) / 2 for p in pieces]
    plain = {
        (model.name, "tf32"): plain_flops(model) / seconds(measured, model.name, "backprop")
        for model in MEASURED
    }
    gpt = next(model for model in MEASURED if model.name.startswith("gpt2"))
    times = {row["method"]: row["milliseconds"] / 1e3 for row in half["rows"] if row["network"] == gpt.name}
    plain[gpt.name, "bf16"] = plain_flops(gpt) / times["backprop"]
    terms = Terms(
        plain=plain,
        gram=term("gram", rows),
        correlated=1.0,
        factor=term("factor", [p["features"] ** 3 / 3 for p in pieces]),
        solve=term("solve", [s * p["features"] for s, p in zip(square, pieces, strict=True)]),
        product=term("plain", rows),
        pack=fit(sent, [(p["pack"] + p["unpack"]) / 1e3 for p in pieces]),
    )
    return with_correlation(terms, measured)


def with_correlation(terms: Terms, measured: Record) -> Terms:
    """How much longer a convolution's S takes than its FLOPs say, from the ResNet's step."""
    model = next(model for model in MEASURED if model.name.startswith("resnet"))
    extra = seconds(measured, model.name, "deferred") - seconds(measured, model.name, "backprop")
    walks = [layer for layer in model.layers if layer.offsets > 1]
    rest = sum(layer.count * solve_seconds(layer, terms, 1, 0) for layer in model.layers)
    rest += sum(
        layer.count * gram_seconds(layer, model.items, terms) for layer in model.layers if layer.offsets == 1
    )
    unit = sum(layer.count * gram_seconds(layer, model.items, terms) for layer in walks)
    return Terms(**{**vars(terms), "correlated": max(1.0, (extra - rest) / unit)})


def seconds(record: Record, network: str, method: str, precision: str = "tf32") -> float:
    """A measured step."""
    (found,) = [
        row["milliseconds"]
        for row in record["rows"]
        if (row["network"], row["method"], row["precision"]) == (network, method, precision)
    ]
    return found / 1e3


def table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows]) + "\n"


def source(record: Record) -> str:
    made = record["environment"]
    return f"{made['device']}, torch {made['torch']}, commit `{made['commit'][:12]}`: `{record['command']}`\n"


def on_one_gpu(measured: Record, terms: Terms) -> str:
    """The fitted terms, and measured steps beside predicted ones."""
    fits = [
        ["S from rows, per FLOP", terms.gram, "TFLOP/s"],
        ["factorisation, per FLOP", terms.factor, "TFLOP/s"],
        ["solve with as many outputs as features, per FLOP", terms.solve, "TFLOP/s"],
        ["product with a kept inverse, per FLOP", terms.product, "TFLOP/s"],
        ["packing and unpacking, per byte", terms.pack, "TB/s"],
    ]
    rows = [
        [name, f"{1e6 * t.latency:.0f} µs", f"{t.rate / 1e12:.3g} {unit}", f"{t.error:.0%}"]
        for name, t, unit in fits
    ]
    text = source(measured) + "\n" + table(["term", "latency", "rate", "largest error of the fit"], rows)
    text += f"\nS of a convolution from autocorrelations takes {terms.correlated:.1f} times what its FLOPs say.\n\n"
    steps = []
    for model in MEASURED:
        for method, every in (("deferred", 0), ("running-1", 1), ("running-10", 10)):
            ratio = seconds(measured, model.name, method) / seconds(measured, model.name, "backprop")
            predicted = predict(model, terms, ALONE, 1, sharded=False, every=every).ratio
            steps.append([f"{model.name}, {method}", f"{ratio:.2f}", f"{predicted:.2f}"])
    return text + table(["TF32 step over BackProp's", "measured", "predicted"], steps)


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
        "\nRanks of one machine share its memory and two cores, so that a rank's rate falls as ranks are added; "
        "the last column\nis what moves past all of them together, `2(ranks − 1)` times the bytes.\n\n"
    )
    steps = []
    for n, record in ranks.items():
        of = {(s["width"], s["method"]): s for s in record["steps"]}
        for width in sorted({s["width"] for s in record["steps"]}):
            size = 3 * 4 * (width + 1) * (width + 2) / 2
            sums = 1e3 * found[n](size) if n > 1 else 0.0
            steps.append(
                [
                    f"{n} ranks, width {width}",
                    f"{of[width, 'backprop']['milliseconds']:.1f}",
                    *(f"{of[width, m]['ratio']:.2f}" for m in ("immediate", "deferred", "running-10")),
                    f"{of[width, 'deferred']['milliseconds'] - of[width, 'immediate']['milliseconds']:+.1f}",
                    f"{sums:.1f}",
                ]
            )
    header = ["step", "BackProp, ms", "immediate", "deferred", "running, every=10"]
    text += table([*header, "deferred − immediate, ms", "all-reduce of S predicts, ms"], steps)
    return (
        text + "\nBoth modes solve in feature space here, so that they differ by the sum of S over ranks.\n"
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
