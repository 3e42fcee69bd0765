"""The ranks that share a batch, and what is sent between them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxprop.deferred.owners import Spread
from proxprop.deferred.packing import BUCKET_BYTES, buckets, pack, packed_size, unpack
from proxprop.distributed import cuts, mesh_of, several_ranks
from proxprop.torch_internals import timeout


class Ranks:
    """The ranks that a model's batch is spread over, by DDP or by the mesh of FSDP2.

    Args:
        model: the model, or what wraps it.

    Attributes:
        wrapper: the DistributedDataParallel around the model; None where there is none or it was not met yet.
        traffic: what was sent.
    """

    def __init__(self, model: nn.Module) -> None:
        self.traffic = Traffic()
        self.wrapper = next((m for m in model.modules() if _is_ddp(m)), None)
        self._sums: WeakKeyDictionary[Any, Sums | None] = WeakKeyDictionary()

    @property
    def wrapper(self) -> Any:
        """The wrapper, as long as someone else holds it.

        A model refers to what it is attached to and back, so that both end when garbage is collected. A wrapper that
        they held would hold process groups until then, whose threads abort a process that they outlive.
        """
        return self._wrapper() if self._wrapper is not None else None

    @wrapper.setter
    def wrapper(self, wrapper: Any) -> None:
        self._wrapper = ref(wrapper) if wrapper is not None else None
        self._ignored = ignored_by(wrapper) if wrapper is not None else set()

    def sums(self, parameter: Tensor) -> "Sums | None":
        """What sums over the ranks that hold a share of this parameter's batch; None where there is but one.

        An expert that one rank alone holds is ignored by DDP and FSDP2, and its S stays on that rank.
        """
        mesh = mesh_of(parameter)
        around = self.wrapper if mesh is None else mesh
        if id(parameter) in self._ignored:
            return None
        if around is None or not several_ranks():
            return None
        if around not in self._sums:
            of_ddp = mesh is None
            ranks = (
                dist.get_process_group_ranks(around.process_group) if of_ddp else mesh.mesh.flatten().tolist()
            )
            self._sums[around] = self._sums_over(ranks)
        return self._sums[around]

    def _sums_over(self, ranks: list[int]) -> "Sums | None":
        """Sums over a group of our own, so that our calls and the wrapper's need no common order."""
        if len(ranks) == 1:
            return None
        group = dist.new_group(ranks, timeout=timeout(dist.group.WORLD), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Sums(group, self.traffic)


def refuse_flat_parameters(model: nn.Module) -> None:
    """Raise ValueError for a model in the older FSDP."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel cuts parameters without regard to their rows, so that no rank can solve for "
            "what it holds. Use torch.distributed.fsdp.fully_shard"
        )


def ignored_by(wrapper: Any) -> set[int]:
    """The parameters that DDP was told to leave alone, by their id."""
    names = wrapper.parameters_to_ignore
    return {id(p) for name, p in wrapper.module.named_parameters() if name in names} if names else set()


def _is_ddp(module: object) -> bool:
    return dist.is_available() and isinstance(module, nn.parallel.DistributedDataParallel)


@dataclass
class Traffic:
    """What this rank has sent, by kind: "S", "inverses", "gradients", "directions".

    Attributes:
        bytes: that other ranks get from here, each of them counted, however they are passed on.
        calls: collectives that it had a part in.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, numbers: int, like: Tensor) -> None:
        """Note a call in which this rank hands over so many numbers."""
        self.bytes[kind] += numbers * like.element_size()
        self.calls[kind] += 1


