"""How S is summed over ranks: the ranks that share a batch, and all-reduces of packed triangles.

DDP and FSDP2 average gradients over ranks, `B = (1/R) ΣB_r`, and S is summed, `S = Σ S_r`. With a loss that is a mean
over the rank's samples and as many samples on every rank, B is the gradient of the mean over all of them, and
D is the direction of one process with the concatenated batch.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxprop.packing import BUCKET_BYTES, pack, packed_size, unpack
from proxprop.torch_internals import active_ddp, sharded_modules, timeout


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh of a DTensor; None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


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

    def sums(self, parameter: Tensor) -> "Sums | None":
        """What sums over the ranks that hold a share of this parameter's batch; None where there is but one."""
        mesh = mesh_of(parameter)
        around = self.wrapper if mesh is None else mesh
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


def _is_ddp(module: object) -> bool:
    return dist.is_available() and isinstance(module, nn.parallel.DistributedDataParallel)


_told: set[str] = set()
_seen: WeakSet[nn.Module] = WeakSet()


def check_layer(layer: nn.Module, name: str, attached: bool) -> None:
    """Look at a layer in its forward, on one of several ranks.

    Warns once if its model is data-parallel and it solves inside backward.

    Raises:
        TypeError: the layer's parameters are spread over ranks while it computes.
    """
    for key, parameter in layer.named_parameters(recurse=False):
        if mesh_of(parameter) is not None:
            raise TypeError(
                f"{name}: {key} is a DTensor in the layer's forward (tensor parallel), which proxprop does not solve "
                "for: where ranks hold different features, S has blocks that no rank can form alone. Leave the layer "
                "out with exclude=[...], or use fully_shard or DistributedDataParallel for it"
            )
    if not attached and (around := _data_parallel(layer)) and around not in _told:
        _told.add(around)
        warnings.warn(
            f"{name}: under {around} each rank solves for its own share of the batch, and the average of their "
            "solutions is not the direction of the whole batch. proxprop.attach(optimizer, model) solves for the "
            "whole batch, whatever the number of ranks",
            UserWarning,
            stacklevel=2,
        )


def _data_parallel(layer: nn.Module) -> str:
    """The name of what spreads the layer's batch over ranks; empty where nothing does."""
    if active_ddp() is not None:
        return "DistributedDataParallel"
    if layer in _seen:
        return ""
    _seen.add(layer)
    inside = (module for root in sharded_modules() for module in root.modules())
    return "fully_shard" if any(layer is module for module in inside) else ""


@dataclass
class Traffic:
    """What was sent, counted on this rank.

    Attributes:
        bytes: bytes handed to all-reduce; a ring puts `2·(ranks - 1)/ranks` times as many on the wire.
        calls: all-reduces started.
    """

    bytes: int = 0
    calls: int = 0


class Sums:
    """Sums tensors over a process group.

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
        self.traffic = traffic or Traffic()

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

    def send(self, tensors: Sequence[Tensor]) -> "Bucket":
        """Start to sum tensors of one type on one device, in one call. They are copied, packed, and may be freed."""
        sizes = [packed_size(tensor.shape) for tensor in tensors]
        flat = tensors[0].new_empty(sum(sizes))
        for tensor, out in zip(tensors, flat.split(sizes), strict=True):
            pack(tensor, out)
        with explained():
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.traffic.bytes += flat.numel() * flat.element_size()
        self.traffic.calls += 1
        return Bucket([tensor.shape for tensor in tensors], flat, work)

    def largest(self, flags: Tensor) -> Tensor:
        """The largest of every entry over ranks, in place."""
        with explained():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return flags


@dataclass(frozen=True)
class Bucket:
    """Packed tensors whose sum is on its way."""

    shapes: Sequence[torch.Size]
    flat: Tensor
    work: Any

    def wait(self) -> list[Tensor]:
        """The sums over ranks, once they are there."""
        with explained():
            self.work.wait()
        found = [self.flat.new_empty(shape) for shape in self.shapes]
        for tensor, packed in zip(found, self.flat.split([packed_size(s) for s in self.shapes]), strict=True):
            unpack(packed, tensor)
        return found


class explained:
    """Says what a failing collective means."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"rank {dist.get_rank()} of {dist.get_world_size()}: S could not be summed over ranks. Likely causes: "
                "another rank has died or left its training loop, or it took another number of steps; see that "
                f"rank's output first. torch says: {error}"
            ) from error
