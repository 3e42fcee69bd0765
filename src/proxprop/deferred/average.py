"""Running averages of S, inverted every so many steps, and their state.

An observed step updates the averages of all layers. Their inverses are made anew in turns: of all layers together they
take longer than a step, so that each of the `invert_every` steps has its share.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.deferred.accumulator import System
from proxprop.deferred.equation import Equation, Term, join, total
from proxprop.deferred.owners import Place
from proxprop.deferred.preconditioner import (
    Due,
    Form,
    Operator,
    absolute_form,
    empty,
    made,
    relative_form,
)
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import add_all, multiply_all, norms
from proxprop.transfer.layouts import BlockLayout


@dataclass(frozen=True)
class Running:
    """Take S from an exponential average over steps instead of from the step's own samples.

    In one step of `update_every`, with S and N of that step, summed over all micro-batches and ranks,

        S̄ ← d·S̄ + S,    N̄ ← d·N̄ + N,    d = decay**update_every,    C = S̄ / N̄,

    so that C is a weighted mean over samples from the first step on, whatever their number in a step. With c the
    mean of C's diagonal (in each group) and B the gradient of the step, the direction is

        D = (1 + ρ)·c·(ρcI + C)⁻¹ B,    ρ = damping.

    c makes one ρ serve layers of any input scale. The factor in front keeps the gradient's scale: where C is a
    multiple of the identity D is B itself, as ρ grows D tends to B, and the largest eigenvalue of `D = P B` times C,
    which bounds stable learning rates, is at most `(1 + ρ)·c` where BackProp's is C's largest.

    Args:
        decay: how much of the average is kept from one step to the next, in [0, 1). It looks back as many steps
            whatever `update_every` is.
        update_every: S is summed in a layer's first step and every so many after it. The steps between run torch's own
            layer, at its own cost, and turn its gradient with what was kept.
        invert_every: a layer's average is inverted in the first step, and then in one of so many; a multiple of
            `update_every`. Large layers take turns, so that no step inverts them all: a layer's inverse is that of the
            last update before its turn. All small ones have theirs in the first of these steps, with the update.
        damping: ρ > 0. None takes the layer's own `tau_theta` and `scaling`, with `N·C` of the step in the place of S;
            there are no turns then.
        rows: estimate S of a call from so many of its rows, drawn without replacement, and scale it up. The
            estimate is unbiased, and its mean square error is `N²/rows·(1 − rows/N)·s²`, with
            `s² = Σ‖aaᵀ − S/N‖² / (N − 1)` over the N rows a. The gradient takes all rows. None takes all for S too.
        inverse_dtype: `torch.bfloat16` keeps inverses in half the memory, and multiplies with them twice as fast. Each
            of their numbers is rounded to eight bits, which directions of large variance feel most: D errs by about
            `2⁻⁹·(1 + ρ)/ρ` of the gradient's norm. None keeps them in S's precision.
        block: keep blocks of S on its diagonal, of at most so many neighbouring features, and zero beside them: for
            layers with wide inputs. With k blocks, S, its inverse and products with it take a kth, and the inversion
            `1/k²`. D is then the stated one with that S; between blocks, inputs count as uncorrelated. c stays the
            mean over all features. The bias is in the last block. Attention's packed projections stay whole, and
            layers that share a weight are refused.
        copies: under several ranks, most bytes of inverses that a rank keeps for layers that other ranks own. A layer
            whose inverse finds no room has its gradient sent to its owner, and the direction back, in every step.

    Example:
        >>> Running(decay=0.9, update_every=5).invert_every
        10
    """

    decay: float = 0.95
    update_every: int = 10
    invert_every: int = 10
    damping: float | None = 0.3
    rows: int | None = None
    inverse_dtype: torch.dtype | None = None
    block: int | None = None
    copies: float = 2.0**26

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay should be at least 0 and less than 1 but is {self.decay}")
        for name in ("update_every", "invert_every", "rows", "block"):
            value = getattr(self, name)
            if name in ("rows", "block") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} should be a whole number of at least 1 but is {value!r}")
        if self.invert_every % self.update_every:
            raise ValueError(
                f"invert_every should be a multiple of update_every, so that S is there when it is inverted, but they "
                f"are {self.invert_every} and {self.update_every}"
            )
        if self.damping is not None and not (self.damping > 0 and math.isfinite(self.damping)):
            raise ValueError(f"damping should be > 0 and finite, or None, but is {self.damping}")
        if not self.copies >= 0:
            raise ValueError(f"copies should be a number of bytes but is {self.copies!r}")
        if self.inverse_dtype not in (None, torch.bfloat16):
            raise ValueError(f"inverse_dtype should be torch.bfloat16 or None but is {self.inverse_dtype}")


class Average(NamedTuple):
    """S̄ and N̄ of one system, or S and N of a step."""

    S: Tensor
    samples: Tensor


def update(pairs: Sequence[tuple[Average, Average]], decay: float) -> None:
    """Take in a step of systems of one precision on one device, without waiting for it.

    A system whose S is not finite is left out, alone.

    Args:
        pairs: each system's average, in place, and what it has summed since, which is overwritten.
        decay: how much of an average is kept.
    """
    averaged, averaged_samples = zip(*(average for average, _ in pairs), strict=True)
    broken, summed, counts = _cleaned([step for _, step in pairs])
    kept = summed[0].new_full(broken.shape, decay).masked_fill_(broken, 1.0).unbind()
    for held, new in ((averaged, summed), (averaged_samples, counts)):
        multiply_all(held, kept)
        add_all(held, new)


def _cleaned(steps: Sequence[Average]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Which of some S are not finite, all S and all numbers of samples; zeros, in place of S, where it is not."""
    summed = [step.S for step in steps]
    broken = ~torch.stack(norms(summed, math.inf)).isfinite()
    counts = torch.stack([step.samples for step in steps]).masked_fill_(broken, 0.0)
    for S, left_out in zip(summed, broken.unbind(), strict=True):
        S.masked_fill_(left_out, 0.0)
    return broken, summed, list(counts.unbind())


