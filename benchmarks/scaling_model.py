"""Time, bytes and memory of one training step by formula; pure functions of shapes and fitted terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from scaling_shapes import Layers, Model

from proxprop import Running
from proxprop.deferred.owners import Load, assign, moved, routes, turns

NUMBER = 4
"""Bytes of a float32, in which S is kept, sent and solved."""

BUCKET = 25 * 2**20
"""Bytes of S, or of gradients, that are sent in one call."""


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

    def one_way(self, size: float, ranks: int) -> float:
        """Seconds to reduce `size` bytes of every rank to owners, or to bring them from owners to all ranks.

        Half an all-reduce: a ring of r ranks moves `(r - 1)/r` of the bytes past each, inside nodes and, an eighth of
        them on each GPU, between nodes.
        """
        inner, nodes = min(ranks, self.gpus), -(-ranks // self.gpus)
        seconds = (inner - 1) / inner * size / self.inside
        seconds += (nodes - 1) / nodes * size / inner / self.between
        calls = max(1, round(size / BUCKET)) if size else 0
        return seconds + calls * self.latency * log2(ranks)

    def exchange(self, size: float, ranks: int) -> float:
        """Seconds for every rank to send `size` bytes in all, as much to each of the others."""
        if ranks == 1 or not size:
            return 0.0
        inner = min(ranks, self.gpus)
        near = (inner - 1) / (ranks - 1)
        return size * (near / self.inside + (1 - near) / self.between) + ranks * self.latency / 8


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
        pack: packing or unpacking, by bytes sent.
        rest: what eager steps take beyond all that, for each layer, in a step and in an observed step.
    """

    plain: dict[tuple[str, str], float]
    gram: Term
    correlated: float
    factor: Term
    solve: Term
    product: Term
    pack: Term
    rest: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Step:
    """A predicted step on one of many GPUs, on average over the steps between two inversions.

    Attributes:
        plain: seconds of BackProp's arithmetic.
        parts: seconds of each part of ProxProp's arithmetic and sending, on the GPU that takes longest.
        rest: seconds that an eager step takes beyond the parts.
        plain_waits: seconds that BackProp's collectives take beyond what backward hides.
        gradient_bytes, system_bytes: that a GPU sends for BackProp, and for ProxProp.
        plain_memory: bytes for parameters, gradients and Adam's moments.
        state: bytes of averages, inverses and copies of inverses on the fullest GPU.
        passing: bytes of S on its way in a step that observes.
        balance: longest over mean, of a step's inversions and of what owners hold.
    """

    plain: float
    parts: dict[str, float]
    rest: float
    plain_waits: float
    gradient_bytes: float
    system_bytes: float
    plain_memory: float
    state: float
    passing: float
    balance: tuple[float, float]

    @property
    def ratio(self) -> float:
        """To BackProp's step on as many GPUs."""
        before = self.plain + self.plain_waits
        return (before + sum(self.parts.values())) / before

    @property
    def eager_ratio(self) -> float:
        """The same of an eager step."""
        return self.ratio + self.rest / (self.plain + self.plain_waits)


def plain_flops(model: Model) -> float:
    """`6·samples·features·outputs` over converted layers, and the last one."""
    flops = sum(n.count * n.positions * n.inputs * n.outputs for n in model.layers)
    return 6.0 * model.items * (flops + model.last)


def gram_seconds(layer: Layers, items: int, terms: Terms, rows: int = 0) -> float:
    """S of one input; from autocorrelations where it is that of a convolution with stride 1."""
    samples = items * layer.positions
    if layer.offsets == 1:
        return terms.gram(2.0 * (min(rows, samples) if rows else samples) * layer.numbers)
    channels = layer.features / layer.offsets
    flops = 3.0 * samples * channels**2 + 2.5 * samples * channels * log2(layer.positions)
    return terms.correlated * terms.gram(flops)


