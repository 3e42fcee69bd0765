"""Directions on all ranks from operators that one of them owns."""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from proxprop.deferred.average import Cluster, Entry, Running, take_turns
from proxprop.deferred.equation import Equation
from proxprop.deferred.owners import Load, Place, Spread, assign, routes
from proxprop.deferred.packing import packed_size
from proxprop.deferred.preconditioner import Operator, borrowed
from proxprop.deferred.ranks import Ranks, Sums
from proxprop.deferred.writer import Directions, by_outputs, direct
from proxprop.distributed import box, cut_dimension, local, mesh_of
from proxprop.solvers import DIAGONAL, Exact

Operators = Mapping[Cluster, Sequence[tuple[Equation, Operator]]]


def load_of(cluster: Cluster, running: Running | None) -> Load:
    """What a cluster's statistics take."""
    leaves = [system.current[0] for system in cluster.systems if system.current and system.usual]
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
        turn=cluster.turn,
        matrix=sum(packed_size(leaf.shape) * size for leaf, size in sizes),
        copy=copy,
        gradient=sum(p.numel() * p.element_size() for p in cluster.parameters),
        refresh=running.invert_every if running is not None else 1,
        bound=bound,
        only=only,
    )


def _only_way(cluster: Cluster, running: Running | None) -> tuple[Any, str]:
    """The only way that directions can come from an owner, and why; no reason where both can be."""
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