class Sums:
    """Sums tensors over a process group, on one of its ranks each, and brings others back.

    All ranks must ask for the same shapes in the same order; a rank that has nothing to add brings zeros.

    Args:
        group: the ranks to sum over.
        traffic: where to count what is sent.
        limit: most bytes that callers should put into one call.
    """

    def __init__(
        self, group: dist.ProcessGroup, traffic: Traffic | None = None, limit: int = BUCKET_BYTES
    ) -> None:
        self._group, self.limit = ref(group), limit
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = traffic or Traffic()
        self._coordinates: list[list[int]] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, which torch holds until it is destroyed.

        Raises:
            RuntimeError: it was.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process groups were destroyed: call proxprop.attach anew after init_process_group"
            )
        return group

    def send(self, tensors: Sequence[Tensor], owner: int, common: bool = False) -> "Bucket":
        """Start to sum tensors of one type on one device on their owner, in one call. They are copied, packed.

        Args:
            tensors: this rank's summands.
            owner: the rank that they are summed on.
            common: whether all ranks have the same sums already, so that nothing is sent.
        """
        flat, mine, work = packed(tensors), owner == self.rank, None
        if not common:
            with explained():
                work = dist.reduce(flat, group=self.group, group_dst=owner, async_op=True)
            self.traffic.count("S", 0 if mine else flat.numel(), flat)
        return Bucket([tensor.shape for tensor in tensors], flat, work, mine)

    def bring(self, tensors: Sequence[Tensor], owners: Sequence[int], kind: str) -> None:
        """Overwrite tensors with their owners', in buckets; of matrices the triangles are sent.

        Owners write as well: a kept inverse then is symmetric, and the same on all ranks to the bit.
        """
        started = [
            self._bring([tensors[i] for i in bucket], owners[bucket[0]], kind)
            for bucket in buckets(tensors, owners, self.limit)
        ]
        for work, flat, brought in started:
            with explained():
                work.wait()
            if flat is not brought[0]:
                unpacked(flat, brought)

    def _bring(self, tensors: list[Tensor], owner: int, kind: str) -> tuple[Any, Tensor, list[Tensor]]:
        mine, (first, *more) = owner == self.rank, tensors
        whole = not more and packed_size(first.shape) == first.numel() and first.is_contiguous()
        flat = first if whole else packed(tensors, filled=mine)
        with explained():
            work = dist.broadcast(flat, group=self.group, group_src=owner, async_op=True)
        self.traffic.count(kind, flat.numel() * (self.ranks - 1) if mine else 0, flat)
        return work, flat, tensors

    def exchange(
        self, pieces: Sequence[Sequence[Tensor]], sizes: Sequence[int], kind: str, room: Tensor
    ) -> list[Tensor]:
        """Send each rank its pieces, and return what came from each `[sizes[rank]]`, in tensors like `room`."""
        given = torch.cat([room, *(piece.reshape(-1) for own in pieces for piece in own)])
        away = [sum(piece.numel() for piece in own) for own in pieces]
        found = room.new_empty(sum(sizes))
        with explained():
            dist.all_to_all_single(found, given, list(sizes), away, group=self.group)
        self.traffic.count(kind, sum(away) - away[self.rank], given)
        return list(found.split(list(sizes)))

    def largest(self, flags: Tensor) -> Tensor:
        """The largest of every entry over ranks, in place."""
        with explained():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return flags

    def everyones(self, said: object) -> list[Any]:
        """What each rank says."""
        found: list[Any] = [None] * self.ranks
        with explained():
            dist.all_gather_object(found, said, group=self.group)
        return found

    def coordinates(self, mesh: Any) -> list[list[int]]:
        """Where each rank of the group is in the mesh that it was made for."""
        if not self._coordinates:
            ranks = dist.get_process_group_ranks(self.group)
            self._coordinates = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
        return self._coordinates

    def spread(self, parameter: Any) -> Spread:
        """How a parameter and its batch lie over the group."""
        return Spread(self.ranks, cuts(parameter))


def packed(tensors: Sequence[Tensor], filled: bool = True) -> Tensor:
    """Tensors behind each other, of matrices the triangles; or room for them."""
    sizes = [packed_size(tensor.shape) for tensor in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    if filled:
        for tensor, out in zip(tensors, flat.split(sizes), strict=True):
            pack(tensor, out)
    return flat


def unpacked(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what `packed` made of them back into tensors."""
    sizes = [packed_size(tensor.shape) for tensor in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        unpack(part, tensor)


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
            unpacked(self.flat, found)
        return found

    def _wait(self) -> None:
        if self.flat.is_meta:
            return
        if self.work is not None:
            with explained():
                self.work.wait()
        if not self.mine:
            self.flat = self.flat.to("meta")


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
