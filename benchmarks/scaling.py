"""Write docs/scaling.md: a model of a step on many GPUs, its terms fitted to the records under results/.

python benchmarks/scaling.py > docs/scaling.md
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaling_model import Network, Step, Terms, fit, predict
from scaling_shapes import MEASURED, MODELS, Model
from scaling_terms import (
    ALONE,
    MEASURED_LATER,
    Record,
    from_pieces,
    later_row,
    later_step,
    measured_ratio,
    with_rest,
)
from scaling_text import (
    ASSUMED,
    BALANCE,
    COUNTED,
    EXACT,
    FROM_PIECES,
    INTRODUCTION,
    LIMITS,
    OWNERS,
    REST,
    TIMED,
)
from tables import table

from proxprop import Running

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RANKS = (1, 8, 64, 512, 1024)
ASSUMPTION = Network(inside=450e9, between=50e9)
MODES: tuple[tuple[str, Running | None], ...] = (("each batch's S", None), ("`Running()`", Running()))
MEASURED_AS: dict[str, Running | None] = {
    "deferred": None,
    "running-1": Running(update_every=1, invert_every=1),
    "running-10": Running(update_every=1, invert_every=10),
    "observe-10": Running(),
}
"""Timed methods that form S in feature space."""


def main() -> None:
    half, record, later = (
        json.loads((RESULTS / "bench" / f"{name}.json").read_text())
        for name in ("h200-bf16", "deferred-h200", "running-h200")
    )
    ranks = {n: json.loads((RESULTS / "scaling" / f"gloo-{n}.json").read_text()) for n in (1, 2, 3, 4)}
    terms = with_rest(from_pieces(record, half), later)
    parts = [INTRODUCTION, EXACT, OWNERS, f"## One H200\n\n{FROM_PIECES}", on_one_gpu(record, later, terms)]
    parts += ["## Processes on one machine\n", on_processes(ranks), ASSUMED]
    parts += [on_many(model, terms) for model in MODELS]
    parts += [balance(terms), LIMITS.format(**limits(terms))]
    print("\n".join(parts), end="")


def source(record: Record) -> str:
    made = record["environment"]
    return f"{made['device']}, torch {made['torch']}, commit `{made['commit'][:12]}`: `{record['command']}`\n"


def on_one_gpu(record: Record, later: Record, terms: Terms) -> str:
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
        for method, running in MEASURED_AS.items():
            ratio = measured_ratio(record, model.name, method)
            predicted = predict(model, terms, ALONE, 1, sharded=False, running=running).ratio
            steps.append([f"{model.name}, {method}", f"{ratio:.2f}", f"{predicted:.2f}"])
    text += table(["eager TF32 step over BackProp's", "measured", "the model says"], steps)
    return f"{text}\n{source(later)}\n{since_then(later, terms)}"


def since_then(record: Record, terms: Terms) -> str:
    """Steps in bf16 that were timed after the pieces, beside predicted ones."""
    rows = []
    for method in MEASURED_LATER:
        step, row = later_step(record, method, terms), later_row(record, method)
        found = f"{row['ratio']:.2f}", f"{step.ratio:.2f}", f"{step.eager_ratio:.2f}"
        rows.append([f"GPT-2 of 12 blocks, {method}", *found])
    text = table(["eager bf16 step over AdamW's", "measured", "the model says", "with the rest"], rows)
    step, observed = (f"{1e3 * seconds:.2f}" for seconds in terms.rest)
    return text + REST.format(step=step, observed=observed)


def on_processes(ranks: dict[int, Record]) -> str:
    """Collectives by size and number of ranks, and what each rank holds, inverts and sends."""
    rows = []
    for n, record in ranks.items():
        if n > 1:
            sizes = [c["bytes"] for c in record["collectives"]]
            for name in ("all_reduce", "reduce", "broadcast"):
                t = fit(sizes, [c[name] / 1e3 for c in record["collectives"]])
                rows.append([f"{n}, {name}", f"{1e3 * t.latency:.1f} ms", f"{t.rate / 1e9:.2g} GB/s"])
    text = source(ranks[2]) + "\n" + table(["gloo ranks", "latency", "rate"], rows) + TIMED
    return text + table(COUNTS, [row for n, record in ranks.items() for row in counted(n, record)]) + COUNTED


COUNTS = [
    "ranks",
    "inverse",
    "averages, kB",
    "averages and inverses, kB",
    "layers inverted",
    "S sent, kB",
    "rest, kB",
]


def counted(ranks: int, record: Record) -> list[list[str]]:
    """What the fullest and busiest rank has, of each way to spread a model."""
    rows = []
    for count in record["counts"]:
        each = count["ranks"]
        sent = [rank["sent"] for rank in each]
        numbers = [
            max(rank["averages"] for rank in each),
            max(rank["held"] for rank in each),
            max(rank["inverted"] for rank in each),
            sum(s["S"] for s in sent) / ranks / record["steps"],
            sum(sum(s.values()) - s["S"] for s in sent) / ranks / record["steps"],
        ]
        kilobytes = [f"{n:,}" if i == 2 else f"{n / 1e3:,.0f}" for i, n in enumerate(numbers)]
        where = "on all ranks" if count["way"] == "inverse" else "on its owner"
        rows.append([f"{ranks}, {count['kind'].upper().replace('FSDP', 'FSDP2')}", where, *kilobytes])
    return rows


def on_many(model: Model, terms: Terms) -> str:
    """Predicted steps of one real model, by number of GPUs."""
    rows = []
    for sharded in (False, True):
        for ranks in RANKS if not sharded else RANKS[1:]:
            steps = [predict(model, terms, ASSUMPTION, ranks, sharded, running) for _, running in MODES]
            rows.append([f"{'FSDP2' if sharded else 'DDP'}, {ranks:,}", *cells(steps)])
    header = ["GPUs", "BackProp, ms", *(f"ratio, {name}" for name, _ in MODES), "eager"]
    header += ["BackProp sends, GB", "`Running()` sends, GB", "state, GB", "S, GB", "S on its way, GB"]
    about = f"{model.parameters / 1e6:,.0f} M parameters, BackProp in {model.precision.upper()}"
    return f"### {model.name}\n\n{about}.\n\n{table(header, rows)}"


def cells(steps: list[Step]) -> list[str]:
    last = steps[-1]
    plain = 1e3 * (last.plain + last.plain_waits)
    sizes = [last.gradient_bytes, last.system_bytes, last.plain_memory, last.state, last.passing]
    return [
        f"{plain:,.0f}",
        *(f"{s.ratio:.2f}" for s in steps),
        f"{last.eager_ratio:.2f}",
        *(f"{size / 1e9:.3g}" for size in sizes),
    ]


def balance(terms: Terms) -> str:
    """How evenly owners share inversions and memory."""
    rows = []
    for model in MODELS:
        found = [predict(model, terms, ASSUMPTION, n, True, Running()).balance for n in RANKS[1:]]
        rows.append([model.name.split(",")[0], *(f"{effort:.1f}, {held:.2f}" for effort, held in found)])
    return BALANCE + table(["longest over mean", *(f"{n:,} GPUs" for n in RANKS[1:])], rows)


def limits(terms: Terms) -> dict[str, str]:
    """Numbers for the text on where it stops paying."""
    _, gpt, llama, _ = MODELS
    ethernet = replace(ASSUMPTION, between=1.25e9)

    def step(model: Model, ranks: int, sharded: bool, **options: Any) -> Step:
        options = {"network": ASSUMPTION, "running": Running(), **options}
        return predict(model, terms, ranks=ranks, sharded=sharded, **options)

    def ratio(*args: Any, **options: Any) -> str:
        return f"{step(*args, **options).ratio:.2f}"

    seven = step(llama, 64, True)
    return {
        "gpt_alone": ratio(gpt, 1, False),
        "gpt": ratio(gpt, 64, False),
        "gpt_sharded": ratio(gpt, 64, True),
        "gpt_eager": f"{step(gpt, 64, False).eager_ratio:.2f}",
        "llama_eager": f"{seven.eager_ratio:.2f}",
        "gpt_half": ratio(replace(gpt, precision="bf16"), 64, False),
        "llama_alone": ratio(llama, 1, False),
        "llama": ratio(llama, 64, True),
        "inverting": f"{100 * seven.parts['inverting'] / seven.plain:.0f}",
        "state": f"{seven.state / 1e9:.2f}",
        "peak": f"{(seven.state + seven.passing) / 1e9:.2f}",
        "observed": ratio(llama, 64, True, running=Running(update_every=1)),
        "sampled": ratio(llama, 64, True, running=Running(update_every=1), rows=2048),
        "strong": ratio(replace(gpt, items=1), 64, False),
        "batch": ratio(gpt, 1, False, running=None),
        "batch_many": ratio(gpt, 64, False, running=None),
        "slow": ratio(gpt, 64, False, network=ethernet),
    }


if __name__ == "__main__":
    main()