class Exchange:
    """Settles which rank owns what, and turns gradients into directions on all ranks.

    Args:
        clusters: all clusters of a model.
        running: the user's choice; None without running averages.
    """

    def __init__(self, clusters: Sequence[Cluster], running: Running | None) -> None:
        self.clusters, self.running = list(clusters), running
        self._sums: dict[Cluster, Sums] = {}
        self.directions = Directions()

    def settle(self, ranks: Ranks) -> None:
        """Give every cluster its owner, the same on all ranks.

        Raises:
            RuntimeError: ranks differ in their layers.
        """
        found = {cluster: ranks.sums(cluster.parameters[0]) for cluster in self.clusters}
        self._sums = {cluster: sums for cluster, sums in found.items() if sums is not None}
        for sums in dict.fromkeys(found.values()):
            clusters = [cluster for cluster, own in found.items() if own is sums]
            if self.running is not None and self.running.damping is not None:
                take_turns(clusters, self.running)
            if sums is None:
                continue
            loads = [load_of(cluster, self.running) for cluster in clusters]
            refuse_different(sums, loads)
            spread = sums.spread(clusters[0].parameters[0])
            for cluster, place in zip(clusters, self._places(loads, spread, sums.rank), strict=True):
                cluster.settle(place)

    def _places(self, loads: Sequence[Load], spread: Spread, rank: int) -> list[Place]:
        copies = self.running.copies if self.running is not None else 0.0
        owners, ways = assign(loads, spread.ranks), routes(loads, spread, copies)
        return [Place(owner, owner == rank, route) for owner, route in zip(owners, ways, strict=True)]

    def send(self, anew: Sequence[Cluster]) -> None:
        """Bring operators that were made anew to all ranks that keep a copy of them."""
        self._send({cluster: cluster.operators for cluster in anew if cluster.place.way == "inverse"})

    def _send(self, operators: Operators) -> None:
        for sums, clusters in self._by_sums(operators):
            pairs = [(operator.kept, c.place.owner) for c in clusters for _, operator in operators[c]]
            if pairs:
                sums.bring([kept for kept, _ in pairs], [owner for _, owner in pairs], "inverses")

    def _by_sums(self, clusters: Mapping[Cluster, Any]) -> list[tuple[Sums, list[Cluster]]]:
        found: dict[Sums, list[Cluster]] = {}
        for cluster in clusters:
            if cluster in self._sums:
                found.setdefault(self._sums[cluster], []).append(cluster)
        return list(found.items())

    def turn(self, operators: Operators, done: set[Cluster], lend: bool) -> None:
        """Turn the gradients of clusters into directions, in place and on all ranks.

        Args:
            operators: those of each cluster, which have no memory where another rank holds them.
            done: clusters whose gradients hold the direction already.
            lend: whether an owner may have no gradients, so that its operators go to the ranks that have.
        """
        if not self._sums:
            self._turn([pair for c, own in operators.items() if c not in done for pair in own])
            return
        for cluster in filter(self._sums.__contains__, operators):
            _lay_out(cluster.parameters)
        ways = {"inverse"} if self.running is None else set()  # no rank keeps these from step to step
        lent = self._lent(
            {c: own for c, own in operators.items() if c in self._sums and (lend or c.place.way in ways)}
        )
        far = {c: own for c, own in operators.items() if c.place.way == "gradient" and c not in lent}
        near = {c: lent.get(c, own) for c, own in operators.items() if c not in far and c not in done}
        self._turn([pair for own in near.values() for pair in own])
        for sums, clusters in self._by_sums(far):
            if mesh_of(clusters[0].parameters[0]) is None:
                self._turn([p for c in clusters if c.place.mine and c not in done for p in far[c]])
                self._bring_directions(sums, clusters)
            else:
                whole = self._gathered(sums, clusters)
                for cluster in clusters:
                    for pair in far[cluster] if cluster.place.mine and cluster not in done else ():
                        direct(*pair, whole)
                self._scatter(sums, clusters, whole)

    def whole(self, state: Iterable[Entry]) -> Iterator[Entry]:
        """The state with memory on all ranks."""
        for entry in state:
            tensor, cluster, owned = entry.tensor, entry.cluster, entry.owned
            if owned and cluster in self._sums:
                if not entry.here:
                    tensor = torch.empty_like(tensor, device=_device(cluster))
                self._sums[cluster].bring([_plain(tensor)], [cluster.place.owner], "state")
                owned = False
            yield entry._replace(tensor=tensor, owned=owned)

    def _lent(self, operators: Operators) -> Operators:
        """The same operators with memory on all ranks, for one step."""
        lent = {
            cluster: [
                (equation, operator)
                if cluster.place.mine
                else (equation, borrowed(operator, torch.empty_like(operator.kept, device=_device(cluster))))
                for equation, operator in own
            ]
            for cluster, own in operators.items()
        }
        self._send(lent)
        return lent

    def _turn(self, pairs: Sequence[tuple[Equation, Operator]]) -> None:
        if self.running is not None:
            self.directions.turn(pairs)
            return
        for pair in pairs:
            direct(*pair)

    def _bring_directions(self, sums: Sums, clusters: Sequence[Cluster]) -> None:
        """Bring directions from their owners to ranks that hold whole parameters."""
        found = [
            (p.grad, cluster.place.owner)
            for cluster in clusters
            for p in cluster.parameters
            if p.grad is not None
        ]
        sums.bring([_plain(g) for g, _ in found], [owner for _, owner in found], "directions")

    def _gathered(self, sums: Sums, clusters: Sequence[Cluster]) -> dict[Tensor, Tensor]:
        """Whole gradients of what this rank owns, from the shards of the ranks that hold its copy of the model."""
        found: dict[Tensor, Tensor] = {}
        for shards in self._shards(sums, clusters):
            found |= shards.gathered()
        return found

    def _scatter(self, sums: Sums, clusters: Sequence[Cluster], whole: Mapping[Tensor, Tensor]) -> None:
        """Put directions that this rank made into every rank's shards."""
        for shards in self._shards(sums, clusters):
            shards.scatter(whole)

    def _shards(self, sums: Sums, clusters: Sequence[Cluster]) -> list["Shards"]:
        """The clusters' parameters, those of one type on one device together."""
        found: dict[tuple[object, ...], Shards] = {}
        for cluster in clusters:
            for p in cluster.parameters:
                if p.requires_grad:
                    kind = p.dtype, _device(cluster)
                    found.setdefault(kind, Shards(sums, *kind)).add(p, cluster.place.owner)
        return list(found.values())