@dataclass(eq=False)
class Cluster:
    """Systems that share parameters, mostly one alone, and what turns their gradients into directions.

    Attributes:
        systems: the systems.
        update_every: S is summed in the first of so many steps.
        operators: an equation and its operator each, since they were last made.
        turn: in which of the steps between two inversions its average is inverted.
        steps: how many steps it took.
        due: whether S is to be summed in this step. A compiled layer sees this, and no number that is new each step.
        place: the rank that owns its S.
    """

    systems: Sequence[System]
    update_every: int = 1
    operators: list[tuple[Equation, Operator]] = field(default_factory=list, init=False)
    turn: int = field(default=0, init=False)
    steps: int = field(init=False)
    due: bool = field(init=False)
    place: Place = field(default=Place(), init=False)

    def __post_init__(self) -> None:
        self.parameters = list({p: None for system in self.systems for p in system.parameters})
        self.ids = {id(p) for p in self.parameters}
        self._made_for: list[bool] = []
        self.reach(0)

    @property
    def name(self) -> str:
        """The first system's."""
        return self.systems[0].name

    @property
    def observed(self) -> bool:
        """Whether S is summed in this step: it is due, or other parameters are trained than operators were made for."""
        trained = self._trained()
        return (self.due or trained != self._made_for) and any(trained)

    @property
    def resting(self) -> bool:
        """Whether its parameters are trained in this step without S."""
        if self.due:
            return False
        trained = self._trained()
        return trained == self._made_for and any(trained)

    @property
    def cost(self) -> float:
        """How long its average takes to be inverted, beside others'; nothing where it is small."""
        layouts = [system.layout for system in self.systems if system.usual and system.trained]
        sizes = [layout.sizes for layout in layouts if DIAGONAL not in layout.spaces]
        large = (size for size in sizes if size.features >= tuning.TURNS_LEAST_FEATURES)
        return sum(size.groups * float(size.features) ** 3 for size in large)

    def settle(self, place: Place) -> None:
        """Take on an owner."""
        self.place = place

    def keep(self, operators: list[tuple[Equation, Operator]]) -> None:
        """Take on operators for the parameters that are trained now."""
        self.operators, self._made_for = operators, self._trained()

    def _trained(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def reach(self, steps: int) -> None:
        """Go on from so many steps."""
        self.steps, self.due = steps, steps % self.update_every == 0


def turns(costs: Sequence[float], running: Running) -> list[int]:
    """Turns of layers, such that the steps between two inversions of a layer take about as long.

    Steps that form S have a share of the work with that. Small matrices, which cost nothing here, are inverted
    together, in the first of these steps: that takes a few calls, however many there are. Turns do not depend on the
    number of ranks, so that ranks take the steps of one process.

    Example:
        >>> turns([5.0, 3.0, 2.0, 0.0], Running(update_every=1, invert_every=2))
        [0, 1, 1, 0]
    """
    share = sum(costs) / running.invert_every
    some = running.update_every > 1
    load = [
        share if some and step % running.update_every == 0 else 0.0 for step in range(running.invert_every)
    ]
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[index] = load.index(min(load)) if costs[index] else 0
        load[found[index]] += costs[index]
    return found


def take_turns(clusters: Sequence[Cluster], running: Running) -> None:
    """Give clusters their turns."""
    for cluster, turn in zip(clusters, turns([c.cost for c in clusters], running), strict=True):
        cluster.turn = turn


class Averages:
    """The running averages of all systems of a model. Those that other ranks own have a shape here but no memory.

    Args:
        running: the user's choice.

    Attributes:
        averages: each system's.
        anew: clusters whose operators were made anew since `anew` was last emptied; the same on all ranks.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.averages: dict[Equation, Average] = {}
        self.anew: list[Cluster] = []
        self._made_for: dict[Equation, tuple[object, ...]] = {}

    @property
    def bytes(self) -> int:
        """Memory of averages on this rank."""
        return sum(average.S.nbytes for average in self.averages.values() if not average.S.is_meta)

    def settle(self, clusters: Sequence[Cluster]) -> None:
        """Let go of what other ranks own."""
        for cluster in clusters:
            if cluster.place.mine or not cluster.operators:
                continue
            for system in cluster.systems:
                if system in self.averages:
                    self.averages[system] = Average(*(t.to("meta") for t in self.averages[system]))
            if cluster.place.way == "gradient":
                cluster.keep(self.empty_operators(cluster))

    def take_in(self, steps: Mapping[Cluster, Sequence[Term]]) -> None:
        """Take in an observed step of clusters' systems, and make their operators anew where it is time."""
        counted = steps.items() if self.running.damping is None else ()
        samples = {cluster: total(terms) for cluster, terms in counted}  # before they are overwritten
        started = self._update([term for terms in steps.values() for term in terms])
        due = {
            cluster: samples.get(cluster)
            for cluster, terms in steps.items()
            if self._has_its_turn(cluster) or any(term.equation in started for term in terms)
        }
        self._invert(due)

    def refresh(self, clusters: Sequence[Cluster]) -> None:
        """Make the operators anew of clusters that rest in this step and have their turn."""
        if due := [cluster for cluster in clusters if self._has_its_turn(cluster)]:
            self._invert(dict.fromkeys(due))

    def _has_its_turn(self, cluster: Cluster) -> bool:
        return cluster.steps % self.running.invert_every == cluster.turn

    def _update(self, terms: Sequence[Term]) -> set[Equation]:
        """Update the averages; returns the systems whose average was started or moved here."""
        started = set[Equation]()
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Average, Average]]] = {}
        for term in terms:
            system = term.equation
            assert term.samples is not None
            assert isinstance(system, System)
            held, step = self.averages.get(system), Average(term.S, term.samples)
            if self._is_new(system):
                started.add(system)
            if held is None or held.S.shape != step.S.shape:
                self.averages[system] = step if step.S.is_meta else _finite(step)
                continue
            if (held.S.device, held.S.dtype) != (step.S.device, step.S.dtype):
                held = self.averages[system] = Average(held.S.to(step.S), held.samples.to(step.S))
            if not step.S.is_meta:
                alike.setdefault((step.S.device, step.S.dtype), []).append((held, step))
        for pairs in alike.values():
            update(pairs, self.running.decay**self.running.update_every)
        return started

    def _is_new(self, system: System) -> bool:
        """Whether S has another shape, precision or device than before, as ranks that do not hold it know too."""
        leaf = system.current[0]
        made_for = leaf.shape, leaf.dtype, leaf.device
        before = self._made_for.get(system)
        self._made_for[system] = made_for
        return before != made_for

    def make_room(self, system: System, cluster: Cluster) -> None:
        """Start an average with zeros, for what was saved to be copied into."""
        if system in self.averages or not system.trained:
            return
        self._is_new(system)
        leaves = system.current if cluster.place.mine else [leaf.to("meta") for leaf in system.current]
        S, samples = system.split(leaves)
        assert samples is not None
        self.averages[system] = Average(torch.zeros_like(S), torch.zeros_like(samples))

    def _joined(self, cluster: Cluster) -> Iterable[Term]:
        found = [(system, self.averages[system]) for system in cluster.systems if system in self.averages]
        return join([Term(system, average.S, average.samples) for system, average in found])

    def _invert(self, clusters: Mapping[Cluster, Tensor | None]) -> None:
        """Make the operators of clusters anew, given each one's number of samples in this step."""
        due = [
            (cluster, term, samples)
            for cluster, samples in clusters.items()
            for term in self._joined(cluster)
        ]
        before = {equation: operator for cluster in clusters for equation, operator in cluster.operators}
        asked = (
            Due(self._form(term, samples), term.equation.layer._settings.solver, before.get(term.equation))
            for cluster, term, samples in due
            if cluster.place.mine
        )
        found = iter(made(asked, self.running.inverse_dtype))
        for cluster in clusters:
            cluster.keep([])
        for cluster, term, _ in due:
            operator, failed = (
                next(found) if cluster.place.mine else (self._received(cluster, term, before), None)
            )
            cluster.operators.append((term.equation, operator))
            term.equation.layer._note_failure(failed)
        self.anew += clusters

    def _received(self, cluster: Cluster, term: Term, before: Mapping[Equation, Operator]) -> Operator:
        """An operator that the owner's is to be copied into: the one before, if there was one."""
        fresh, held = self._empty(cluster, term), before.get(term.equation)
        if held is None or describe(held.kept) != describe(fresh.kept):
            return fresh
        return held

    def _form(self, term: Term, samples: Tensor | None) -> Form:
        assert term.samples is not None
        C = term.S / term.samples.clamp(min=1e-30)
        if self.running.damping is not None:
            layout = term.equation.layout
            count, whole = (layout.count, layout.whole) if isinstance(layout, BlockLayout) else (1, layout)
            return relative_form(C, self.running.damping, whole.sizes.features, count)
        assert samples is not None
        return absolute_form(C.mul_(samples), samples, term.equation.layer._settings)

    def empty_operators(self, cluster: Cluster) -> list[tuple[Equation, Operator]]:
        """Operators that hold zeros, for what was saved to be copied into; or nothing, where they are not held."""
        return [(term.equation, self._empty(cluster, term)) for term in self._joined(cluster)]

    def _empty(self, cluster: Cluster, term: Term) -> Operator:
        solver, elsewhere = term.equation.layer._settings.solver, cluster.place.way == "gradient"
        device = cluster.systems[0].current[0].device if not elsewhere else torch.device("meta")
        device = term.S.device if cluster.place.mine else device
        return empty(self._form(term, term.samples), solver, self.running.inverse_dtype, device)


