"""The terms of the model, fitted to what was measured on one GPU in TF32."""

from dataclasses import replace
from typing import Any

from scaling_model import Term, Terms, fit, gram_seconds, plain_flops, solve_seconds
from scaling_shapes import MEASURED

Record = dict[str, Any]

MLP, RESNET, GPT = MEASURED
MEMORY = 4.8e12
"""Bytes a second of the H200's memory, by its data sheet."""


def from_pieces(record: Record, half: Record) -> Terms:
    """From the pieces of a solve, timed alone by size (`benchmarks/deferred.py`)."""
    pieces = [piece for piece in record["pieces"] if piece["precision"] == "tf32"]
    squares = [2.0 * p["features"] ** 2 for p in pieces]
    rows = [square * p["samples"] for square, p in zip(squares, pieces, strict=True)]

    def term(work: list[float], *names: str) -> Term:
        return fit(work, [sum(p[name] for name in names) / 1e3 for p in pieces])

    terms = Terms(
        plain=plain_speeds(record, half),
        gram=term(rows, "gram"),
        correlated=1.0,
        factor=term([p["features"] ** 3 / 3 for p in pieces], "factor"),
        solve=term([s * p["features"] for s, p in zip(squares, pieces, strict=True)], "solve"),
        product=term(rows, "plain"),
        pack=term([2.0 * p["features"] * (p["features"] + 1) for p in pieces], "pack", "unpack"),
    )
    return with_correlation(terms, seconds(record, RESNET.name, "deferred"), record)


def from_steps(record: Record, half: Record) -> Terms:
    """From whole steps (`benchmarks/step.py`), where no pieces were timed.

    On the GPT-2 block all methods solve in feature space. Two more iterations of conjugate gradients are two products
    with S; the first one's step less one of them is S; what `Exact` adds to S is its factorisation and solve. The
    narrow MLP's step is latency.
    """
    plain = seconds(record, GPT.name, "backprop")
    product = (seconds(record, GPT.name, "cg3") - seconds(record, GPT.name, "cg1")) / 2
    gram = seconds(record, GPT.name, "cg1") - plain - product
    narrow = "mlp-narrow-2048"
    latency = (seconds(record, narrow, "exact") - seconds(record, narrow, "backprop")) / 3
    rest = seconds(record, GPT.name, "exact") - plain - gram - latency * len(GPT.layers)
    squares = sum(2.0 * n.features**2 * n.outputs for n in GPT.layers)
    rate = (squares + sum(n.features**3 / 3 for n in GPT.layers)) / rest
    rows = sum(2.0 * GPT.items * n.positions * n.features**2 for n in GPT.layers)
    terms = Terms(
        plain=plain_speeds(record, half),
        gram=Term(0.0, rows / gram),
        correlated=1.0,
        factor=Term(latency, rate),
        solve=Term(0.0, rate),
        product=Term(0.0, squares / product),
        pack=Term(0.0, MEMORY / 8),  # both write and read S and its triangle, some of it twice
    )
    return with_correlation(terms, seconds(record, RESNET.name, "exact"), record)


def plain_speeds(record: Record, half: Record) -> dict[tuple[str, str], float]:
    """FLOP/s of BackProp's steps."""
    found = {(m.name, "tf32"): plain_flops(m) / seconds(record, m.name, "backprop") for m in MEASURED}
    return {**found, (GPT.name, "bf16"): plain_flops(GPT) / seconds(half, GPT.name, "backprop", "bf16")}


def with_correlation(terms: Terms, step: float, record: Record) -> Terms:
    """How much longer a convolution's S takes than its FLOPs say, from a proximal step of the ResNet."""
    extra = step - seconds(record, RESNET.name, "backprop")

    def grams(convolved: bool) -> float:
        chosen = [layer for layer in RESNET.layers if (layer.offsets > 1) == convolved]
        return sum(layer.count * gram_seconds(layer, RESNET.items, terms) for layer in chosen)

    solves = sum(layer.count * solve_seconds(layer, terms, 1, 0) for layer in RESNET.layers)
    return replace(terms, correlated=max(1.0, (extra - solves - grams(False)) / grams(True)))


def seconds(record: Record, network: str, method: str, precision: str = "tf32") -> float:
    """A measured step."""
    wanted = (network, method, precision)
    (found,) = [r for r in record["rows"] if (r["network"], r["method"], r["precision"]) == wanted]
    return float(found["milliseconds"]) / 1e3


def measured_ratio(record: Record, network: str, method: str) -> float | None:
    """A measured step over BackProp's; None where it was not timed."""
    if not any((r["network"], r["method"]) == (network, method) for r in record["rows"]):
        return None
    return seconds(record, network, method) / seconds(record, network, "backprop")
