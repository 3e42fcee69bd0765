"""When S is summed: the steps that layers take, their gradients, and the layers as they rest or are observed."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.deferred.accumulator import System
from proxprop.deferred.collectives import Group
from proxprop.deferred.equation import Equation, Term
from proxprop.deferred.owners import Route, Way
from proxprop.deferred.preconditioner import Operator, inverted_together
from proxprop.distributed import check_layer, local, mesh_of, several_ranks, whole
from proxprop.nn import ProximalLayer
from proxprop.torch_internals import (
    active_ddp,
    after_backward_pass,
    backward_pass,
    entries,
    stored_entries,
    writes,
)

if TYPE_CHECKING:
    from proxprop.deferred.handle import Attached

Pair = tuple[Equation, Operator]
"""An equation, and what turns its gradients into directions."""


class Cluster:
    """Systems that share parameters, mostly one alone.

    Args:
        systems: the systems.
        update_every: S is summed in the first of so many steps.

    Attributes:
        parameters: all of their parameters.
        watch: watches their gradients.
        pairs: equations and their operators, as they were last made.
        made_for: which of the parameters were trained then.
        steps: how many steps were taken.
        due: whether S is to be summed in this step. A compiled layer sees this, and no number that is new each step.
        turn: in which of the steps between two inversions the average is inverted.
        group: the ranks that share the batch; None where there is but one.
        owner: the rank of the group that owns S, the average and its inverse.
        route: how directions come from there; None where there is one rank.
    """

    def __init__(self, systems: Sequence[System], update_every: int = 1) -> None:
        self.systems, self._update_every = systems, update_every
        self.parameters = list({p: None for system in systems for p in system.parameters})
        self.ids = {id(p) for p in self.parameters}  # tensors are slow to hash
        self.pairs: list[Pair] = []
        self.made_for = list[bool]()
        self.settle(0)
        self.reach(0)
        self.watch = Watch(self)
        for system in systems:
            system.join(self)

    @property
    def name(self) -> str:
        """The first system's name."""
        return self.systems[0].name

    @property
    def device(self) -> torch.device:
        """Where S is summed; where the parameters are while none is trained."""
        leaves = (leaf for system in self.systems for leaf in system.leaves)
        return next(leaves, self.parameters[0]).device

    @property
    def observed(self) -> bool:
        """Whether S is summed in this step: it is due, or other parameters are trained than operators were made for."""
        trained = [p.requires_grad for p in self.parameters]
        return (self.due or trained != self.made_for) and True in trained

    @property
    def fits(self) -> bool:
        """Whether operators were made for what is trained."""
        return [p.requires_grad for p in self.parameters] == self.made_for

    @property
    def resting(self) -> bool:
        """Whether parameters are trained in this step without S."""
        if self.due:
            return False
        trained = [p.requires_grad for p in self.parameters]
        return trained == self.made_for and True in trained

    @property
    def cost(self) -> float:
        """How long the average takes to be inverted, in any unit; nothing where it is small."""
        matrices = [s for s in self.systems if s.usual and s.trained and not s.is_diagonal]
        sizes = [system.layout.sizes for system in matrices]
        large = (size for size in sizes if size.features >= tuning.TURNS_LEAST_FEATURES)
        return sum(size.groups * float(size.features) ** 3 for size in large)

    @property
    def together(self) -> int:
        """How many averages like this one a GPU inverts at a time, which takes less than one after the other."""
        leaves = [system.leaves[0] for system in self.systems if system.usual and system.trained]
        sizes = [leaf.nbytes for leaf in leaves if leaf.is_cuda]
        return inverted_together(max(sizes)) if sizes else 1

    def settle(
        self, turn: int, owner: int = 0, route: Route | None = None, group: Group | None = None
    ) -> None:
        """Take on a turn, and an owner among ranks."""
        self.turn, self.owner, self.route, self.group = turn, owner, route, group

    @property
    def mine(self) -> bool:
        """Whether this rank owns S."""
        return self.group is None or self.group.rank == self.owner

    @property
    def way(self) -> Way | None:
        """What travels between the owner and other ranks; None where there is one rank."""
        return self.route.way if self.route is not None else None

    def keep(self, pairs: list[Pair]) -> None:
        """Take on operators for the parameters that are trained now."""
        self.pairs, self.made_for = pairs, [p.requires_grad for p in self.parameters]
        self.watch.follow(self.parameters)

    def reach(self, steps: int) -> None:
        """Go on from so many steps."""
        self.steps, self.due = steps, steps % self._update_every == 0


