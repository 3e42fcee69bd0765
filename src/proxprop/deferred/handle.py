"""What `attach` returns: the layers of a model whose steps are solved when their optimizer steps."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from proxprop.deferred.accumulator import Inputs, System
from proxprop.deferred.average import Averages, Running
from proxprop.deferred.equation import Term, components, join
from proxprop.deferred.observing import Attachment, Cluster, Pair
from proxprop.deferred.owners import settle
from proxprop.deferred.preconditioner import RowSolve, Solve, absolute_form
from proxprop.deferred.reduction import Ranks, Reduction
from proxprop.deferred.writer import Directions
from proxprop.nn import ProximalLayer
from proxprop.torch_internals import active_ddp, backward_pass, in_transform

if TYPE_CHECKING:
    from proxprop.deferred.attaching import Choice


class BeforeForward:
    """A hook of the model that looks after layers that rest. A copy of it does nothing.

    In a compiled model, and where parts of the model are called alone, it does not run, and what it would have
    noticed is noticed a step later.
    """

    def __init__(self, handle: "Attached | None" = None) -> None:
        self.handle = handle

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Wake layers up that train other parameters than before; notice a wrapper that was put around the model."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_transform():
            return
        if self.handle is not None:
            if self.handle.reduction.ranks.wrapped or active_ddp() is not None:
                self.handle.notice_ranks()
            for tie in tuple(self.handle.resting):
                tie.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return BeforeForward, ()


class Attached(Joinable):
    """Converted layers whose steps are solved when their optimizer steps. Made by `proxprop.attach`.

    It takes part in torch's join context for uneven inputs, `with Join([model, attached]):`. A rank that has run out of
    inputs brings zeros to the sums of those that have not, and keeps its running averages in step with theirs. As DDP
    divides gradients by all ranks (or by those that still have inputs, with `divide_by_initial_world_size=False`), D is
    that of one process whose loss is the sum of the remaining ranks' losses over that number.

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
        clusters: the systems, those that share parameters together.
        ties: what ties each layer to this handle.
        resting: those whose layers rest.
        averages: the running averages; None without them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        choices: Mapping[str, "Choice"],
        running: Running | None,
    ) -> None:
        super().__init__()
        self.optimizers, self.choices, self._detached = list(optimizers), dict(choices), False
        parts = self._systems(running)
        self.systems = [system for systems in parts.values() for system in systems.values()]
        update_every = running.update_every if running is not None else 1
        self.clusters = [Cluster(systems, update_every) for systems in components(self.systems)]
        self.averages = Averages(running, self.clusters) if running is not None else None
        self.directions = Directions(kept=running is not None)
        attached = {choice.layer for choice in self.choices.values()}
        self._left = {  # parameters of layers that no optimizer held when they were attached
            id(p): layer._layer_name
            for layer in model.modules()
            if isinstance(layer, ProximalLayer) and layer not in attached and layer._attached is None
            for p in layer.parameters()
        }
        # Ranks may turn out to differ here, so that nothing must be tied or hooked before.
        self.reduction = Reduction(model, self.systems, self._settle)
        for cluster in self.clusters:
            cluster.watch.follow(cluster.parameters)
        # torch looks up a module's forward before it calls the module's own hooks
        self.ties = [Attachment(self, layer, own, awake=layer is model) for layer, own in parts.items()]
        self.resting = set[Attachment]()
        for tie in self.ties:
            tie.layer._tie(tie)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        if running is not None:
            self._hooks.append(model.register_forward_pre_hook(BeforeForward(self)))

    def _systems(self, running: Running | None) -> dict[ProximalLayer, dict[str, System]]:
        """The systems of each layer that does not solve inside backward; none of one that stays explicit."""
        inputs, found = Inputs(), dict[ProximalLayer, dict[str, System]]()
        for name, choice in self.choices.items():
            if choice.mode == "immediate":
                continue
            parts = choice.layer._parts() if choice.mode == "deferred" else {}
            found[choice.layer] = {
                key: System(
                    f"{name}.{key}" if key else name, choice.layer, part, running, inputs, self._note_summed
                )
                for key, part in parts.items()
            }
        return found

    def _note_summed(self, system: System) -> None:
        self.reduction.reached(system)

    def _settle(self, ranks: Ranks) -> None:
        """The ranks are known: give every layer its owner."""
        settle(self.clusters, ranks, self.averages.running if self.averages is not None else None)
        if self.averages is not None:
            self.averages.let_go()

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
        chosen = None if parameters is None else {id(p) for p in parameters}
        clusters = [c for c in self.clusters if chosen is None or not chosen.isdisjoint(c.ids)]
        observed, resting = list[Cluster](), list[Cluster]()
        for cluster in clusters:
            if cluster.parameters[0].grad is None and not self._lends:
                cluster.watch.drop_given_up()
            if cluster.due or not cluster.resting:
                if cluster.watch.waiting:
                    observed.append(cluster)
                if cluster.watch.resting:
                    cluster.watch.tell_unseen()
            elif cluster.watch.look():
                cluster.watch.refuse_mixed()
                resting.append(cluster)
        rows = {} if self.averages is not None else _solves_with_rows(observed)
        steps = self._summed([cluster for cluster in observed if cluster not in rows])
        for cluster in (*rows, *steps):
            cluster.watch.refuse_mixed()
        if self.averages is None:
            self.directions.write(
                rows | {c: _solves(terms) for c, terms in steps.items()}, set(), self._lends
            )
        elif steps or resting:
            for cluster, terms in steps.items():
                cluster.watch.clear_given_up(terms)
            self._average(self.averages, steps, resting)
        for cluster in (*rows, *steps, *resting):
            cluster.watch.note_solved()

    def _summed(self, clusters: Iterable[Cluster]) -> dict[Cluster, list[Term]]:
        """What was summed for clusters, where anything was; S has no memory where another rank owns it."""
        found: dict[Cluster, list[Term]] = {}
        shared: list[Cluster] = []
        for cluster in clusters:
            if cluster.group is not None:
                shared.append(cluster)
                continue
            for system in cluster.systems:
                if sums := system.take():
                    found.setdefault(cluster, []).append(Term(system, *sums))
        return found | self.reduction.summed(shared) if shared else found

    def _average(
        self, averages: Averages, steps: Mapping[Cluster, Sequence[Term]], resting: Sequence[Cluster]
    ) -> None:
        """Take in S of clusters, and turn their gradients and those of others with the operators that are kept."""
        for cluster in resting:
            for system in cluster.systems:
                system.forget()  # a graph from an observed step, or a layer with another cluster that is observed
        averages.take_in(steps, resting)
        done = {cluster for cluster in resting if cluster.watch.holds_direction()}
        self.directions.write({c: c.pairs for c in (*steps, *resting)}, done, self._lends)
        for cluster in (*steps, *resting):
            cluster.reach(cluster.steps + 1)
        self._rest([*(c for c in steps if not c.due), *(c for c in resting if c.due)])

    def _rest(self, clusters: Iterable[Cluster]) -> None:
        """Let layers rest, or wake up, as their next step is."""
        changed = set(clusters)
        for tie in self.ties if changed else ():
            if not changed.isdisjoint(tie.clusters):
                (self.resting.add if tie.rest() else self.resting.discard)(tie)

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
        self._warn_of_added(parameters)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.solve(parameters)
            return None

        def solved() -> Any:
            loss = closure()
            self.solve(parameters)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": solved}
        return (args[0], solved, *args[2:]), kwargs

    def _warn_of_added(self, parameters: Iterable[Tensor]) -> None:
        """Warn once of layers whose parameters came to an optimizer after `attach`, as by `add_param_group`."""
        added = [self._left[id(p)] for p in parameters if id(p) in self._left] if self._left else []
        if added:
            self._left = {}
            warnings.warn(
                f"{added[0]} came to the optimizer after attach, so that it is solved inside every backward. Call "
                ".detach() on what proxprop.attach returned, and attach again",
                UserWarning,
                stacklevel=2,
            )

    def detach(self) -> None:
        """Go back to immediate mode: layers solve inside backward again, and optimizers step as before.

        S that waits and running averages are dropped. Detaching twice does no harm.
        """
        if self._detached:
            return
        for hook in self._hooks:
            hook.remove()
        self.reduction.release()
        for cluster in self.clusters:
            cluster.watch.release()
        for choice in self.choices.values():
            choice.layer._tie(None)
        if self.averages is not None:
            self.averages.clear()
        self.directions = Directions(kept=False)
        self._hooks, self.systems, self.clusters, self.ties, self.resting = [], [], [], [], set()
        self._detached = True

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """The running averages as a dict of tensors, to be saved beside the model's and the optimizer's state.

        Empty without `running`. Keys are the layers' names followed by `S`, `samples`, `steps`, `kept` and `trained`,
        which says what parameters the others are for. The tensors are the ones in use, but for `samples` of a layer
        with a bias, whose S holds that number. Under several ranks each has what it owns:
        `torch.distributed.checkpoint` saves that as one state and loads it on any number of ranks. A fresh handle gives
        zeros, which it fills in place.

        Args:
            whole: bring the whole state to all ranks, which all have to ask for it.
        """
        return self.averages.state(whole) if self.averages is not None else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave; training goes on exactly where it stopped.

        A layer whose trained parameters are others now starts anew, as it does where they change between two steps.

        Raises:
            ValueError: the state is of another model, so that averages start anew; or there are no running averages
                here.
        """
        if self.averages is not None:
            try:
                self.averages.load(state)
            finally:
                self._rest(self.clusters)
        elif state:
            raise ValueError(
                "this handle keeps no running averages: attach with running=proxprop.Running(...)"
            )

    @property
    def bytes_sent(self) -> int:
        """Bytes of S, inverses, gradients to owners and directions that this rank has sent for other ranks so far."""
        return self.reduction.ranks.traffic.bytes.total()

    @property
    def bytes(self) -> int:
        """Memory for S of all layers together, over all ranks."""
        return sum(choice.bytes for choice in self.choices.values() if choice.mode == "deferred")

    @property
    def bytes_held(self) -> int:
        """Memory of running averages and inverses on this rank."""
        return self.averages.bytes if self.averages is not None else 0

    def __repr__(self) -> str:
        places = {c.systems[0].layer: f", on rank {c.owner}: {c.route.why}" for c in self.clusters if c.route}
        lines = [f"  {name}: {choice}{places.get(choice.layer, '')}" for name, choice in self.choices.items()]
        return "\n".join(["Attached(", *lines, ")"])

    @property
    def _lends(self) -> bool:
        """Whether an owner may have run out of inputs, and have no gradients."""
        return bool(self._join_config.enable)

    def notice_ranks(self) -> None:
        """Look, in a layer's forward, what is around the model.

        Raises:
            RuntimeError: a join context does not know of this attachment, so that ranks would wait for each other.
        """
        wrapper = self.reduction.notice()
        if wrapper is not None and wrapper._join_config.enable and not self._join_config.enable:
            raise RuntimeError(
                "the model is in a join context for uneven inputs that does not know of proxprop. Instead of "
                "`with model.join():` write `with Join([model, attached]):`, with "
                "`attached = proxprop.attach(optimizer, model)` and Join from torch.distributed.algorithms.join"
            )

    def shadow(self) -> None:
        """Take part, with nothing to add, in a step of ranks that still have inputs."""
        if self.reduction.ranks.wrapper.require_forward_param_sync:  # set by DDP's own shadow
            self.reduction.shadow()
            self.solve()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in every iteration of the others."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The wrapper's device."""
        device: torch.device = self.reduction.ranks.wrapper.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The wrapper's process group."""
        return self.reduction.ranks.wrapper.join_process_group


class _Shadow(JoinHook):
    def __init__(self, attached: Attached) -> None:
        self.attached = attached

    def main_hook(self) -> None:
        self.attached.shadow()


def _solves_with_rows(clusters: Iterable[Cluster]) -> dict[Cluster, list[Pair]]:
    """What turns the gradients of layers that have kept rows instead of S."""
    found: dict[Cluster, list[Pair]] = {}
    for cluster in clusters:
        for system in cluster.systems:
            if (rows := system.take_rows()) is not None:
                found[cluster] = [(system, RowSolve(rows, system.layer._settings))]
    return found


def _solves(terms: Sequence[Term]) -> list[Pair]:
    """What turns the gradients of a cluster into directions in a step without running averages."""
    found: list[Pair] = []
    for term in join(terms):
        settings = term.equation.layer._settings
        form = absolute_form(term.S, term.samples, settings)
        found.append((term.equation, Solve(form, settings.solver, once=True)))
    return found
