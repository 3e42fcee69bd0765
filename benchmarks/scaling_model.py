"""Time, bytes and memory of one training step by formula; pure functions of shapes and fitted terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from scaling_shapes import Layers, Model

NUMBER = 4
"""Bytes of a float32, in which S is kept, sent and solved."""


@dataclass(frozen=True)
class Term:
    """`latency + work / rate`, in seconds."""

    latency: float
    rate: float
    error: float = 0.0

    def __call__(self, work: float) -> float:
        return self.latency + work / self.rate


def fit(work: Sequence[float], seconds: Sequence[float]) -> Term:
    """The term with the least squares of relative errors, its latency not negative; `error` is the largest one.

    With `s ≈ l + b·w` both sides are divided by s, and l and b come from the normal equations.
    """
    rows = [(1 / s, w / s) for w, s in zip(work, seconds, strict=True)]
    ll, lw, ww = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    l1, w1 = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = ll * ww - lw * lw
    latency = (l1 * ww - w1 * lw) / determinant if determinant else 0.0
    slope = (w1 - max(latency, 0.0) * lw) / ww
    term = Term(max(latency, 0.0), 1 / slope)
    worst = max(abs(term(w) / s - 1) for w, s in zip(work, seconds, strict=True))
    return Term(term.latency, term.rate, worst)


@dataclass(frozen=True)
class Network:
    """What connects GPUs: `gpus` in a node at `inside` bytes a second, nodes at `between` for each GPU."""

    inside: float
    between: float
    gpus: int = 8
    latency: float = 20e-6

    def all_reduce(self, size: float, ranks: int, calls: int = 1) -> float:
        """Seconds for `size` bytes on every rank: reduced inside nodes, between them, and spread inside them.

        A ring of r ranks moves `2(r - 1)/r` of the bytes past each.
        """
        inner = min(ranks, self.gpus)
        nodes = -(-ranks // self.gpus)
        seconds = _ring(inner) * size / self.inside + _ring(nodes) * size / inner / self.between
        return seconds + calls * self.latency * log2(ranks) if ranks > 1 else 0.0


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Terms:
    """What was measured on one GPU.

    Attributes:
        plain: FLOP/s of BackProp, by network and precision.
        gram: S by its FLOPs, from rows.
        correlated: S of a convolution by its FLOPs, from autocorrelations.
        factor: a factorisation, by `features³/3`.
        solve: a solve by its FLOPs, `2·features²·outputs`.
        pack: packing and unpacking, by bytes sent.
        cheap: share of a plain step that remains when a running average is not refreshed; 0 for no overhead.
    """

    plain: dict[tuple[str, str], float]
    gram: Term
    correlated: Term
    factor: Term
    solve: Term
    pack: Term


@dataclass(frozen=True)
class Step:
    """A predicted step on one of many GPUs: seconds, bytes handed to collectives, bytes of memory."""

    plain: float
    gram: float
    solve: float
    gradient_bytes: float
    system_bytes: float
    exposed: float
    plain_exposed: float
    plain_memory: float
    system_memory: float

    @property
    def ratio(self) -> float:
        """To BackProp's step on as many GPUs."""
        return (self.plain + self.gram + self.solve + self.exposed) / (self.plain + self.plain_exposed)


def gram_flops(layer: Layers, items: int) -> float:
    """FLOPs of S; from autocorrelations where the layer is a convolution with stride 1."""
    samples = items * layer.positions
    if layer.offsets == 1:
        return 2.0 * samples * layer.features**2
    channels = layer.features / layer.offsets
    return 3.0 * samples * channels**2 + 2.5 * samples * channels * log2(layer.positions)


def system_numbers(model: Model) -> float:
    """Numbers of all packed S."""
    return sum(layer.count * layer.features * (layer.features + 1) / 2 for layer in model.layers)


def predict(
    model: Model, terms: Terms, network: Network, ranks: int, sharded: bool, every: int = 1, rows: int = 0
) -> Step:
    """One step with S of every batch (`every=1`), or of a running average refreshed every so many steps.

    Args:
        model: shapes and batch.
        terms: measured on one GPU.
        network: assumed.
        ranks: how many GPUs, all data-parallel.
        sharded: FSDP2 rather than DDP: parameters are gathered twice and each rank solves its own rows.
        every: steps between refreshes; S is formed, sent and factorised once in so many steps.
        rows: most samples that S is formed from; 0 for all.
    """
    plain = 6 * sum(_samples(layer, model) * layer.features * layer.outputs for layer in model.layers)
    plain /= terms.plain[model.like, model.precision]
    share = ranks if sharded else 1
    gram = sum(layer.count * _gram(layer, model, terms, rows) for layer in model.layers) / every
    factor = sum(layer.count * terms.factor(layer.features**3 / 3) for layer in model.layers) / every
    solve = sum(
        layer.count * terms.solve(2.0 * layer.features**2 * layer.outputs / share) for layer in model.layers
    )
    system = NUMBER * system_numbers(model)
    pack = terms.pack(system) / every if ranks > 1 else 0.0
    width = 2 if model.precision == "bf16" else NUMBER
    gradient = width * model.parameters
    passes = 1.5 if sharded else 1.0  # two gathers and a reduce-scatter are one and a half all-reduces
    backward = plain * 2 / 3
    sent = passes * network.all_reduce(gradient, ranks, calls=24)
    sums = network.all_reduce(system, ranks, calls=max(1, int(system / 25e6))) / every
    state = 16 * model.parameters / share + (0 if share == 1 else width * model.parameters / 32)
    return Step(
        plain=plain,
        gram=gram,
        solve=factor + solve + pack,
        gradient_bytes=passes * gradient if ranks > 1 else 0.0,
        system_bytes=system / every if ranks > 1 else 0.0,
        exposed=max(0.0, sent - backward) + sums,
        plain_exposed=max(0.0, sent - backward),
        plain_memory=state,
        system_memory=NUMBER * sum(layer.count * layer.features**2 for layer in model.layers),
    )


def _samples(layer: Layers, model: Model) -> float:
    return layer.count * model.items * layer.positions


def _gram(layer: Layers, model: Model, terms: Terms, rows: int) -> float:
    flops = gram_flops(layer, model.items)
    if rows:
        flops *= min(1.0, rows / (model.items * layer.positions))
    return (terms.gram if layer.offsets == 1 else terms.correlated)(flops)
