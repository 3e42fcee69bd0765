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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from proxprop.deferred.accumulator import System
from proxprop.deferred.equation import Term
from proxprop.deferred.packing import buckets
from proxprop.deferred.ranks import Bucket, Ranks, Sums
from proxprop.distributed import is_sharded, local, mesh_of, several_ranks
from proxprop.torch_internals import active_ddp, averages_gradients, tree_flatten

Sent = tuple[list[System], Bucket]

OwnerOf = Callable[[System], int]


class Round:
    """What is sent in one synchronised backward pass.

    Args:
        sums: sums over the ranks.
        systems: in the order to send them.
        owner_of: the rank that a system's S is summed on.
    """

    def __init__(self, sums: Sums, systems: Sequence[System], owner_of: OwnerOf) -> None:
        self.sent: list[Sent] = []
        self._sums, self._owner_of, self._reached = sums, owner_of, Counter[System]()
        found = buckets([s.current[0] for s in systems], [owner_of(s) for s in systems], sums.limit)
        self._left = [[systems[i] for i in bucket] for bucket in found]

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
        for _, bucket in self.sent:
            bucket.let_go()
        systems = self._left.pop(0)
        tensors = [t for s in systems for t in s.shares()]
        common = all(system.common for system in systems)
        self.sent.append((systems, self._sums.send(tensors, self._owner_of(systems[0]), common)))


class Reduction:
    """Brings every system's S and number of samples to its owner, summed over all ranks that share the batch.

    Args:
        model: the model, or what wraps it.
        systems: in the order of the model's layers.
        owner_of: the rank that a system's S is summed on.
        settle: called when the ranks are known, to decide on owners.
    """

    def __init__(
        self, model: nn.Module, systems: Sequence[System], owner_of: OwnerOf, settle: Callable[[Ranks], None]
    ) -> None:
        self.ranks, self.systems = Ranks(model), list(systems)
        self._owner_of, self._settle = owner_of, settle
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
        self._watch(self.ranks.wrapper or _outermost(model))

    def notice(self) -> None:
        """Look, in a layer's forward, whether DDP was put around the model after `attach`."""
        if self.ranks.wrapper is None and (wrapper := active_ddp()) is not None:
            self.ranks.wrapper = wrapper
            self._watch(wrapper)

    def shadow(self) -> None:
        """Take part in a round of other ranks with nothing to add; sums under `no_sync` are lost, as in DDP."""
        for system in self.systems:
            system.forget()
        self._begin(synchronised=True)

    def release(self) -> None:
        """Take the hook off the wrapper."""
        if self._hook is not None:
            self._hook.remove()

    def summed(self, systems: Sequence[System]) -> list[Term]:
        """Those of the systems that anything was summed for; S has no memory where another rank owns it."""
        self._end_round()
        self._send_now(systems)
        self._arrive()
        found = [Term(s, *s.split(self._totals.pop(s))) for s in systems if s in self._totals]
        here = [s for s in systems if s.S is not None and self.ranks.sums(s.parameters[0]) is None]
        return [*found, *(Term(s, *s.take()) for s in here)]

    def _send_now(self, systems: Sequence[System]) -> None:
        """Send what no round was about: what came after a round or in a first step, or all of it."""
        if not several_ranks():
            return
        covered = {system for sent, _ in self._sent for system in sent} | self._totals.keys()
        waiting = [s for s in systems if s.current and (s.S is not None or s not in covered)]
        waiting = [s for s in waiting if self.ranks.sums(s.parameters[0]) is not None]
        # a rank that did not use a layer in this step has a say in it all the same
        begun = self._agree([s for s in waiting if s.layer not in self._parts and s.waits])
        if not begun and not any(system.S is not None for system in waiting):
            return
        for sums in dict.fromkeys(self.ranks.sums(s.parameters[0]) for s in waiting):
            assert sums is not None
            mine = [s for s in waiting if self.ranks.sums(s.parameters[0]) is sums]
            self._sent += Round(sums, [s for s in mine if self._takes_part(s)], self._owner_of).complete()
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
        sums = self.ranks.sums(systems[0].parameters[0])
        assert sums is not None
        used = torch.tensor([float(s.S is not None) for s in systems], device=systems[0].current[0].device)
        flags = sums.largest(used).tolist()
        for system, flag in zip(systems, flags, strict=True):
            if flag:
                self._parts.setdefault(system.layer, []).append(system)
        return any(flags)

    def _takes_part(self, system: System) -> bool:
        return bool(system.current) and system in self._parts.get(system.layer, ())

    def _arrive(self) -> None:
        """Wait for what was sent, and add it to the totals."""
        while self._sent:
            systems, bucket = self._sent.pop(0)
            tensors = iter(bucket.wait())
            for system in systems:
                found = [next(tensors) for _ in system.current]
                for total, more in zip(self._totals.setdefault(system, found), found, strict=True):
                    if total is not more:
                        total.add_(more)

    def _watch(self, around: Any) -> None:
        """Have what is around the model tell when backward begins; make groups while all ranks are here."""
        for system in self.systems:
            self.ranks.sums(system.parameters[0])
        self._settle(self.ranks)
        if around is not None and several_ranks():
            self._hook = around.register_forward_hook(self._after_forward)

    def _after_forward(self, around: Any, _: Any, output: Any) -> None:
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
        self._arrive()
        self._drop_zeroed()
        found = (self.ranks.sums(system.parameters[0]) for system in self.systems)
        sums = next((each for each in found if each is not None), None)
        if sums is None or not synchronised:
            return
        together = [s for s in reversed(self.systems) if self.ranks.sums(s.parameters[0]) is sums]
        for system in together:
            system.note_average()
        self._round = Round(sums, [s for s in together if self._takes_part(s) and s.observed], self._owner_of)

    def _reached(self, system: System) -> None:
        if self._round is not None:
            self._round.reached(system)

    def _end_round(self) -> None:
        if self._round is not None:
            self._sent += self._round.complete()
            self._round = None

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
        for sums in dict.fromkeys(self.ranks.sums(s.parameters[0]) for s in spread):
            mine = [s for s in spread if self.ranks.sums(s.parameters[0]) is sums]
            if sums is not None:
                flags = sums.largest(torch.stack([some[s] for s in mine]).to(mine[0].current[0]))
                some |= zip(mine, flags.bool().unbind(), strict=True)
        for system, flag in some.items():
            for total in self._totals[system]:
                if not total.is_meta:
                    total.masked_fill_(~flag.to(total.device), 0.0)


def _outermost(model: nn.Module) -> nn.Module | None:
    """The module of FSDP2 that is around all others of it; None where there is not just one."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    inside = {inner for module in sharded for inner in module.modules() if inner is not module}
    roots = [module for module in sharded if module not in inside]
    return roots[0] if len(roots) == 1 else None
