"""What ranks send each other: symmetric matrices as packed triangles, in buckets, and every byte counted.

S is symmetric, so only `features·(features + 1)/2` numbers a group are sent. The triangle is folded into two
rectangles (LAPACK's rectangular full packed format), which takes block copies and no table of indices: with
`p = ⌈features/2⌉`, `q = ⌊features/2⌋` and

    S = [ P  R ]    P [p, p], R [p, q], Q [q, q],
        [ Rᵀ Q ]

R is one rectangle, and the upper triangle of P above the lower triangle of Q is the other, `[q + 1, p]`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from proxprop.distributed import box, cut_dimension, local

BUCKET_BYTES = 25 * 2**20
"""Most bytes sent in one call, unless one matrix alone has more; DDP's default."""


@contextmanager
def explained() -> Iterator[None]:
    """Say what a failing collective means."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} of {dist.get_world_size()}: S could not be summed over ranks. Likely causes: "
            "another rank has died or left its training loop, or it took another number of steps; see that "
            f"rank's output first. torch says: {error}"
        ) from error


def packed_size(shape: Sequence[int]) -> int:
    """How many numbers of a tensor of this shape are sent: triangles of `[groups, n, n]`, else all.

    Example:
        >>> packed_size((2, 3, 3)), packed_size((2, 3))
        (12, 6)
    """
    if _is_symmetric(shape):
        groups, features, _ = shape
        return groups * (features * (features + 1) // 2)
    return torch.Size(shape).numel()


def pack(S: Tensor, out: Tensor) -> None:
    """Write the upper triangles of S `[groups, features, features]` into `out`; any other tensor as it is.

    Args:
        S: symmetric matrices, or a tensor that has no symmetry, such as a diagonal `[groups, features]`.
        out: `[packed_size(S.shape)]`, overwritten.

    Example:
        >>> S = torch.tensor([[[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]]])
        >>> out = torch.empty(packed_size(S.shape))
        >>> pack(S, out)
        >>> out
        tensor([3., 5., 1., 2., 6., 4.])
    """
    if not _is_symmetric(S.shape):
        out.copy_(S.reshape(-1))
        return
    p, q = _halves(S.shape[-1])
    R, PQ = _rectangles(out, S.shape)
    R.copy_(S[:, :p, p:])
    PQ[:, p:] = 0
    PQ[:, :p] = S[:, :p, :p].triu()
    PQ[:, 1:, :q] += S[:, p:, p:].tril()


def unpack(packed: Tensor, S: Tensor) -> None:
    """Write what `pack` made of S back into it, both triangles.

    Example:
        >>> S = torch.empty(1, 2, 2)
        >>> unpack(torch.tensor([2.0, 1.0, 3.0]), S)
        >>> S
        tensor([[[1., 2.],
                 [2., 3.]]])
    """
    if not _is_symmetric(S.shape):
        S.copy_(packed.view(S.shape))
        return
    p, q = _halves(S.shape[-1])
    R, PQ = _rectangles(packed, S.shape)
    S[:, :p, p:] = R
    S[:, p:, :p] = R.mT
    upper, lower = PQ[:, :p].triu(), PQ[:, 1:, :q].tril()
    S[:, :p, :p] = upper + upper.triu(1).mT
    S[:, p:, p:] = lower + lower.tril(-1).mT


def _is_symmetric(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2]


def _halves(features: int) -> tuple[int, int]:
    return features - features // 2, features // 2


def _rectangles(packed: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """R `[groups, p, q]` and P's upper triangle above Q's lower one `[groups, q + 1, p]`, as views."""
    groups, (p, q) = shape[0], _halves(shape[-1])
    first, second = packed.split([groups * p * q, groups * (q + 1) * p])
    return first.view(groups, p, q), second.view(groups, q + 1, p)


def pack_all(tensors: Sequence[Tensor], filled: bool = True) -> Tensor:
    """Tensors packed behind each other, or room for them."""
    sizes = [packed_size(tensor.shape) for tensor in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    if filled:
        for tensor, out in zip(tensors, flat.split(sizes), strict=True):
            pack(tensor, out)
    return flat


def unpack_all(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what `pack_all` made of tensors back into them."""
    sizes = [packed_size(tensor.shape) for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        unpack(part, tensor)


def buckets(tensors: Sequence[Tensor], owners: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of tensors that are sent together: to one rank, of one type and device, under `limit` bytes.

    Buckets come in the order of their last tensors, which is the order in which they are complete. They depend on
    owners, shapes and types only, so that every rank comes to the same division.

    Example:
        >>> buckets([torch.zeros(10)] * 4, owners=[0, 1, 0, 0], limit=100)
        [[1], [0, 2], [3]]
    """
    found: list[list[int]] = []
    last: dict[object, list[int]] = {}
    room: dict[object, int] = {}
    for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
        key = owner, tensor.dtype, tensor.device
        size = packed_size(tensor.shape) * tensor.element_size()
        if key not in last or size > room[key]:
            found.append([])
            last[key], room[key] = found[-1], limit
        last[key].append(index)
        room[key] -= size
    return sorted(found, key=lambda bucket: bucket[-1])


@dataclass
class Traffic:
    """What this rank has sent, by kind: "S", "inverses", "gradients", "directions", "state".

    Attributes:
        bytes: that other ranks get from here, counted for each of them, however they are passed on.
        calls: collectives that this rank took part in.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, numbers: int, like: Tensor) -> None:
        """Note a call in which this rank hands over so many numbers."""
        self.bytes[kind] += numbers * like.element_size()
        self.calls[kind] += 1


class Group:
    """Ranks that share a batch: sums tensors on one of them, and brings others back.

    All ranks must ask for the same shapes in the same order; a rank that has nothing to add brings zeros.

    Args:
        group: the process group.
        traffic: where to count what is sent.

    Attributes:
        limit: most bytes to send in one call.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group, self.traffic, self.limit = ref(group), traffic, BUCKET_BYTES
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._coordinates: list[list[int]] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which torch holds until it is destroyed.

        Raises:
            RuntimeError: it was destroyed.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process groups were destroyed: call proxprop.attach anew after init_process_group"
            )
        return group

    @explained()
    def send(self, tensors: Sequence[Tensor], owner: int, common: bool = False) -> "Bucket":
        """Start to sum tensors of one type on one device on their owner, in one call. They are copied, packed.

        Args:
            tensors: this rank's summands.
            owner: the rank that they are summed on.
            common: whether all ranks have the same sums already, so that nothing is sent.
        """
        flat, mine, work = pack_all(tensors), owner == self.rank, None
        if not common:
            work = dist.reduce(flat, group=self.group, group_dst=owner, async_op=True)
            self.traffic.count("S", 0 if mine else flat.numel(), flat)
        return Bucket([tensor.shape for tensor in tensors], flat, work, mine)

    @explained()
    def bring(self, tensors: Sequence[Tensor], owners: Sequence[int], kind: str) -> None:
        """Overwrite tensors with their owners', in buckets; of matrices the triangles are sent.

        Owners write as well: a kept inverse then is symmetric, and the same on all ranks to the bit.
        """
        started = [
            self._bring([tensors[i] for i in bucket], owners[bucket[0]], kind)
            for bucket in buckets(tensors, owners, self.limit)
        ]
        for work, flat, brought in started:
            work.wait()
            if flat is not brought[0]:
                unpack_all(flat, brought)

    def _bring(self, tensors: list[Tensor], owner: int, kind: str) -> tuple[Any, Tensor, list[Tensor]]:
        mine, (first, *more) = owner == self.rank, tensors
        whole = not more and packed_size(first.shape) == first.numel() and first.is_contiguous()
        flat = first if whole else pack_all(tensors, filled=mine)
        work = dist.broadcast(flat, group=self.group, group_src=owner, async_op=True)
        self.traffic.count(kind, flat.numel() * (self.ranks - 1) if mine else 0, flat)
        return work, flat, tensors

    @explained()
    def exchange(
        self, pieces: Sequence[Sequence[Tensor]], sizes: Sequence[int], kind: str, room: Tensor
    ) -> list[Tensor]:
        """Send each rank its pieces, and return what came from each `[sizes[rank]]`, in tensors like `room`."""
        given = torch.cat([room, *(piece.reshape(-1) for own in pieces for piece in own)])
        away = [sum(piece.numel() for piece in own) for own in pieces]
        found = room.new_empty(sum(sizes))
        dist.all_to_all_single(found, given, list(sizes), away, group=self.group)
        self.traffic.count(kind, sum(away) - away[self.rank], given)
        return list(found.split(list(sizes)))

    @explained()
    def largest(self, flags: Tensor) -> Tensor:
        """The largest of every entry over ranks, in place."""
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return flags

    @explained()
    def everyones(self, said: object) -> list[Any]:
        """What each rank says."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, said, group=self.group)
        return found

    def coordinates(self, mesh: Any) -> list[list[int]]:
        """Where each rank is in the mesh that the group was made for."""
        if not self._coordinates:
            ranks = dist.get_process_group_ranks(self.group)
            self._coordinates = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
        return self._coordinates


@dataclass
class Bucket:
    """Packed tensors whose sum is on its way to their owner."""

    shapes: Sequence[torch.Size]
    flat: Tensor
    work: Any
    mine: bool

    def let_go(self) -> None:
        """Free what has left this rank."""
        if not self.mine and (self.work is None or self.work.is_completed()):
            self._wait()

    def wait(self) -> list[Tensor]:
        """The sums over ranks, once they are there; without memory on other ranks than the owner."""
        self._wait()
        found = [self.flat.new_empty(shape) for shape in self.shapes]
        if self.mine:
            unpack_all(self.flat, found)
        return found

    @explained()
    def _wait(self) -> None:
        if self.flat.is_meta:
            return
        if self.work is not None:
            self.work.wait()
        if not self.mine:
            self.flat = self.flat.to("meta")


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
