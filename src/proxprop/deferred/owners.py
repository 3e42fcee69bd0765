"""Which rank owns which layers' statistics, and what travels between an owner and the others.

A layer's S is summed on one rank, its owner, which alone keeps the average and inverts it. Then either the inverse goes
to all ranks, once each time that it is made anew, or in every step the gradient comes to the owner and the direction
goes back. Owners, turns and ways follow from shapes and names by pure functions: ranks come to the same answers
without asking each other, and compare them once.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any, Literal

import torch

from proxprop.deferred.collectives import Group, packed_size
from proxprop.deferred.equation import Equation
from proxprop.distributed import cut_dimension, cuts, mesh_of
from proxprop.solvers import Exact
from proxprop.transfer import Shapes

if TYPE_CHECKING:
    from proxprop.deferred.average import Running
    from proxprop.deferred.observing import Cluster
    from proxprop.deferred.reduction import Ranks

Way = Literal["inverse", "gradient"]


@dataclass(frozen=True)
class Load:
    """What one layer's statistics take, or those of several that share parameters.

    Attributes:
        name: the layer's name.
        held: bytes of the average and the inverse on the owner.
        effort: how long the inversion takes, in any unit.
        turn: in which of the steps between two inversions it is inverted.
        matrix: bytes of the inverse as it is sent.
        copy: bytes of the inverse on a rank that is not the owner.
        gradient: bytes of the gradients.
        refresh: steps from one inverse to the next.
        bound: why only one way is possible; empty where both are.
        only: the only way.
    """

    name: str
    held: int
    effort: float = 0.0
    turn: int = 0
    matrix: int = 0
    copy: int = 0
    gradient: int = 0
    refresh: int = 1
    bound: str = ""
    only: Way = "gradient"


@dataclass(frozen=True)
class Route:
    """How directions are made on all ranks from an inverse that one of them made.

    Attributes:
        way: "inverse" sends the inverse to all ranks, "gradient" the gradient to the owner and the direction back.
        bytes: how many bytes this moves in a step, on average and over all ranks together.
        why: the reason, for people.
    """

    way: Way
    bytes: float
    why: str


def turns(
    costs: Sequence[float], update_every: int, invert_every: int, together: Sequence[int] | None = None
) -> list[int]:
    """In which of the steps between two inversions each layer is inverted, such that these take about as long.

    Steps that form S have a share of the work with that. Small matrices, which cost nothing here, are inverted
    together, in the first of these steps: that takes a few calls, however many there are. Turns do not depend on the
    number of ranks, so that ranks take the steps of one process.

    Args:
        costs: how long each inversion takes, in any unit.
        update_every, invert_every: as of `Running`.
        together: how many layers that cost as much are inverted at a time, where that is faster; None for one.

    Example:
        >>> turns([5.0, 3.0, 2.0, 0.0], update_every=1, invert_every=2)
        [0, 1, 1, 0]
        >>> turns([5.0, 5.0, 5.0, 5.0], update_every=1, invert_every=4, together=[3, 3, 3, 3])
        [0, 0, 1, 1]
    """
    share = sum(costs) / invert_every if update_every > 1 else 0.0
    load = [share if step % update_every == 0 else 0.0 for step in range(invert_every)]
    found = [0] * len(costs)
    chunks = [(sum(costs[i] for i in chunk), chunk) for chunk in _chunks(costs, together or [1] * len(costs))]
    for cost, chunk in sorted(chunks, key=lambda chunk: -chunk[0]):
        turn = load.index(min(load)) if cost else 0
        load[turn] += cost
        for index in chunk:
            found[index] = turn
    return found


def _chunks(costs: Sequence[float], together: Sequence[int]) -> Iterator[Sequence[int]]:
    """Layers that have a turn in common: of those that cost as much, about as many in each."""
    ordered = sorted(range(len(costs)), key=lambda i: (-costs[i], together[i]))
    for _, group in groupby(ordered, key=lambda i: (costs[i], together[i])):
        alike = list(group)
        count = -(-len(alike) // together[alike[0]])
        size = -(-len(alike) // count)
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


SLACK = 1.1
"""How much more than the mean a rank may hold for the sake of its time."""


def assign(loads: Sequence[Load], ranks: int) -> list[int]:
    """The owner of each load.

    Largest first, each goes to the rank that has least to invert in the same step, and of these to the one that holds
    least. A rank that would then hold over a tenth more than the mean comes last. So memory, and the inversions of
    every step, are shared out alike.

    Example:
        >>> assign([Load("a", held=4), Load("b", held=3), Load("c", held=2)], ranks=2)
        [0, 1, 1]
    """
    effort, held = Counter[tuple[int, int]](), [0] * ranks
    limit = SLACK * sum(load.held for load in loads) / ranks
    owners = [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: (-loads[i].effort, -loads[i].held, i)):
        owner = min(range(ranks), key=partial(_burden, loads[index], effort, held, limit))
        owners[index] = owner
        effort[owner, loads[index].turn] += loads[index].effort  # type: ignore[assignment]
        held[owner] += loads[index].held
    return owners


def _burden(load: Load, effort: Counter[tuple[int, int]], held: list[int], limit: float, rank: int) -> Any:
    """What to compare ranks by."""
    full = held[rank] + load.held > limit
    return full, held[rank] if full else 0, effort[rank, load.turn], held[rank], rank


def moved(load: Load, way: Way, ranks: int, shards: int = 1) -> float:
    """Bytes that one way moves in a step, on average and over all ranks together.

    An inverse goes to all ranks but the owner. A gradient comes from the other shards of one copy of the model, and
    the direction goes to every rank's shard but the owner's own.

    Example:
        >>> load = Load("a", held=0, matrix=800, gradient=100, refresh=10)
        >>> moved(load, "inverse", ranks=4), moved(load, "gradient", ranks=4)
        (240.0, 300.0)
        >>> moved(load, "gradient", ranks=4, shards=4)
        150.0
    """
    others = ranks - 1
    if way == "inverse":
        return others * load.matrix / load.refresh
    return (shards - 1 + others) / shards * load.gradient


def routes(loads: Sequence[Load], copies: float, ranks: int, shards: int = 1) -> list[Route]:
    """The way that moves fewer bytes for each load, as long as copies of inverses fit.

    Args:
        loads: of all layers.
        copies: most bytes of copies of inverses on a rank; those that save most traffic for their memory come first.
        ranks: how many share the batch.
        shards: how many a parameter is cut into; 1 where each rank holds all of it.

    Example:
        >>> loads = [Load(name, 0, matrix=8, copy=16, gradient=100, refresh=10) for name in "ab"]
        >>> for route in routes(loads, copies=20, ranks=2):
        ...     print(route.way, route.why)
        inverse its inverse moves 0.8 B a step, its gradient would 100 B
        gradient its inverse would move fewer bytes, but copies of inverses may take 20 B
    """
    found = {i: _route(load, ranks, shards) for i, load in enumerate(loads)}
    free = [i for i, route in found.items() if route.way == "inverse" and not loads[i].bound]
    saved = {i: moved(loads[i], "gradient", ranks, shards) - found[i].bytes for i in free}
    room = copies
    for i in sorted(free, key=lambda i: (-saved[i] / max(loads[i].copy, 1), i)):
        if loads[i].copy <= room:
            room -= loads[i].copy
            continue
        why = f"its inverse would move fewer bytes, but copies of inverses may take {in_units(copies)}"
        found[i] = Route("gradient", moved(loads[i], "gradient", ranks, shards), why)
    return [found[i] for i in range(len(loads))]


def _route(load: Load, ranks: int, shards: int) -> Route:
    inverse, gradient = (moved(load, way, ranks, shards) for way in ("inverse", "gradient"))
    if load.bound:
        return Route(load.only, inverse if load.only == "inverse" else gradient, load.bound)
    if inverse < gradient:
        why = f"its inverse moves {in_units(inverse)} a step, its gradient would {in_units(gradient)}"
        return Route("inverse", inverse, why)
    why = (
        f"its gradient and direction move {in_units(gradient)} a step, its inverse would {in_units(inverse)}"
    )
    return Route("gradient", gradient, why)


def in_units(size: float) -> str:
    """Bytes in a unit that suits them.

    Example:
        >>> in_units(2048)
        '2 KiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def load_of(cluster: "Cluster", running: "Running | None", turn: int = 0) -> Load:
    """What a cluster's statistics take."""
    leaves = [system.leaves[0] for system in cluster.systems if system.leaves and system.usual]
    exact = isinstance(cluster.systems[0].layer._settings.solver, Exact)
    dtype = running.inverse_dtype if running is not None and exact else None
    sizes = [(leaf, (dtype or leaf.dtype).itemsize) for leaf in leaves]
    copy = sum(leaf.numel() * size for leaf, size in sizes)
    S = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    only, bound = _only_way(cluster, running)
    return Load(
        cluster.name,
        held=S + copy if running is not None else S,
        effort=cluster.cost,
        turn=turn,
        matrix=sum(packed_size(leaf.shape) * size for leaf, size in sizes),
        copy=copy,
        gradient=sum(p.numel() * p.element_size() for p in cluster.parameters),
        refresh=running.invert_every if running is not None else 1,
        bound=bound,
        only=only,
    )


