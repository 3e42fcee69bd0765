"""How and when S is summed over the ranks that share a batch: all-reduces of packed triangles.

DDP and FSDP2 average gradients over ranks, `B = (1/R) ΣB_r`, and S is summed, `S = Σ S_r`. With a loss that is a mean
over the rank's samples and as many samples on every rank, B is the gradient of the mean over all of them, and
D is the direction of one process with the concatenated batch.

Every backward pass in which DDP averages gradients is a *round*: each system's S is sent once, in buckets of a fixed
order, the order in which backward is expected to reach them. A bucket is sent as soon as backward has reached
all of its systems and the buckets before it were sent; what is left, also of layers that this rank did not use, is
sent before the next round or step. So all ranks send the same in the same order whatever their graphs were, and what
a pass under `no_sync` summed stays here until the next round, as its gradient does. Under FSDP2 all is sent when a step
is solved.

S is symmetric, so only `features·(features + 1)/2` numbers a group are sent. The triangle is folded into two
rectangles (LAPACK's rectangular full packed format), which takes block copies and no table of indices: with
`p = ⌈features/2⌉`, `q = ⌊features/2⌋` and

    S = [ P  R ]    P [p, p], R [p, q], Q [q, q],
        [ Rᵀ Q ]

R is one rectangle, and the upper triangle of P above the lower triangle of Q is the other, `[q + 1, p]`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxprop.deferred.accumulator import System
from proxprop.deferred.equation import Term
from proxprop.distributed import mesh_of, several_ranks
from proxprop.torch_internals import active_ddp, timeout, tree_flatten

BUCKET_BYTES = 25 * 2**20
"""Most bytes sent in one call, unless one matrix alone has more; DDP's default."""


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
    """Write what `pack` made of it back into S, both triangles.

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


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of neighbours that are sent together: of one type and device, and together under `limit` bytes.

    It depends on shapes and types only, so that every rank comes to the same division.

    Example:
        >>> buckets([torch.zeros(10), torch.zeros(10), torch.zeros(10)], limit=100)
        [[0, 1], [2]]
    """
    found: list[list[int]] = []
    room = 0
    for index, tensor in enumerate(tensors):
        size = packed_size(tensor.shape) * tensor.element_size()
        last = tensors[found[-1][-1]] if found else None
        if last is None or size > room or (last.dtype, last.device) != (tensor.dtype, tensor.device):
            found.append([])
            room = limit
        found[-1].append(index)
        room -= size
    return found


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


Sent = tuple[list[System], Bucket]


class Round:
    """What is sent in one synchronised backward pass.

    Args:
        sums: sums over the ranks.
        systems: in the order to send them.
    """

    def __init__(self, sums: Sums, systems: Sequence[System]) -> None:
        self.sent: list[Sent] = []
        self._sums, self._reached = sums, Counter[System]()
        self._left = [[systems[i] for i in b] for b in buckets([s.current[0] for s in systems], sums.limit)]

    def reached(self, system: System) -> None:
        """One of a system's leaves is complete; send what can be sent."""
        self._reached[system] += 1
        while self._left and all(self._reached[s] >= len(s.current) for s in self._left[0]):
            self._send()

    def complete(self) -> list[Sent]:
        """Send the rest, and return all that was sent."""
        while self._left:
            self._send()
        return self.sent

    def _send(self) -> None:
        systems = self._left.pop(0)
        self.sent.append((systems, self._sums.send([t for s in systems for t in s.shares()])))


