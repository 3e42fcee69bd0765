"""What `attach` returns: the layers of a model whose steps are solved when their optimizer steps."""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from proxprop.deferred.accumulator import Sampling, SeenInput, System
from proxprop.deferred.average import Averages, Cluster, Running, entries, load_state_dict
from proxprop.deferred.equation import Equation, Term, components, join
from proxprop.deferred.exchange import Exchange
from proxprop.deferred.gradients import Watch
from proxprop.deferred.preconditioner import Operator, RowSolve, Solve, absolute_form
from proxprop.deferred.ranks import Ranks
from proxprop.deferred.reduction import Reduction
from proxprop.deferred.writer import direct
from proxprop.distributed import mesh_of, several_ranks, whole
from proxprop.nn import ProximalLayer
from proxprop.torch_internals import backward_pass, in_transform, writes

if TYPE_CHECKING:
    from proxprop.deferred.attaching import Choice


class Attachment:
    """One layer's tie to deferred mode. A copy or a pickle of the layer is not attached."""

    def __init__(
        self,
        handle: "Attached",
        layer: ProximalLayer,
        systems: dict[str, System],
        watches: list[Watch],
        awake: bool,
    ) -> None:
        self.handle, self.layer, self.systems, self._watches = handle, layer, systems, watches
        self._parameters = [
            (module, name, parameter)
            for module in layer.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if mesh_of(parameter) is None
        ]
        self._spread = any(mesh_of(parameter) is not None for parameter in layer.parameters())
        self._awake = awake or self._spread

    def rest(self) -> None:
        """Let the layer be torch's own until it is to be observed again, where gradients can be followed without it."""
        resting = bool(self._watches) and all(watch.cluster.resting for watch in self._watches)
        self.layer._rest(resting and not self._awake)
        for watch in self._watches:
            watch.rest(watch.cluster.resting and not self._spread and not several_ranks())

    def check(self) -> None:
        """Before a forward pass: see whether other parameters are trained, or there, than in the step before."""
        self._refuse_other_parameters()
        for watch in self._watches:
            if watch.cluster.observed:
                self.rest()
                return

    def tap(self, output: Tensor, inputs: Sequence[Tensor], part: str, of: Tensor | None = None) -> Tensor:
        """The output of torch's own forward such that backward adds S of the inputs to one of the layer's systems."""
        self._begin_call()
        system = self.systems[part]
        if not system.trained:
            return output
        seen = partial(self.handle.seen, inputs[0] if of is None else of)
        return system.tap(output, [whole(t) for t in inputs], self.handle.sampling(system), seen)

    def explicit(self) -> bool:
        """Whether the layer keeps BackProp's gradient."""
        return not self.systems

    def observed(self) -> bool:
        """Whether S of any of the layer's systems is summed in this step; else a call runs torch's own layer."""
        for watch in self._watches:
            if watch.cluster.observed:
                return True
        # FSDP2 gives gradients to gathered parameters, which a compiled call can't follow: only S tells of them there.
        if self._spread and torch.compiler.is_compiling():
            return True
        self._begin_call()
        if self._spread:
            for watch in self._watches:
                watch.follow(self.layer.parameters())
        return False

    def _begin_call(self) -> None:
        """What to look at in every call that gradients will come from."""
        if not torch.compiler.is_compiling():
            self._refuse_other_parameters()
        self.handle.reduction.notice()
        self.handle.refuse_uneven_inputs()

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


class BeforeForward:
    """A hook of the model, by which layers that rest are looked after. A copy of it does nothing.

    In a compiled model, and where parts of the model are called alone, it does not run, and what it would have
    noticed is noticed a step later.
    """

    def __init__(self, handle: "Attached | None" = None) -> None:
        self.handle = handle

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Have the handle look."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_transform():
            return
        if self.handle is not None:
            self.handle.before_forward()

    def __reduce__(self) -> tuple[Any, ...]:
        return BeforeForward, ()


