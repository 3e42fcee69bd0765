"""Directions on all ranks from operators that one of them owns."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from proxprop.deferred.average import Entry, Running
from proxprop.deferred.collectives import Group, packed_size
from proxprop.deferred.gradients import Cluster, Pair
from proxprop.deferred.owners import Load, Place, Spread, Way, assign, routes, turns
from proxprop.deferred.preconditioner import borrowed
from proxprop.deferred.reduction import Ranks
from proxprop.deferred.writer import Directions, by_outputs, direct
from proxprop.distributed import box, cut_dimension, cuts, local, mesh_of
from proxprop.solvers import DIAGONAL, Exact

Pairs = Mapping[Cluster, Sequence[Pair]]


def load_of(cluster: Cluster, running: Running | None, turn: int = 0) -> Load:
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


def _only_way(cluster: Cluster, running: Running | None) -> tuple[Way, str]:
    """The only way that directions can come from an owner, and why; no reason where both ways are possible."""
    if not any(system.trained for system in cluster.systems):
        return "gradient", "it is not trained yet"
    if any(system.trained and DIAGONAL in system.layout.spaces for system in cluster.systems):
        return "inverse", "its S is a diagonal, and sent as one"
    if running is None:
        return "gradient", "its S is another one in each step, and solved with by its owner alone"
    spread = mesh_of(cluster.parameters[0]) is not None
    if spread and not (len(cluster.systems) == 1 and by_outputs(cluster.systems[0])):
        return "gradient", "its shards are not whole outputs that could be turned alone"
    return "gradient", ""


def settle(clusters: Sequence[Cluster], ranks: Ranks, running: Running | None) -> None:
    """Give every cluster its ranks, its turn and its owner, the same on all ranks.

    Raises:
        RuntimeError: ranks differ in their layers.
    """
    found = {cluster: ranks.group_of(cluster.parameters[0]) for cluster in clusters}
    for group in dict.fromkeys(found.values()):
        own = [cluster for cluster in clusters if found[cluster] is group]
        slots, places = [0] * len(own), [Place()] * len(own)
        if running is not None and running.damping is not None:
            slots = turns([cluster.cost for cluster in own], running.update_every, running.invert_every)
        if group is not None:
            loads = [load_of(cluster, running, turn) for cluster, turn in zip(own, slots, strict=True)]
            refuse_different(group, loads)
            spread = Spread(group.ranks, cuts(own[0].parameters[0]))
            ways = routes(loads, spread, running.copies if running is not None else 0.0)
            owners = assign(loads, spread.ranks)
            places = [Place(o, o == group.rank, route) for o, route in zip(owners, ways, strict=True)]
        for cluster, turn, place in zip(own, slots, places, strict=True):
            cluster.settle(group, turn, place)


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


class Exchange:
    """Turns gradients into directions, on all ranks.

    Args:
        running: the user's choice; None without running averages.
    """

    def __init__(self, running: Running | None) -> None:
        self.running, self.directions = running, Directions()

    def send(self, anew: Iterable[Cluster]) -> None:
        """Bring operators that were made anew to all ranks that keep a copy of them."""
        _bring_operators({cluster: cluster.pairs for cluster in anew if cluster.place.way == "inverse"})

    def turn(self, pairs: Pairs, done: set[Cluster], lend: bool) -> None:
        """Turn the gradients of clusters into directions, in place and on all ranks.

        Args:
            pairs: those of each cluster; an operator has no memory where another rank holds it.
            done: clusters whose gradients hold the direction already.
            lend: whether an owner may have no gradients, so that its operators go to the ranks that have.
        """
        for cluster in pairs:
            if cluster.group is not None:
                _lay_out(cluster.parameters)
        # without running averages no rank keeps an operator from step to step
        fresh = "inverse" if self.running is None else None
        lent = _lent(
            {c: own for c, own in pairs.items() if c.group is not None and (lend or c.place.way == fresh)}
        )
        far = {c: own for c, own in pairs.items() if c.place.way == "gradient" and c not in lent}
        near = [
            pair for c, own in pairs.items() if c not in far and c not in done for pair in lent.get(c, own)
        ]
        self._turn(near)
        for group, clusters in _by_group(far):
            mine = [pair for c in clusters if c.place.mine and c not in done for pair in far[c]]
            if mesh_of(clusters[0].parameters[0]) is None:
                self._turn(mine)
                _bring_directions(group, clusters)
            else:
                _turn_shards(group, clusters, mine)

    def _turn(self, pairs: Sequence[Pair]) -> None:
        if self.running is not None:
            self.directions.turn(pairs)
            return
        for pair in pairs:
            direct(*pair)


def whole_state(state: Iterable[Entry]) -> Iterator[Entry]:
    """The state with memory on all ranks."""
    for entry in state:
        tensor, cluster, owned = entry.tensor, entry.cluster, entry.owned
        if owned and cluster.group is not None:
            if not entry.here:
                tensor = torch.empty_like(tensor, device=cluster.device)
            cluster.group.bring([_plain(tensor)], [cluster.place.owner], "state")
            owned = False
        yield entry._replace(tensor=tensor, owned=owned)


def _by_group(clusters: Iterable[Cluster]) -> list[tuple[Group, list[Cluster]]]:
    found: dict[Group, list[Cluster]] = {}
    for cluster in clusters:
        if cluster.group is not None:
            found.setdefault(cluster.group, []).append(cluster)
    return list(found.items())


def _bring_operators(pairs: Pairs) -> None:
    for group, clusters in _by_group(pairs):
        kept = [(operator.kept, c.place.owner) for c in clusters for _, operator in pairs[c]]
        if kept:
            group.bring([matrix for matrix, _ in kept], [owner for _, owner in kept], "inverses")


def _lent(pairs: Pairs) -> Pairs:
    """The same operators with memory on all ranks, for one step."""
    lent = {
        cluster: [
            (equation, operator)
            if cluster.place.mine
            else (equation, borrowed(operator, torch.empty_like(operator.kept, device=cluster.device)))
            for equation, operator in own
        ]
        for cluster, own in pairs.items()
    }
    _bring_operators(lent)
    return lent


def _bring_directions(group: Group, clusters: Sequence[Cluster]) -> None:
    """Bring directions from their owners to ranks that hold whole parameters."""
    found = [(p.grad, c.place.owner) for c in clusters for p in c.parameters if p.grad is not None]
    group.bring([_plain(g) for g, _ in found], [owner for _, owner in found], "directions")


def _turn_shards(group: Group, clusters: Sequence[Cluster], mine: Sequence[Pair]) -> None:
    """Gather the gradients of what this rank owns, turn them, and put directions into every rank's shards."""
    alike: dict[tuple[torch.dtype, torch.device], list[list[Any]]] = {}
    for cluster in clusters:
        for p in cluster.parameters:
            if p.requires_grad:
                owned = alike.setdefault((p.dtype, cluster.device), [[] for _ in range(group.ranks)])
                owned[cluster.place.owner].append(p)
    shards = [Shards(group, torch.empty(0, dtype=t, device=d), owned) for (t, d), owned in alike.items()]
    whole = {p: gradient for each in shards for p, gradient in each.gathered().items()}
    for pair in mine:
        direct(*pair, whole)
    for each in shards:
        each.scatter(whole)