def by_group(clusters: Iterable[Cluster]) -> list[tuple[Group, list[Cluster]]]:
    """Clusters by the ranks that share them, without those of this rank alone."""
    found: dict[Group, list[Cluster]] = {}
    for cluster in clusters:
        if cluster.group is not None:
            found.setdefault(cluster.group, []).append(cluster)
    return list(found.items())


Mark = tuple[int, int] | None
"""How often a gradient was written to, and where it lies: DDP may put it elsewhere, where writes are counted anew."""


class Watch:
    """Keeps S in step with the gradient that it belongs to: started anew when the user zeroes it, and never mixed.

    The first sign of a backward pass, before anything is added, is the moment to see what became of the gradient
    since the pass before: set to None, set to zero, or left. What a step that was skipped or given up has summed goes
    with its gradient. On a GPU nothing here waits for the device.

    Where a cluster rests, no Python runs in backward: a list is told which parameters a gradient came to, by its own
    `append`. Under several ranks, gradients are not where autograd put them, and all passes are looked at.

    Args:
        cluster: the systems.

    Attributes:
        waiting: whether backward passes, here or on other ranks, have brought something to solve for.
        resting: whether backward passes are looked at without Python.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.systems, self.parameters = cluster, cluster.systems, cluster.parameters
        self.waiting = self.resting = False
        self._arrived: list[Tensor] = []
        finalize(self, self._arrived.clear)  # Python can't see a cycle through a parameter's hook
        self._spread = any(mesh_of(p) is not None for p in self.parameters)
        self._task = -1
        self._summed = self._warned = self._mixed = False
        self._seen: list[Mark] = [None] * len(self.parameters)
        self._solved, self._held = list[Mark](), list[ref[Tensor] | None]()
        self._hooks: dict[int, tuple[Any, Tensor]] = {}

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Notice when a gradient comes to these: in a step that is not observed, and before S in a compiled one."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                hook = (
                    parameter.register_post_accumulate_grad_hook(self._arrived.append)
                    if self.resting
                    else parameter.register_hook(self._hook())
                )
                self._hooks[id(parameter)] = hook, parameter  # which is held, so that no other has its number

    def _hook(self) -> Callable[[Tensor], None]:
        """A hook that notices a gradient, and does not keep this object alive."""
        find = ref(self)

        def hook(_: Tensor) -> None:
            watch = find()
            if watch is not None and watch._task != backward_pass():
                watch.notice()

        return hook

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for hook, _ in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def rest(self, resting: bool) -> None:
        """Follow backward passes without Python, or look at each of them."""
        if resting != self.resting:
            self.release()
            self.resting = resting
            self.follow(self.parameters)

    def drop_given_up(self) -> None:
        """Drop what was summed if there are no gradients: this step does not use the layer, or they were set to None.

        Ranks that average gradients agree on that.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                return
        self.waiting = False
        self._arrived.clear()
        for system in self.systems:
            system.forget()

    def look(self) -> bool:
        """See what came while resting, and whether it was added to a direction.

        Returns:
            Whether there is something to solve for.
        """
        if self._arrived:
            self.waiting, self._mixed = True, bool(self._solved) and self._was_added_to(self._arrived[0])
            if not self._mixed:
                self._solved = []
                self._arrived.clear()
        return self.waiting

    def tell_unseen(self) -> None:
        """Warn if a gradient came while resting, in a step that should have been observed."""
        if self._arrived:
            self._arrived.clear()
            warnings.warn(
                f"{self.cluster.name}: this step keeps BackProp's gradient and is left out of the running average, "
                "because it trains other parameters than the one before, which was noticed too late: they were frozen "
                "or unfrozen between backward and the step, or the model is compiled, or only a part of it was called",
                RuntimeWarning,
                stacklevel=2,
            )

    def _was_added_to(self, parameter: Tensor) -> bool:
        """Whether all that was done to a gradient since the last solve is that backward passes added to it."""
        for p, solved, held, now in zip(
            self.parameters, self._solved, self._held, self._marks(), strict=False
        ):
            if p is parameter and now is not None and held is not None and held() is p.grad:
                count, place = now
                return solved == (count - sum([other is p for other in self._arrived]), place)
        return False

    def notice(self, summed: bool = False) -> None:
        """A gradient, or S, is about to be added to."""
        task = backward_pass()
        if task != self._task:
            self._task, self._summed = task, summed
            self._begin_pass()
        elif summed:
            self._summed = True

    def _begin_pass(self) -> None:
        for system in self.systems:
            if system.holds:
                self.forget_if_zeroed()
                break
        before = self._marks()
        mixed = any(before) and (self._holds_direction(before) or (self._mixed and before == self._seen))
        after_backward_pass(partial(self._end_pass, before, mixed))

    def note_average(self) -> None:
        """A backward pass begins whose gradients are averaged over ranks; this one may not have used the layer."""
        self.waiting = True

    def refuse_mixed(self) -> None:
        """Raise if the gradients were added to a direction.

        Only when they are to be solved: a discriminator's often are, by the generator's loss, and then zeroed.
        """
        if self._mixed and not self._is_zero():
            raise RuntimeError(
                f"{self.cluster.name}: .grad still held the direction of the last step when backward added to it, "
                "so that it can't be solved for. Call zero_grad() on the model between a step and the next backward"
            )

    def _is_zero(self) -> Tensor:
        """Whether nothing but zeros is in the gradients, decided on the device."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return torch.stack([~entries(local(g)).any() for g in gradients]).all()

    def clear_given_up(self, terms: Sequence[Term]) -> None:
        """Set to zero what was summed for gradients that were then set to zero: it is no part of an average.

        Under FSDP2 a shard may be zero where others are not.
        """
        marks = self._marks()
        if self._spread or marks == self._seen or not any(marks):
            return
        zeroed = self._is_zero()
        for tensor in (tensor for term in terms for tensor in term[1:]):
            if tensor is not None and not tensor.is_meta:
                tensor.masked_fill_(zeroed.to(tensor.device), 0.0)

    def note_solved(self) -> None:
        """The gradients hold the direction now."""
        self._solved, self._held = self._marks(), []
        for parameter in self.parameters:  # another gradient may come to lie where this one was
            self._held.append(ref(g) if (g := parameter.grad) is not None else None)
        self.waiting = False
        self._arrived.clear()  # also what came to gradients that were given up, before a step that is observed

    def holds_direction(self) -> bool:
        """Whether a gradient is surely still the direction of the last solve."""
        return bool(self._solved) and self._holds_direction(self._marks())

    def _holds_direction(self, now: list[Mark]) -> bool:
        return any(own is not None and own == solved for own, solved in zip(now, self._solved, strict=False))

    def forget_if_zeroed(self) -> None:
        """Drop S if a gradient of it was set to None, or all that changed to zero; the device decides the latter."""
        last = zip(self.parameters, self._seen, self._marks(), strict=True)
        seen = any(self._seen)
        gradients = [(p.grad, then != own) for p, then, own in last if then is not None or not seen]
        # FSDP2 keeps gradients to itself until it averages them: there, None says nothing before the first was seen.
        none = not seen and not self._spread and all(g is None for g, _ in gradients)
        empty = any(g is not None and g.is_sparse and stored_entries(g) == 0 for g, _ in gradients)
        if none or empty or (seen and any(g is None for g, _ in gradients)):
            for system in self.systems:
                system.forget()
        if none or self._spread:
            return
        # A gradient may be zero all along, and be written to with those that are not: clipped, or in a bucket of DDP's.
        rewritten = [g for g, changed in gradients if g is not None and not g.is_sparse and changed]
        if rewritten:
            zeroed = ~torch.stack([gradient.any() for gradient in rewritten]).any()
            for system in self.systems:
                system.clear_where(zeroed)

    def _end_pass(self, before: list[Mark], mixed: bool) -> None:
        """Remember the gradients that S belongs to, and whether they hold a direction.

        Args:
            before: the gradients when the pass began.
            mixed: whether they held a direction then.
        """
        self._task = -1
        self._seen = self._marks()
        changed = self._seen != before
        counts = self._summed or (changed and self.cluster.resting)
        self._mixed = mixed and counts
        if counts:
            self._solved, self.waiting = [], True
        if changed and not counts and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.cluster.name}: a backward pass added to the gradient but not to S: backward(inputs=...), "
                "a penalty on the parameters alone, or a forward pass from before attach. The step is solved without "
                "what it would have added. This layer will not warn again",
                RuntimeWarning,
                stacklevel=2,
            )

    def _marks(self) -> list[Mark]:
        """What each gradient is known by; None where there is none."""
        if self._spread:
            return [_mark_of_shards(g) if (g := p.grad) is not None else None for p in self.parameters]
        found: list[Mark] = []
        for parameter in self.parameters:  # a comprehension is one more call, several times in a step
            g = parameter.grad
            found.append((writes(g), 0 if g.is_sparse else g.data_ptr()) if g is not None else None)
        return found


def _mark_of_shards(gradient: Tensor) -> Mark:
    """A DTensor counts what it is asked to do, the tensor inside what FSDP2 and we do to that."""
    inside = local(gradient)
    return writes(gradient) + writes(inside), inside.data_ptr()


class Attachment:
    """One layer's tie to deferred mode. A copy or a pickle of the layer is not attached.

    Args:
        handle: what the model is attached by.
        layer: the layer.
        systems: the layer's systems by the names of its parts; none where it stays explicit.
        awake: whether its class is never swapped for the one that rests.
    """

    def __init__(
        self, handle: "Attached", layer: ProximalLayer, systems: dict[str, System], awake: bool
    ) -> None:
        self.handle, self.layer, self.systems = handle, layer, systems
        self.clusters = list(dict.fromkeys(system.cluster for system in systems.values()))
        self._parameters = [
            (module, name, parameter)
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if mesh_of(parameter) is None
        ]
        self._spread = any(mesh_of(parameter) is not None for parameter in layer.parameters())
        self._awake = awake or self._spread

    def rest(self) -> bool:
        """Let the layer be torch's own until it is to be observed again, where gradients can be followed without it.

        Returns:
            Whether the layer rests.
        """
        resting = [cluster.resting for cluster in self.clusters]
        rests = bool(resting) and all(resting)
        self.layer._rest(rests and not self._awake)
        for cluster, own in zip(self.clusters, resting, strict=True):
            cluster.watch.rest(own and not self._spread and not several_ranks())
        return rests

    def check(self) -> None:
        """Before a forward pass: see whether other parameters are trained, or there, than in the step before."""
        self._refuse_other_parameters()
        for cluster in self.clusters:
            if cluster.observed:
                self.rest()
                return

    def tap(self, output: Tensor, inputs: Sequence[Tensor], part: str, of: Tensor | None = None) -> Tensor:
        """The output of torch's own forward such that backward adds S of the inputs to one of the layer's systems."""
        self._begin_call()
        of = inputs[0] if of is None else of
        if self._spread:
            inputs = [whole(tensor) for tensor in inputs]
        return self.systems[part].tap(output, inputs, of)

    def explicit(self) -> bool:
        """Whether the layer keeps BackProp's gradient."""
        return not self.systems

    def observed(self) -> bool:
        """Whether S of any of the layer's systems is summed in this step; else a call runs torch's own layer."""
        if not self.clusters:
            return False
        for cluster in self.clusters:
            if cluster.observed:
                return True
        # FSDP2 gives gradients to gathered parameters, which a compiled call can't follow: only S tells of them there.
        if self._spread and torch.compiler.is_compiling():
            return True
        self._begin_call()
        if self._spread:
            for cluster in self.clusters:
                cluster.watch.follow(self.layer.parameters())
        return False

    def _begin_call(self) -> None:
        """Look at what must hold in every call that gradients will come from."""
        if not torch.compiler.is_compiling():
            self._refuse_other_parameters()
            if self._spread:
                check_layer(self.layer, self.layer._layer_name, attached=True)
        if self.handle.reduction.ranks.wrapped or active_ddp() is not None:
            self.handle.notice_ranks()

    def _refuse_other_parameters(self) -> None:
        """Raise where a gradient would not reach the parameters that S is summed for."""
        for module, name, parameter in self._parameters:
            if module._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"{self.layer._layer_name}: its parameters are not the ones it was attached with: they were "
                    "replaced (load_state_dict(assign=True)) or others were passed (torch.func.functional_call). "
                    "Call .detach() on what proxprop.attach returned, and attach again with an optimizer that holds "
                    "the new ones"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