class Joins(Joinable):
    """What torch's join context asks of a participant beside the model itself.

    A rank that has run out of inputs brings zeros to the sums of those that have not, and keeps its running averages
    in step with theirs. As DDP divides gradients by all ranks (or by those that still have inputs, with
    `divide_by_initial_world_size=False`), D is that of one process whose loss is the sum of the remaining ranks'
    losses over that number.
    """

    reduction: Reduction

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def solve(self) -> None:
        """Take a step's sums in."""

    def shadow(self) -> None:
        """Take part, with nothing to add, in a step of ranks that still have inputs."""
        if self.reduction.ranks.wrapper.require_forward_param_sync:  # set by DDP's own shadow
            self.reduction.shadow()
            self.solve()

    def refuse_uneven_inputs(self) -> None:
        """Raise inside a join context that does not know of this attachment: ranks would wait for each other."""
        wrapper = self.reduction.ranks.wrapper
        if wrapper is not None and wrapper._join_config.enable and not self._join_config.enable:
            raise RuntimeError(
                "the model is in a join context for uneven inputs that does not know of proxprop. Instead of "
                "`with model.join():` write `with Join([model, attached]):`, with "
                "`attached = proxprop.attach(optimizer, model)` and Join from torch.distributed.algorithms.join"
            )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in every iteration of the others."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The wrapper's."""
        device: torch.device = self.reduction.ranks.wrapper.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The wrapper's."""
        return self.reduction.ranks.wrapper.join_process_group


class _Shadow(JoinHook):
    def __init__(self, joins: Joins) -> None:
        self.joins = joins

    def main_hook(self) -> None:
        self.joins.shadow()