def _finite(step: Average) -> Average:
    _, (S,), (samples,) = _cleaned([step])
    return Average(S, samples)


def describe(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors have in common if one can be copied into the other's place."""
    return tensor.shape, tensor.dtype, tensor.device


class Entry(NamedTuple):
    """A tensor of the state; `owned` says that the cluster's owner alone has it."""

    name: str
    tensor: Tensor
    cluster: Cluster
    owned: bool

    @property
    def here(self) -> bool:
        """Whether this rank has it."""
        return self.cluster.place.mine or not self.owned


def entries(averages: Averages, clusters: Sequence[Cluster]) -> Iterator[Entry]:
    """All state, in the same order on all ranks; what other ranks own has no memory.

    S̄ and N̄ of every system, and every cluster's number of steps and kept matrices; zeros before the first step.
    """
    for cluster in clusters:
        if not any(system in averages.averages for system in cluster.systems):
            for system in cluster.systems:
                if system.usual:
                    averages.make_room(system, cluster)
        if not cluster.operators:
            cluster.keep(averages.empty_operators(cluster))
        yield Entry(f"{cluster.name}.steps", torch.tensor(cluster.steps), cluster, owned=False)
        for system in cluster.systems:
            if system in averages.averages:
                S, samples = averages.averages[system]
                yield Entry(f"{system.name}.S", S, cluster, owned=True)
                yield Entry(f"{system.name}.samples", samples, cluster, owned=True)
        for equation, operator in cluster.operators:
            yield Entry(
                f"{equation.name}.kept", operator.kept, cluster, owned=cluster.place.way == "gradient"
            )


def load_state_dict(averages: Averages, clusters: Sequence[Cluster], state: Mapping[str, Tensor]) -> None:
    """Take over what `entries` named; tensors are copied, and those that other ranks own need not be there.

    Raises:
        ValueError: an entry is missing, not expected, or of another shape.
    """
    expected = set[str]()
    for cluster in clusters:
        for system in cluster.systems:
            if f"{system.name}.S" in state:
                averages.make_room(system, cluster)
            elif cluster.place.mine:
                averages.averages.pop(system, None)
        cluster.keep(averages.empty_operators(cluster))
    for entry in entries(averages, clusters):
        name, tensor, *_ = entry
        expected.add(name)
        if not entry.here:
            continue
        if name not in state:
            raise ValueError(f"the state has no {name!r}, which this model needs")
        if state[name].shape != tensor.shape:
            found, wanted = list(state[name].shape), list(tensor.shape)
            raise ValueError(f"{name!r} should have shape {wanted} but has {found}")
        tensor.copy_(state[name])
    for cluster in clusters:
        cluster.reach(int(state[f"{cluster.name}.steps"]))
    if unknown := sorted(set(state) - expected):
        raise ValueError(f"the state has {unknown[0]!r}, which this model has no use for")
