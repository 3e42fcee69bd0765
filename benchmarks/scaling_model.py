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
        plain: FLOP/s of whole BackProp steps, by network and precision.
        gram: S from its rows, by `2·samples·features²` FLOPs.
        correlated: how many times as long S of a convolution takes, by its FLOPs, from autocorrelations.
        factor: a factorisation, by `features³/3` FLOPs.
        solve: a solve with a factor, by `2·features²·outputs` FLOPs.
        product: a product with an inverse that was kept, by its FLOPs.
        pack: packing and unpacking, by bytes sent.
    """

    plain: dict[tuple[str, str], float]
    gram: Term
    correlated: float
    factor: Term
    solve: Term
    product: Term
    pack: Term


@dataclass(frozen=True)
class Step:
    """A predicted step on one of many GPUs.

    Attributes:
        plain: seconds of BackProp's arithmetic.
        extra: seconds of ProxProp's arithmetic.
        plain_waits, waits: seconds that collectives take beyond what backward hides, without and with S.
        gradient_bytes, system_bytes: handed to collectives by each GPU.
        plain_memory, system_memory: bytes for parameters, gradients and Adam's moments, and for S.
    """

    plain: float
    extra: float
    plain_waits: float
    waits: float
    gradient_bytes: float
    system_bytes: float
    plain_memory: float
    system_memory: float

    @property
    def seconds(self) -> float:
        return self.plain + self.extra + self.waits

    @property
    def ratio(self) -> float:
        """To BackProp's step on as many GPUs."""
        return self.seconds / (self.plain + self.plain_waits)


def plain_flops(model: Model) -> float:
    """`6·samples·features·outputs` over converted layers, and the last one."""
    flops = sum(n.count * n.positions * n.features * n.outputs for n in model.layers)
    return 6.0 * model.items * (flops + model.last)


def gram_seconds(layer: Layers, items: int, terms: Terms, rows: int = 0) -> float:
    """S of one layer; from autocorrelations where it is a convolution with stride 1."""
    samples = items * layer.positions
    if layer.offsets == 1:
        return terms.gram(2.0 * (min(rows, samples) if rows else samples) * layer.features**2)
    channels = layer.features / layer.offsets
    flops = 3.0 * samples * channels**2 + 2.5 * samples * channels * log2(layer.positions)
    return terms.correlated * terms.gram(flops)


def solve_seconds(layer: Layers, terms: Terms, share: int, every: int) -> float:
    """Factorising and solving for `1/share` of the outputs; an inverse is kept for `every` steps where it is not 0."""
    square = 2.0 * layer.features**2
    factor = terms.factor(layer.features**3 / 3)
    if every == 0:
        return factor + terms.solve(square * layer.outputs / share)
    return (factor + terms.solve(square * layer.features)) / every + terms.product(
        square * layer.outputs / share
    )


def system_numbers(model: Model) -> float:
    """Numbers of all packed S."""
    return sum(n.count * n.features * (n.features + 1) / 2 for n in model.layers)


def predict(
    model: Model, terms: Terms, network: Network, ranks: int, sharded: bool, every: int = 0, rows: int = 0
) -> Step:
    """One step.

    Args:
        model: shapes and batch.
        terms: measured on one GPU.
        network: assumed.
        ranks: how many GPUs, all data-parallel.
        sharded: FSDP2 rather than DDP: parameters are gathered twice, each rank solves its own rows, and S is summed
            after backward rather than beside it.
        every: steps between factorisations of a running average; 0 for S of each batch.
        rows: most samples that S is formed from; 0 for all.
    """
    plain = plain_flops(model) / terms.plain[model.like, model.precision]
    share = ranks if sharded else 1
    extra = sum(
        layer.count
        * (gram_seconds(layer, model.items, terms, rows) + solve_seconds(layer, terms, share, every))
        for layer in model.layers
    )
    system = NUMBER * system_numbers(model)
    sums = network.all_reduce(system, ranks, calls=max(1, round(system / 25e6)))
    extra += terms.pack(system) if ranks > 1 else 0.0
    width = 2 if model.precision == "bf16" else NUMBER
    gradient = (1.5 if sharded else 1.0) * width * model.parameters  # three halves of an all-reduce
    sent = network.all_reduce(gradient, ranks, calls=max(1, round(gradient / 25e6)))
    backward = plain * 2 / 3
    waits = max(0.0, sent - backward) + sums if sharded else max(0.0, sent + sums - backward)
    squares = NUMBER * sum(n.count * n.features**2 for n in model.layers)
    batch = 1.0 if sharded or ranks == 1 else 0.5  # DDP sends it, packed, while backward runs
    copies = batch + (2 if every else 0)
    return Step(
        plain=plain,
        extra=extra,
        plain_waits=max(0.0, sent - backward),
        waits=waits,
        gradient_bytes=gradient if ranks > 1 else 0.0,
        system_bytes=system if ranks > 1 else 0.0,
        plain_memory=16 * model.parameters / share,
        system_memory=copies * squares,
    )