class Shards:
    """Sharded gradients of one type, and the ranks that own their layers.

    Args:
        sums: the ranks.
        dtype: of the gradients.
        device: that they are sent from.
    """

    def __init__(self, sums: Sums, dtype: torch.dtype, device: torch.device) -> None:
        self._sums, self._room = sums, torch.empty(0, dtype=dtype, device=device)
        self._owned: list[list[Any]] = [[] for _ in range(sums.ranks)]

    def add(self, parameter: Tensor, owner: int) -> None:
        """Add a parameter."""
        self._owned[owner].append(parameter)

    def gathered(self) -> dict[Tensor, Tensor]:
        """The whole gradients of what this rank owns."""
        sums, own, me = self._sums, self._owned[self._sums.rank], self._sums.rank
        pieces = [
            [self._gradient(p) for p in owned if self._beside(p, me, owner)]
            for owner, owned in enumerate(self._owned)
        ]
        sources = [[p for p in own if self._beside(p, rank, me)] for rank in range(sums.ranks)]
        came = self._exchange(pieces, sources, range(sums.ranks), "gradients")
        found = {p: self._room.new_empty(p.shape) for p in own}
        for rank, parts in enumerate(came):
            for p, part in parts:
                found[p][self._box(p, rank)] = part
        return found

    def scatter(self, whole: Mapping[Tensor, Tensor]) -> None:
        """Send all ranks their shards of what this rank owns, and write what came into gradients."""
        sums, own = self._sums, self._owned[self._sums.rank]
        pieces = [[whole[p][self._box(p, rank)] for p in own] for rank in range(sums.ranks)]
        for parts in self._exchange(pieces, self._owned, [sums.rank] * sums.ranks, "directions"):
            for p, part in parts:
                if p.grad is not None:
                    local(p.grad).copy_(part)

    def _exchange(
        self, pieces: list[list[Tensor]], expected: list[list[Any]], holders: Sequence[int], kind: str
    ) -> list[list[tuple[Any, Tensor]]]:
        """Send each rank its pieces; from each come parts of parameters, as one of the ranks holds them."""
        shapes = [
            [[side.stop - side.start for side in self._box(p, holder)] for p in parameters]
            for parameters, holder in zip(expected, holders, strict=True)
        ]
        sizes = [[math.prod(shape) for shape in own] for own in shapes]
        came = self._sums.exchange(pieces, [sum(own) for own in sizes], kind, self._room)
        return [
            [(p, part.view(shape)) for p, part, shape in zip(own, flat.split(size), shape_of, strict=True)]
            for own, flat, size, shape_of in zip(expected, came, sizes, shapes, strict=True)
        ]

    def _gradient(self, parameter: Any) -> Tensor:
        """This rank's shard of a gradient; zeros where none came."""
        held = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        return local(held).to(self._room)

    def _box(self, parameter: Any, rank: int) -> tuple[slice, ...]:
        return box(parameter, self._sums.coordinates(parameter.device_mesh)[rank])

    def _beside(self, parameter: Any, one: int, other: int) -> bool:
        """Whether two ranks hold shards of the same copy of a parameter."""
        places = self._sums.coordinates(parameter.device_mesh)
        both = zip(places[one], places[other], parameter.placements, strict=True)
        return all(a == b for a, b, placement in both if cut_dimension(placement) is None)


def refuse_different(sums: Sums, loads: Sequence[Load]) -> None:
    """Raise RuntimeError where ranks do not have the same layers to share out."""
    mine = zlib.crc32(repr(loads).encode())
    if len(set(sums.everyones(mine))) == 1:
        return
    first, *others = sums.everyones(loads)
    for rank, theirs in enumerate(others, 1):
        for one, other in zip_longest(first, theirs):
            if one != other:
                raise RuntimeError(
                    f"ranks share out different layers: on rank 0 of the group there is {one}, on rank {rank} {other}. "
                    "Build, freeze and convert the model alike on all ranks before proxprop.attach"
                )


def _lay_out(parameters: Iterable[Any]) -> None:
    """Lay sharded gradients out as their parameters; those of tensor parallel layers may be partial sums."""
    for p in parameters:
        if mesh_of(p) is not None and p.grad is not None and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def _device(cluster: Cluster) -> torch.device:
    """Where a cluster's S is."""
    return cluster.systems[0].current[0].device


def _plain(tensor: Tensor) -> Tensor:
    """A tensor such that it is not taken for symmetric matrices."""
    return tensor[None] if tensor.dim() == 3 else tensor
