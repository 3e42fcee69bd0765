"""The terms of the model, fitted to what was measured on one GPU in TF32."""

from dataclasses import replace
from typing import Any

from scaling_model import Term, Terms, fit, gram_seconds, plain_flops, solve_seconds
from scaling_shapes import MEASURED

Record = dict[str, Any]

MLP, RESNET, GPT = MEASURED


def from_pieces(record: Record, half: Record) -> Terms:
    """From the pieces of a solve, timed alone by size (`benchmarks/pieces.py`)."""
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

    solves = sum(layer.count * solve_seconds(layer, terms) for layer in RESNET.layers)
    return replace(terms, correlated=max(1.0, (extra - solves - grams(False)) / grams(True)))


def seconds(record: Record, network: str, method: str, precision: str = "tf32") -> float:
    """A measured step."""
    wanted = (network, method, precision)
    (found,) = [r for r in record["rows"] if (r["network"], r["method"], r["precision"]) == wanted]
    return float(found["milliseconds"]) / 1e3


def measured_ratio(record: Record, network: str, method: str) -> float:
    """A measured step over BackProp's."""
    return seconds(record, network, method) / seconds(record, network, "backprop")