class Shards:
    """Sharded gradients of one type on one device, and the ranks that own their layers.

    Args:
        group: the ranks.
        room: an empty tensor, of the type and on the device.
        owned: the parameters that each rank owns.
    """

    def __init__(self, group: Group, room: Tensor, owned: list[list[Any]]) -> None:
        self._group, self._room, self._owned, self._own = group, room, owned, owned[group.rank]

    def gathered(self) -> dict[Tensor, Tensor]:
        """The whole gradients of what this rank owns, from the ranks that hold shards of its copy of the model."""
        ranks, me = range(self._group.ranks), self._group.rank
        pieces = [[self._gradient(p) for p in self._owned[r] if self._beside(p, me, r)] for r in ranks]
        sources = [[p for p in self._own if self._beside(p, rank, me)] for rank in ranks]
        found = {p: self._room.new_empty(p.shape) for p in self._own}
        for rank, p, part in self._exchange(pieces, sources, ranks, "gradients"):
            found[p][self._box(p, rank)] = part
        return found

    def scatter(self, whole: Mapping[Tensor, Tensor]) -> None:
        """Send all ranks their shards of what this rank owns, and write what came into gradients."""
        ranks, me = self._group.ranks, self._group.rank
        pieces = [[whole[p][self._box(p, rank)] for p in self._own] for rank in range(ranks)]
        for _, p, part in self._exchange(pieces, self._owned, [me] * ranks, "directions"):
            if p.grad is not None:
                local(p.grad).copy_(part)

    def _exchange(
        self, pieces: list[list[Tensor]], expected: list[list[Any]], holders: Sequence[int], kind: str
    ) -> Iterator[tuple[int, Any, Tensor]]:
        """Send each rank its pieces. What comes: a rank, a parameter, and the part of it that a holder has."""
        shapes = [
            [[side.stop - side.start for side in self._box(p, holder)] for p in parameters]
            for parameters, holder in zip(expected, holders, strict=True)
        ]
        sizes = [[math.prod(shape) for shape in own] for own in shapes]
        came = self._group.exchange(pieces, [sum(own) for own in sizes], kind, self._room)
        for rank, flat in enumerate(came):
            parts = zip(expected[rank], flat.split(sizes[rank]), shapes[rank], strict=True)
            for p, part, shape in parts:
                yield rank, p, part.view(shape)

    def _gradient(self, parameter: Any) -> Tensor:
        """This rank's shard of a gradient; zeros where none came."""
        held = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        return local(held).to(self._room)

    def _box(self, parameter: Any, rank: int) -> tuple[slice, ...]:
        return box(parameter, self._group.coordinates(parameter.device_mesh)[rank])

    def _beside(self, parameter: Any, one: int, other: int) -> bool:
        """Whether two ranks hold shards of the same copy of a parameter."""
        places = self._group.coordinates(parameter.device_mesh)
        both = zip(places[one], places[other], parameter.placements, strict=True)
        return all(a == b for a, b, placement in both if cut_dimension(placement) is None)


def _lay_out(parameters: Iterable[Any]) -> None:
    """Lay sharded gradients out as their parameters; those of tensor parallel layers may be partial sums."""
    for p in parameters:
        if mesh_of(p) is not None and p.grad is not None and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor such that it is not taken for symmetric matrices."""
    return tensor[None] if tensor.dim() == 3 else tensor
