"""The terms of the model, fitted to what was measured on one GPU."""

from dataclasses import replace
from typing import Any

from scaling_model import Network, Step, Term, Terms, fit, gram_seconds, plain_flops, predict, solve_seconds
from scaling_shapes import GPT2_SMALL, MEASURED

from proxprop import Running

Record = dict[str, Any]

MLP, RESNET, GPT = MEASURED
ALONE = Network(inside=1.0, between=1.0)
MEASURED_LATER = {
    "every 10": Running(),
    "every 32": Running(update_every=32, invert_every=32),
    "S of every step": Running(update_every=1, invert_every=10),
}
"""Methods timed since layers between observed steps are torch's own."""


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


def later_row(record: Record, method: str) -> Record:
    """A measured eager step of the GPT."""
    wanted = (GPT2_SMALL.name, "eager", method)
    (found,) = [row for row in record["rows"] if (row["network"], row["way"], row["method"]) == wanted]
    return dict(found)


def later_step(record: Record, method: str, terms: Terms) -> Step:
    """What the model says of that step, given BackProp's."""
    speed = plain_flops(GPT2_SMALL) / (later_row(record, method)["plain"] / 1e3)
    known = replace(terms, plain={**terms.plain, (GPT2_SMALL.like, GPT2_SMALL.precision): speed})
    return predict(GPT2_SMALL, known, ALONE, 1, sharded=False, running=MEASURED_LATER[method])


def with_rest(terms: Terms, record: Record) -> Terms:
    """What the parts leave of measured eager steps: `a + b·f` for each layer, with f the share of observed steps."""
    layers = sum(layer.count for layer in GPT2_SMALL.layers)
    points = []
    for method, running in MEASURED_LATER.items():
        row, step = later_row(record, method), later_step(record, method, terms)
        points.append((1 / running.update_every, (row["ratio"] - step.ratio) * step.plain / layers))
    mean = [sum(values) / len(points) for values in zip(*points, strict=True)]
    slope = sum((f - mean[0]) * (r - mean[1]) for f, r in points) / sum((f - mean[0]) ** 2 for f, _ in points)
    return replace(terms, rest=(max(mean[1] - slope * mean[0], 0.0), slope))


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