def _only_way(cluster: "Cluster", running: "Running | None") -> tuple[Way, str]:
    """The only way that directions can come from an owner, and why; no reason where both ways are possible."""
    if not any(system.trained for system in cluster.systems):
        return "gradient", "it is not trained yet"
    if any(system.trained and system.is_diagonal for system in cluster.systems):
        return "inverse", "its S is a diagonal, and sent as one"
    if running is None:
        return "gradient", "its S is another one in each step, and solved with by its owner alone"
    spread = mesh_of(cluster.parameters[0]) is not None
    if spread and not (len(cluster.systems) == 1 and by_outputs(cluster.systems[0])):
        return "gradient", "its shards are not whole outputs that could be turned alone"
    return "gradient", ""


def settle(clusters: Sequence["Cluster"], ranks: "Ranks", running: "Running | None") -> None:
    """Give every cluster its ranks, its turn, its owner and its route, the same on all ranks.

    Raises:
        RuntimeError: ranks differ in their layers.
    """
    found = {cluster: ranks.group_of(cluster.parameters[0]) for cluster in clusters}
    for group in dict.fromkeys(found.values()):
        own = [cluster for cluster in clusters if found[cluster] is group]
        slots = [0] * len(own)
        if running is not None and running.damping is not None:
            costs, together = [cluster.cost for cluster in own], [cluster.together for cluster in own]
            slots = turns(costs, running.update_every, running.invert_every, together)
        if group is None:
            for cluster, turn in zip(own, slots, strict=True):
                cluster.settle(turn)
            continue
        loads = [load_of(cluster, running, turn) for cluster, turn in zip(own, slots, strict=True)]
        refuse_different(group, loads)
        owners = assign(loads, group.ranks)
        copies = running.copies if running is not None else 0.0
        ways = routes(loads, copies, group.ranks, cuts(own[0].parameters[0]))
        for cluster, turn, owner, route in zip(own, slots, owners, ways, strict=True):
            cluster.settle(turn, owner, route, group)


