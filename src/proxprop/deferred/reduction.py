"""When S is summed over ranks: while backward still runs under DDP, else when a step is solved.

Every backward pass in which DDP averages gradients is a *round*: each system's S is sent once, in buckets of a fixed
order, the order in which backward is expected to reach them. A bucket is sent as soon as backward has reached
all of its systems and the buckets before it were sent; what is left, also of layers that this rank did not use, is
sent before the next round or step. So all ranks send the same in the same order whatever their graphs were, and what
a pass under `no_sync` summed stays here until the next round, as its gradient does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from proxprop.deferred.accumulator import System
from proxprop.deferred.joint import Term
from proxprop.distributed import Bucket, Ranks, Sums, several_ranks
from proxprop.packing import buckets
from proxprop.torch_internals import active_ddp, tree_flatten

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