def solve_seconds(layer: Layers, terms: Terms) -> float:
    """Factorising S and solving for all outputs."""
    square, one = 2.0 * layer.features**2, layer.features**3 / 3
    return terms.factor(layer.blocks * one) + terms.solve(layer.blocks * square * layer.outputs)


def inverse_seconds(layer: Layers, terms: Terms) -> float:
    """Inverting S."""
    square, one = 2.0 * layer.features**2, layer.features**3 / 3
    return terms.factor(layer.blocks * one) + terms.solve(layer.blocks * square * layer.features)


def system_numbers(model: Model) -> float:
    """Numbers of all packed S."""
    return sum(n.count * n.blocks * n.features * (n.features + 1) / 2 for n in model.layers)


def each(model: Model) -> list[Layers]:
    """Every layer alone."""
    return [layer for layer in model.layers for _ in range(layer.count)]


def loads(model: Model, running: Running | None) -> list[Load]:
    """What the library's own functions share out."""
    layers = each(model)
    efforts = [float(layer.blocks * layer.features**3) for layer in layers]
    slots = [0] * len(layers)
    if running is not None:
        slots = turns(efforts, running.update_every, running.invert_every)
    half = running is not None and running.inverse_dtype is not None
    size = 2 if half else NUMBER
    return [
        Load(
            f"{index}",
            held=layer.numbers * (NUMBER + size) if running is not None else layer.numbers * NUMBER,
            effort=effort,
            turn=slot,
            matrix=size * layer.blocks * layer.features * (layer.features + 1) // 2,
            copy=size * layer.numbers,
            gradient=NUMBER * layer.inputs * layer.outputs,
            refresh=running.invert_every if running is not None else 1,
            bound="" if running is not None else "solved by its owner",
        )
        for index, (layer, effort, slot) in enumerate(zip(layers, efforts, slots, strict=True))
    ]


def longest(work: Sequence[float], owners: Sequence[int]) -> float:
    """What the owner with most to do has."""
    found: dict[int, float] = {}
    for seconds, owner in zip(work, owners, strict=True):
        found[owner] = found.get(owner, 0.0) + seconds
    return max(found.values(), default=0.0)


def in_turns(work: Sequence[float], owners: Sequence[int], given: Sequence[Load]) -> float:
    """What all steps between two inversions take, each as long as its busiest owner."""
    slots: dict[int, list[int]] = {}
    for index, load in enumerate(given):
        slots.setdefault(load.turn, []).append(index)
    return sum(longest([work[i] for i in slot], [owners[i] for i in slot]) for slot in slots.values())