def refuse_different(group: Group, loads: Sequence[Load]) -> None:
    """Raise RuntimeError where ranks do not have the same layers to share out."""
    mine = zlib.crc32(repr(loads).encode())
    if len(set(group.everyones(mine))) == 1:
        return
    first, *others = group.everyones(loads)
    for rank, theirs in enumerate(others, 1):
        for one, other in zip_longest(first, theirs):
            if one != other:
                raise RuntimeError(
                    f"ranks share out different layers: on rank 0 of the group there is {one}, on rank {rank} {other}. "
                    "Build, freeze and convert the model alike on all ranks before proxprop.attach"
                )


def by_outputs(equation: Equation) -> bool:
    """Whether shards are whole outputs, each with all of its features, that can be solved alone.

    Every rank must come to the same answer, so it is about one row and not about the shard that a rank has.
    """
    if not getattr(equation.layer._settings.solver, "per_output", True):
        return False
    blocks = equation.trained_blocks
    # shards of a parameter do not follow a slice of it
    if not all(b is None or (b.whole and _sharded_dimension(b.parameter) == 0) for b in blocks):
        return False
    row: Shapes = [torch.Size([1, *b.shape[1:]]) if b is not None else None for b in blocks]
    whole, single = equation.layout.sizes, equation.layout_of(row).sizes
    return (whole.groups, single.groups, single.features, single.outputs) == (1, 1, whole.features, 1)


def _sharded_dimension(parameter: Any) -> int | None:
    """The dimension that a DTensor is cut along; None where there is not just one."""
    cut = {cut_dimension(placement) for placement in parameter.placements} - {None}
    return cut.pop() if len(cut) == 1 else None