class Reduction:
    """Brings every system's S and number of samples, summed over all ranks that share the batch.

    Args:
        model: the model, or what wraps it.
        systems: in the order of the model's layers.
    """

    def __init__(self, model: nn.Module, systems: Sequence[System]) -> None:
        self.ranks, self.systems = Ranks(model), list(systems)
        self._round: Round | None = None
        self._sent: list[Sent] = []
        self._totals: dict[System, list[Tensor]] = {}
        self._parts: dict[nn.Module, list[System]] = {}
        self._hook: Any = None
        layers = Counter(system.layer for system in systems)
        for system in systems:
            system.when_summed = self._reached
            if layers[system.layer] == 1:
                self._parts[system.layer] = [system]
        self._watch()

    def notice(self) -> None:
        """Look, in a layer's forward, whether DDP was put around the model after `attach`."""
        if self.ranks.wrapper is None and (wrapper := active_ddp()) is not None:
            self.ranks.wrapper = wrapper
            self._watch()

    def shadow(self) -> None:
        """Take part in a round of other ranks with nothing to add; sums under `no_sync` are lost, as in DDP."""
        for system in self.systems:
            system.forget()
        self._begin(synchronised=True)

    def release(self) -> None:
        """Take the hook off the wrapper."""
        if self._hook is not None:
            self._hook.remove()

    def summed(self, systems: Sequence[System]) -> Iterator[list[Term]]:
        """Those of the systems that anything was summed for, some at a time as their sums over ranks are there."""
        self._end_round()
        self._send_now(systems)
        chosen = set(systems)
        for arrived in self._arrivals():
            later = {system for sent, _ in self._sent for system in sent}
            yield [self._taken(s) for s in arrived if s in chosen - later]
        yield [self._taken(s) for s in systems if s in self._totals]
        here = [s for s in systems if s.S is not None and self.ranks.sums(s.parameters[0]) is None]
        yield [Term(s, *s.take()) for s in here]

    def _send_now(self, systems: Sequence[System]) -> None:
        """Send what no round was about: under FSDP2 all, under DDP what came after a round or in a first step."""
        if not several_ranks():
            return
        covered = {system for sent, _ in self._sent for system in sent} | self._totals.keys()
        waiting = [s for s in systems if s.current and (s.S is not None or s not in covered)]
        waiting = [s for s in waiting if self.ranks.sums(s.parameters[0]) is not None]
        if not any(system.S is not None for system in waiting):
            return
        self._agree([s for s in waiting if s.layer not in self._parts])
        for sums in dict.fromkeys(self.ranks.sums(s.parameters[0]) for s in waiting):
            assert sums is not None
            mine = [s for s in waiting if self.ranks.sums(s.parameters[0]) is sums]
            self._sent += Round(sums, [s for s in mine if self._takes_part(s)]).complete()
        for system in waiting:
            if system.S is not None:
                raise RuntimeError(
                    f"{system.name}: this part of the layer is in use for the first time, but ranks agreed in the "
                    "first step on the parts whose S is summed. Call proxprop.attach anew"
                )

    def _agree(self, systems: Sequence[System]) -> None:
        """Settle with all ranks which of a layer's parts are in use; attention has more than a model uses."""
        if not systems:
            return
        sums = self.ranks.sums(systems[0].parameters[0])
        assert sums is not None
        used = torch.tensor([float(s.S is not None) for s in systems], device=systems[0].current[0].device)
        flags = sums.largest(used).tolist()
        for system, flag in zip(systems, flags, strict=True):
            if flag:
                self._parts.setdefault(system.layer, []).append(system)

    def _takes_part(self, system: System) -> bool:
        return bool(system.current) and system in self._parts.get(system.layer, ())

    def _taken(self, system: System) -> Term:
        return Term(system, *system.split(self._totals.pop(system)))

    def _arrivals(self) -> Iterator[list[System]]:
        """Wait for what was sent, bucket by bucket, and add it to the totals."""
        while self._sent:
            systems, bucket = self._sent.pop(0)
            tensors = iter(bucket.wait())
            for system in systems:
                found = [next(tensors) for _ in system.current]
                for total, more in zip(self._totals.setdefault(system, found), found, strict=True):
                    if total is not more:
                        total.add_(more)
            yield systems

    def _watch(self) -> None:
        """Have the wrapper tell when one of its backward passes begins; make groups while all ranks are here."""
        for system in self.systems:
            self.ranks.sums(system.parameters[0])
        if self.ranks.wrapper is not None:
            self._hook = self.ranks.wrapper.register_forward_hook(self._after_forward)

    def _after_forward(self, wrapper: Any, _: Any, output: Any) -> None:
        begun: list[bool] = []
        synchronised = wrapper.require_backward_grad_sync

        def begin(_: Tensor) -> None:
            if not begun:
                begun.append(True)
                self._begin(synchronised)

        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)

    @torch.no_grad()
    def _begin(self, synchronised: bool) -> None:
        """A backward pass begins: end the round before it, and start one if gradients will be averaged."""
        self._end_round()
        for _ in self._arrivals():
            pass
        self._drop_zeroed()
        sums = self.ranks.sums(self.systems[0].parameters[0]) if self.systems else None
        if sums is None or not synchronised:
            return
        for system in self.systems:
            system.note_average()
        self._round = Round(sums, [s for s in reversed(self.systems) if self._takes_part(s) and s.observed])

    def _reached(self, system: System) -> None:
        if self._round is not None:
            self._round.reached(system)

    def _end_round(self) -> None:
        if self._round is not None:
            self._sent += self._round.complete()
            self._round = None

    def _drop_zeroed(self) -> None:
        """Forget totals whose gradient the user has zeroed without a step; decided on the device."""
        for system, totals in list(self._totals.items()):
            gradients = [p.grad for p in system.parameters if p.grad is not None]
            if not gradients:
                del self._totals[system]
                continue
            zero = ~torch.stack([g.any() for g in gradients]).any()
            for total in totals:
                total.masked_fill_(zero, 0.0)