@dataclass(frozen=True)
class Shared:
    """A model's statistics over ranks, shared out by the library's own functions.

    Attributes:
        layers: every layer alone, with its load, owner and whether its inverse goes to all ranks.
    """

    layers: Sequence[Layers]
    given: Sequence[Load]
    owners: Sequence[int]
    near: Sequence[bool]
    ranks: int
    shards: int
    running: Running | None

    @classmethod
    def of(cls, model: Model, running: Running | None, ranks: int, shards: int) -> "Shared":
        given = loads(model, running)
        ways = routes(given, running.copies if running is not None else 0.0, ranks, shards)
        near = [route.way == "inverse" or ranks == 1 for route in ways]
        return cls(each(model), given, assign(given, ranks), near, ranks, shards, running)

    def sent(self, what: str, near: bool) -> float:
        """Bytes of one kind, of layers whose inverse does or does not go to all ranks."""
        return sum(
            getattr(load, what) for load, here in zip(self.given, self.near, strict=True) if here == near
        )

    def products(self, terms: Terms) -> float:
        """Products with inverses: of all ranks' own outputs, and of owners with all outputs."""
        work = [terms.product(2.0 * layer.numbers * layer.outputs) for layer in self.layers]
        pairs = list(zip(work, self.owners, self.near, strict=True))
        together = sum(seconds / self.shards for seconds, _, near in pairs if near)
        own = [(seconds, owner) for seconds, owner, near in pairs if not near]
        return together + longest([seconds for seconds, _ in own], [owner for _, owner in own])

    def turning(self, terms: Terms) -> dict[str, float]:
        """Seconds of inversions and products, or of solves."""
        if self.running is None:
            return {"solving": longest([solve_seconds(layer, terms) for layer in self.layers], self.owners)}
        inverses = [inverse_seconds(layer, terms) for layer in self.layers]
        inverting = in_turns(inverses, self.owners, self.given) / self.running.invert_every
        return {"inverting": inverting, "products": self.products(terms)}

    def sending(self, network: Network) -> dict[str, float]:
        """Seconds for inverses, and for gradients and directions."""
        ranks, shards = self.ranks, self.shards
        if ranks == 1:
            return {}
        refresh = self.running.invert_every if self.running is not None else 1
        directions = self.sent("gradient", near=False)
        across = 2 * network.exchange(directions / ranks, ranks)
        return {
            "sending inverses": network.one_way(self.sent("matrix", near=True), ranks) / refresh,
            "sending directions": across if shards > 1 else network.one_way(directions, ranks),
        }

    def traffic(self) -> float:
        """Bytes that a rank sends in a step beside S."""
        pairs = zip(self.given, self.near, strict=True)
        total = sum(
            moved(load, "inverse" if near else "gradient", self.ranks, self.shards) for load, near in pairs
        )
        return total / self.ranks

    def state(self) -> float:
        """Bytes on the fullest rank."""
        if self.running is None:
            return 0.0
        copies = self.sent("copy", near=True) if self.ranks > 1 else 0.0
        return longest([load.held for load in self.given], self.owners) + copies

    def balance(self) -> tuple[float, float]:
        """Longest over mean, of inversions in a step and of what owners hold."""
        efforts, held = [load.effort for load in self.given], [load.held for load in self.given]
        ranks = self.ranks
        busiest = in_turns(efforts, self.owners, self.given)
        return ranks * busiest / sum(efforts), ranks * longest(held, self.owners) / sum(held)


def predict(
    model: Model,
    terms: Terms,
    network: Network,
    ranks: int,
    sharded: bool,
    running: Running | None = None,
    rows: int = 0,
) -> Step:
    """One step.

    Args:
        model: shapes and batch.
        terms: measured on one GPU.
        network: assumed.
        ranks: how many GPUs, all data-parallel.
        sharded: FSDP2 rather than DDP: parameters are gathered twice.
        running: how S is averaged; None for S of each batch.
        rows: most samples that S is formed from; 0 for all.
    """
    plain = plain_flops(model) / terms.plain[model.like, model.precision]
    shared = Shared.of(model, running, ranks, shards=ranks if sharded else 1)
    observed = 1 / running.update_every if running is not None else 1.0
    system = NUMBER * system_numbers(model)
    width = 2 if model.precision == "bf16" else NUMBER
    gradient = (1.5 if sharded else 1.0) * width * model.parameters  # three halves of an all-reduce
    sent, backward = 2 * network.one_way(gradient, ranks), plain * 2 / 3
    waits = max(0.0, sent - backward)
    parts = {"S": observed * sum(n.seen * gram_seconds(n, model.items, terms, rows) for n in model.layers)}
    if ranks > 1:
        late = max(0.0, sent + network.one_way(system, ranks) - backward) - waits
        parts |= {"sending S": observed * late, "packing": observed * terms.pack(system)}
    squares = [NUMBER * layer.numbers for layer in shared.layers]
    return Step(
        plain=plain,
        parts={**parts, **shared.turning(terms), **shared.sending(network)},
        rest=len(shared.layers) * (terms.rest[0] + observed * terms.rest[1]),
        plain_waits=waits,
        gradient_bytes=gradient if ranks > 1 else 0.0,
        system_bytes=observed * system * (ranks - 1) / ranks + shared.traffic(),
        plain_memory=16 * model.parameters / shared.shards,
        state=shared.state(),
        passing=1.5 * max(squares) + system / ranks if ranks > 1 else sum(squares),
        balance=shared.balance(),
    )
