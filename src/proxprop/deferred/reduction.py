"""How and when S is summed over the ranks that share a batch: reduced to its owner, as packed triangles.

DDP and FSDP2 average gradients over ranks, `B = (1/R) ΣB_r`, and S is summed, `S = Σ S_r`. With a loss that is a mean
over the rank's samples and as many samples on every rank, B is the gradient of the mean over all of them, and
D is the direction of one process with the concatenated batch.

Every backward pass in which gradients are averaged is a *round*: each system's S is sent once, in buckets of a fixed
order, the order in which backward is expected to reach them. A bucket is sent as soon as backward has reached
all of its systems and the buckets before it were sent; what is left, also of layers that this rank did not use, is
sent before the next round or step. So all ranks send the same in the same order whatever their graphs were, and what
a pass under `no_sync` summed stays here until the next round, as its gradient does. Where FSDP2 has no single module
around all others, all is sent when a step is solved.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxprop.deferred.accumulator import System
from proxprop.deferred.collectives import Bucket, Group, Traffic, buckets
from proxprop.deferred.equation import Term
from proxprop.deferred.observing import Cluster, by_group
from proxprop.distributed import is_sharded, local, mesh_of, several_ranks
from proxprop.torch_internals import active_ddp, averages_gradients, is_compiled, timeout, tree_flatten


class Ranks:
    """The ranks that a model's batch is spread over, by DDP or by the mesh of FSDP2.

    Args:
        model: the model, or what wraps it.

    Attributes:
        wrapper: the DistributedDataParallel around the model; None where there is none or it was not met yet.
        wrapped: whether there is one.
        traffic: what was sent.
    """

    def __init__(self, model: nn.Module) -> None:
        self.traffic = Traffic()
        self.wrapper = next((m for m in model.modules() if _is_ddp(m)), None)
        self._groups: WeakKeyDictionary[Any, Group | None] = WeakKeyDictionary()

    @property
    def wrapper(self) -> Any:
        """The wrapper, as long as someone else holds it.

        A model refers to what it is attached to and back, so that both end when garbage is collected. A wrapper that
        they held would hold process groups until then, whose threads abort a process that they outlive.
        """
        return self._wrapper() if self._wrapper is not None else None

    @wrapper.setter
    def wrapper(self, wrapper: Any) -> None:
        self._wrapper, self.wrapped = ref(wrapper) if wrapper is not None else None, wrapper is not None
        names = wrapper.parameters_to_ignore if wrapper is not None else ()
        self._ignored = {id(p) for n, p in wrapper.module.named_parameters() if n in names} if names else ()

    def group_of(self, parameter: Tensor) -> Group | None:
        """The ranks that hold a share of this parameter's batch; None where there is but one.

        DDP and FSDP2 ignore an expert that one rank alone holds, and its S stays on that rank.
        """
        mesh = mesh_of(parameter)
        around = self.wrapper if mesh is None else mesh
        if id(parameter) in self._ignored or around is None or not several_ranks():
            return None
        if around not in self._groups:
            of_ddp = mesh is None
            ranks = (
                dist.get_process_group_ranks(around.process_group) if of_ddp else mesh.mesh.flatten().tolist()
            )
            self._groups[around] = self._new_group(ranks)
        return self._groups[around]

    def _new_group(self, ranks: list[int]) -> Group | None:
        """A group of our own, so that our calls and the wrapper's need no common order."""
        if len(ranks) == 1:
            return None
        group = dist.new_group(ranks, timeout=timeout(dist.group.WORLD), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Group(group, self.traffic)


def _is_ddp(module: object) -> bool:
    return dist.is_available() and isinstance(module, nn.parallel.DistributedDataParallel)


class Round:
    """What is sent in one synchronised backward pass.

    Args:
        group: the ranks to sum over.
        systems: in the order to send them.

    Attributes:
        sent: what is on its way, and the systems that it is from.
    """

    def __init__(self, group: Group, systems: Sequence[System]) -> None:
        self.sent: list[tuple[list[System], Bucket]] = []
        self._group, self._reached = group, Counter[System]()
        owners = [system.cluster.owner for system in systems]
        found = buckets([system.leaves[0] for system in systems], owners, group.limit)
        self._left = [[systems[i] for i in bucket] for bucket in found]

    def reached(self, system: System) -> None:
        """One of a system's leaves is complete; send what can be sent."""
        self._reached[system] += 1
        while self._left and all(self._reached[s] >= len(s.leaves) for s in self._left[0]):
            self._send()

    def complete(self) -> Iterator[tuple[System, list[Tensor]]]:
        """Send the rest, and wait for what was sent: a system, and what each of its leaves sums to."""
        while self._left:
            self._send()
        while self.sent:
            systems, bucket = self.sent.pop(0)
            tensors = iter(bucket.wait())
            for system in systems:
                yield system, [next(tensors) for _ in system.leaves]

    def _send(self) -> None:
        for _, bucket in self.sent:
            bucket.let_go()
        systems = self._left.pop(0)
        tensors = [tensor for system in systems for tensor in system.take_share()]
        common = all(system.common for system in systems)
        self.sent.append((systems, self._group.send(tensors, systems[0].cluster.owner, common)))


class AfterForward:
    """A hook of a model that may be wrapped by DDP later. A copy of it does nothing.

    torch decides before a forward pass whether it has hooks, so that one of the wrapper's comes too late for the pass
    in which it is met. Without it ranks that use other layers in that pass would not send the same.
    """

    def __init__(self, reduction: "Reduction | None" = None) -> None:
        self.reduction = reduction

    def __call__(self, model: nn.Module, _: Any, output: Any) -> None:
        """Have the output tell when backward begins, if the wrapper around this very model is called."""
        around = active_ddp()
        if self.reduction is None or torch.compiler.is_compiling() or around is None:
            return
        if self.reduction.notice() is around and self.reduction.hooks_behind(around):
            self.reduction.after_forward(around, model, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return AfterForward, ()


class Reduction:
    """Brings every system's S and number of samples to its owner, summed over all ranks that share the batch.

    Args:
        model: the model, or what wraps it.
        systems: in the order of the model's layers.
        settle: called when the ranks are known, to decide on owners.
    """

    def __init__(self, model: nn.Module, systems: Sequence[System], settle: Callable[[Ranks], None]) -> None:
        self.ranks, self.systems, self._settle = Ranks(model), list(systems), settle
        self._round: Round | None = None
        self._totals: dict[System, list[Tensor]] = {}
        self._model = ref(model)
        layers = Counter(system.layer for system in systems)
        self._in_use = {system for system in systems if layers[system.layer] == 1}
        around = self.ranks.wrapper or _outermost(model)
        waits = around is None and several_ranks()
        self._hooks = [model.register_forward_hook(AfterForward(self))] if waits else []
        self._watch(around)

    def notice(self) -> Any:
        """Look, in a layer's forward, whether DDP was put around the model after `attach`.

        Returns:
            The wrapper; None where there is none.
        """
        wrapper = self.ranks.wrapper
        if wrapper is None and (wrapper := active_ddp()) is not None:
            self.ranks.wrapper = wrapper
            self._watch(None if self.hooks_behind(wrapper) else wrapper)
        return wrapper

    def hooks_behind(self, wrapper: Any) -> bool:
        """Whether the model, which has a hook, is all that a wrapper calls."""
        model = self._model()
        return bool(self._hooks) and model is not None and model is wrapper.module and not is_compiled(model)

    def shadow(self) -> None:
        """Take part in a round of other ranks with nothing to add; sums under `no_sync` are lost, as in DDP."""
        for system in self.systems:
            system.forget()
        self._begin(synchronised=True)

    def release(self) -> None:
        """Take the hooks off the wrapper and the model."""
        for hook in self._hooks:
            hook.remove()

    def reached(self, system: System) -> None:
        """A backward pass has added to one of a system's leaves all that it will."""
        if self._round is not None:
            self._round.reached(system)

    def summed(self, clusters: Iterable[Cluster]) -> dict[Cluster, list[Term]]:
        """What ranks have summed for clusters that they share; S has no memory where another rank owns it."""
        systems = [system for cluster in clusters for system in cluster.systems]
        self._end_round()
        self._send_now(_trained(systems))
        found: dict[Cluster, list[Term]] = {}
        for system in systems:
            if sums := self._totals.pop(system, None):
                system.refuse_changed()
                found.setdefault(system.cluster, []).append(Term(system, *sums))
        return found

    def _send_now(self, systems: Sequence[System]) -> None:
        """Send what no round was about: what came after a round or in a first step, or all of it."""
        waiting = [s for s in systems if s.S is not None or s not in self._totals]
        # a rank that did not use a layer in this step has a say in it all the same
        known = {system.layer for system in self._in_use}
        begun = self._agree([s for s in waiting if s.layer not in known and s.cluster.watch.waiting])
        if not begun and not any(system.S is not None for system in waiting):
            return
        for group, clusters in by_group(dict.fromkeys(system.cluster for system in waiting)):
            mine = [s for s in waiting if s.cluster in clusters and s in self._in_use]
            self._arrive(Round(group, mine))
        for system in waiting:
            if system.S is not None:
                raise RuntimeError(
                    f"{system.name}: this part of the layer is in use for the first time, but ranks agreed in the "
                    "first step on the parts whose S is summed. Call proxprop.attach anew"
                )

    def _agree(self, systems: Sequence[System]) -> bool:
        """Settle with all ranks which of a layer's parts are in use; attention has more than a model uses.

        Returns:
            Whether any of them is.
        """
        if not systems:
            return False
        group, device = systems[0].cluster.group, systems[0].leaves[0].device
        assert group is not None
        flags = group.largest(torch.tensor([float(s.S is not None) for s in systems], device=device)).tolist()
        self._in_use |= {system for system, flag in zip(systems, flags, strict=True) if flag}
        return any(flags)

    def _end_round(self) -> None:
        """Take in what was sent in the last pass in which gradients were averaged, if it is not done yet."""
        if self._round is not None:
            ended, self._round = self._round, None
            self._arrive(ended)

    def _arrive(self, ended: Round) -> None:
        """Add what a round has summed to the totals."""
        for system, found in ended.complete():
            for total, more in zip(self._totals.setdefault(system, found), found, strict=True):
                if total is not more:
                    total.add_(more)

    def _watch(self, around: Any) -> None:
        """Settle owners while all ranks are here, and have what is around the model tell when backward begins."""
        self._settle(self.ranks)
        if around is not None and several_ranks():
            self._hooks = [*self._hooks, around.register_forward_hook(self.after_forward)]

    def after_forward(self, around: Any, _: Any, output: Any) -> None:
        """Have an output of what is around the model tell when backward begins."""
        begun: list[bool] = []
        synchronised = averages_gradients(around)

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
        self._drop_zeroed()
        # what passes under `no_sync` summed is sent with this one, which may not come to the layer on this rank
        for cluster in dict.fromkeys(system.cluster for system in self.systems if system.holds):
            cluster.watch.forget_if_zeroed()
        group = next((s.cluster.group for s in self.systems if s.cluster.group is not None), None)
        if group is None or not synchronised:
            return
        together = [system for system in reversed(self.systems) if system.cluster.group is group]
        for system in together:
            system.cluster.watch.note_average()
        takes_part = [s for s in _trained(together) if s in self._in_use and s.cluster.observed]
        self._round = Round(group, takes_part)

    def _drop_zeroed(self) -> None:
        """Forget totals whose gradient the user has zeroed without a step; decided on the device."""
        some: dict[System, Tensor] = {}
        for system in list(self._totals):
            gradients = [local(p.grad) for p in system.parameters if p.grad is not None]
            if gradients:
                some[system] = torch.stack([g.any() for g in gradients]).any()
            else:
                del self._totals[system]
        # a shard may be zero, or empty, where others are not
        spread = [system for system in some if mesh_of(system.parameters[0]) is not None]
        for group, clusters in by_group(dict.fromkeys(system.cluster for system in spread)):
            mine = [system for system in spread if system.cluster in clusters]
            flags = group.largest(torch.stack([some[s] for s in mine]).to(mine[0].leaves[0]))
            some |= zip(mine, flags.bool().unbind(), strict=True)
        for system, flag in some.items():
            for total in self._totals[system]:
                if not total.is_meta:
                    total.masked_fill_(~flag.to(total.device), 0.0)


def _trained(systems: Iterable[System]) -> list[System]:
    """Those that train something now, with leaves for that; also on a rank that did not call their layers yet."""
    found = [system for system in systems if system.trained]
    for system in found:
        system.make_leaves()
    return found


def _outermost(model: nn.Module) -> nn.Module | None:
    """The module of FSDP2 that is around all others of it; None where there is not just one."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    inside = {inner for module in sharded for inner in module.modules() if inner is not module}
    roots = [module for module in sharded if module not in inside]
    return roots[0] if len(roots) == 1 else None