class Attached(Joins):
    """Converted layers whose steps are solved when their optimizer steps. Made by `proxprop.attach`.

    Example:
        >>> import proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> attached = proxprop.attach(optimizer, model)
        >>> model(torch.randn(16, 4)).square().mean().backward()
        >>> attached.solve()  # not needed, but to clip or look at directions
        >>> norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> attached.detach()

    Attributes:
        optimizers: the optimizers whose steps are preceded by a solve.
        choices: what was decided for each converted layer, by name.
        systems: what S is summed for.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        choices: Mapping[str, "Choice"],
        running: Running | None,
    ) -> None:
        super().__init__()
        self.optimizers, self.choices = list(optimizers), dict(choices)
        self._detached = False
        self._seen: SeenInput | None = None
        self.averages = Averages(running) if running is not None else None
        self.systems: list[System] = []
        parts = {
            choice.layer: self._systems(name, choice)
            for name, choice in self.choices.items()
            if choice.mode != "immediate"
        }
        update_every = running.update_every if running is not None else 1
        self.clusters = [Cluster(systems, update_every) for systems in components(self.systems)]
        for cluster in self.clusters:
            cluster.systems[0].alone = len(cluster.systems) == 1 and running is None
        self._cluster_of: dict[Equation, Cluster] = {s: c for c in self.clusters for s in c.systems}
        self.exchange = Exchange(self.clusters, running)
        # Ranks may turn out to differ here, so that nothing must be tied or hooked before.
        self.reduction = Reduction(
            model, self.systems, lambda system: self._cluster_of[system].place.owner, self._settle
        )
        self._watches = {cluster: Watch(cluster) for cluster in self.clusters}
        self._ties: dict[Cluster, list[Attachment]] = {}
        for layer, systems in parts.items():
            clusters = dict.fromkeys(self._cluster_of[system] for system in systems.values())
            watches = [self._watches[cluster] for cluster in clusters]
            # torch looks up a module's forward before it calls the module's own hooks
            tie = Attachment(self, layer, systems, watches, awake=layer is model)
            layer._tie(tie)
            for cluster in clusters:
                self._ties.setdefault(cluster, []).append(tie)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        if self.averages is not None:
            self._hooks.append(model.register_forward_pre_hook(BeforeForward(self)))

    def _systems(self, name: str, choice: "Choice") -> dict[str, System]:
        """The systems of a layer, none where it stays explicit."""
        if choice.mode == "explicit":
            return {}
        running = self.averages.running if self.averages is not None else None
        width = running.block if running is not None else None
        made = {
            key: System(f"{name}.{key}" if key else name, choice.layer, part, running is not None, width)
            for key, part in choice.layer._parts().items()
        }
        self.systems += made.values()
        return made

    @torch.no_grad()
    def solve(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Turn gradients in `.grad` into directions now, to clip or look at them before a step.

        The optimizer's step then solves nothing more. Where no backward pass came since the last solve, nothing is
        done.

        Args:
            parameters: solve only for layers that have one of these, and those that share parameters with them.

        Raises:
            RuntimeError: the handle was detached.
        """
        if self._detached:
            raise RuntimeError("solve: the handle was detached: call proxprop.attach(optimizer, model) again")
        chosen = None if parameters is None else {id(p) for p in parameters}  # tensors are slow to hash
        systems: list[System] = []
        resting: list[Cluster] = []
        for cluster, watch in self._watches.items():
            if chosen is not None and chosen.isdisjoint(cluster.ids):
                continue
            if not cluster.resting:
                systems += cluster.systems
                continue
            watch.look()
            if watch.waiting:
                watch.refuse_mixed()
                resting.append(cluster)
        self._solve_rows(systems)
        steps = self._steps(self.reduction.summed(systems))
        if self.averages is None:
            self._turn({cluster: _solves(terms) for cluster, terms in steps.items()}, done=set())
        elif steps or resting:
            self._average(self.averages, steps, resting)
        for cluster in (*steps, *resting):
            self._watches[cluster].note_solved()

    def _solve_rows(self, systems: Sequence[System]) -> None:
        """Solve for systems that have kept rows instead of S."""
        for system in systems:
            if (rows := system.take_rows()) is not None:
                watch = self._watches[self._cluster_of[system]]
                watch.refuse_mixed()
                direct(system, RowSolve(rows, system.layer._settings))
                watch.note_solved()

    def _steps(self, terms: Iterable[Term]) -> dict[Cluster, list[Term]]:
        """What was summed, by cluster."""
        steps: dict[Cluster, list[Term]] = {}
        for term in terms:
            steps.setdefault(self._cluster_of[term.equation], []).append(term)
        for cluster in steps:
            self._watches[cluster].refuse_mixed()
        return steps

    def _average(
        self, averages: Averages, steps: Mapping[Cluster, Sequence[Term]], resting: Sequence[Cluster]
    ) -> None:
        """Take in S of clusters, and turn their gradients and those of others with the operators that are kept."""
        for cluster in resting:
            for system in cluster.systems:
                system.forget()  # a graph from an observed step, or a layer with another cluster that is observed
        averages.take_in(steps)
        averages.refresh(resting)
        self.exchange.send(averages.anew)
        averages.anew.clear()
        done = {cluster for cluster in resting if self._watches[cluster].holds_direction()}
        self._turn({cluster: cluster.operators for cluster in (*steps, *resting)}, done)
        for cluster in (*steps, *resting):
            cluster.reach(cluster.steps + 1)
        for cluster in steps:
            self._watches[cluster].follow(cluster.parameters)
        self._rest([*steps, *(cluster for cluster in resting if cluster.due)])

    def _turn(
        self, operators: Mapping[Cluster, Sequence[tuple[Equation, Operator]]], done: set[Cluster]
    ) -> None:
        """Turn gradients into directions, but those that hold it already."""
        self.exchange.turn(operators, done, lend=self._join_config.enable)

    def _settle(self, ranks: Ranks) -> None:
        """The ranks are known: give every layer its owner."""
        self.exchange.settle(ranks)
        if self.averages is not None:
            self.averages.settle(self.clusters)

    def _rest(self, clusters: Iterable[Cluster]) -> None:
        """Let layers rest, or wake up, as their next step is."""
        for tie in {tie: None for cluster in clusters for tie in self._ties[cluster]}:
            tie.rest()

    def before_forward(self) -> None:
        """Wake layers up that train other parameters than before; notice a wrapper that was put around the model."""
        self.reduction.notice()
        for cluster, ties in self._ties.items():
            if not cluster.due:
                for tie in ties:
                    tie.check()

    def sampling(self, system: System) -> Sampling | None:
        """Which rows S of the next call is estimated from; None for all."""
        rows = self.averages.running.rows if self.averages is not None else None
        if rows is None or torch.compiler.is_compiling():
            return None
        return Sampling(rows, (self._cluster_of[system].steps, system.count_call()))

    def seen(self, input: Tensor, question: tuple[object, ...]) -> SeenInput:
        """An input that a layer sees; the one before where that was the same, and all that S depends on."""
        now, before = SeenInput(weakref.ref(input), writes(input), question), self._seen
        if before is None or not before.matches(now):
            self._seen = now
            return now
        before.left += 1
        return before

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Solve before the optimizer steps; where it is given a closure, only after each call of it.

        The closure may zero the gradient first, or add a last micro-batch to it.
        """
        if backward_pass() != -1:
            raise RuntimeError(
                "an optimizer stepped inside backward, where S is not complete yet. In deferred mode step after "
                "backward, or call .detach() on what proxprop.attach returned and let each layer solve inside backward"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.solve(parameters)
            return None
        solved = self._solving(closure, parameters)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": solved}
        return (args[0], solved, *args[2:]), kwargs

    def _solving(self, closure: Callable[[], Any], parameters: list[Tensor]) -> Callable[[], Any]:
        def solved() -> Any:
            loss = closure()
            self.solve(parameters)
            return loss

        return solved

    def detach(self) -> None:
        """Go back to immediate mode: layers solve inside backward again, and optimizers step as before.

        S that waits and running averages are dropped. Detaching twice does no harm.
        """
        if self._detached:
            return
        for hook in self._hooks:
            hook.remove()
        self.reduction.release()
        for watch in self._watches.values():
            watch.release()
        for choice in self.choices.values():
            choice.layer._tie(None)
        self._hooks, self.systems, self.clusters, self._watches = [], [], [], {}
        self.exchange = Exchange([], None)
        if self.averages is not None:
            self.averages.averages.clear()
        self._detached = True

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """The running averages as a dict of tensors, to be saved beside the model's and the optimizer's state.

        Empty without `running`. Keys are the layers' names followed by `S`, `samples`, `steps` and `kept`, and the
        tensors are the ones in use. Under several ranks each has what it owns: `torch.distributed.checkpoint` saves
        that as one state and loads it on any number of ranks. A fresh handle gives zeros, which it fills in place.

        Args:
            whole: bring the whole state to all ranks, which all have to ask for it.
        """
        if self.averages is None:
            return {}
        found = entries(self.averages, self.clusters)
        state = self.exchange.whole(found) if whole else found
        return {entry.name: entry.tensor for entry in state if entry.here}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; training goes on exactly where it stopped.

        Raises:
            ValueError: the state is of another model, or there are no running averages here.
        """
        if self.averages is not None:
            load_state_dict(self.averages, self.clusters, state)
            self._rest(self.clusters)
        elif state:
            raise ValueError(
                "this handle keeps no running averages: attach with running=proxprop.Running(...)"
            )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for other ranks so far: S, inverses, gradients to owners and directions."""
        return self.reduction.ranks.traffic.bytes.total()

    @property
    def bytes(self) -> int:
        """Memory for S of all layers together, over all ranks."""
        return sum(choice.bytes for choice in self.choices.values() if choice.mode == "deferred")

    @property
    def bytes_held(self) -> int:
        """Memory of running averages and inverses on this rank."""
        kept = (operator.kept for cluster in self.clusters for _, operator in cluster.operators)
        averages = self.averages.bytes if self.averages is not None else 0
        return averages + sum(matrix.nbytes for matrix in kept if not matrix.is_meta)

    def __repr__(self) -> str:
        places = {c.systems[0].layer: f", {c.place}" for c in self.clusters if c.place.route is not None}
        lines = [f"  {name}: {choice}{places.get(choice.layer, '')}" for name, choice in self.choices.items()]
        return "\n".join(["Attached(", *lines, ")"])


def _solves(terms: Sequence[Term]) -> list[tuple[Equation, Operator]]:
    """What turns the gradients of a cluster into directions in a step without running averages."""
    found: list[tuple[Equation, Operator]] = []
    for equation, S, samples in join(terms):
        settings = equation.layer._settings
        found.append((equation, Solve(absolute_form(S, samples, settings), settings.solver, once=True)))
    return found
