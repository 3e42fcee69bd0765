"""Running averages of S, inverted every so many steps, and their state.

An observed step updates the averages of all layers. Their inverses are made anew in turns: of all layers together they
take longer than a step, so that each of the `invert_every` steps has its share.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.deferred.accumulator import System
from proxprop.deferred.equation import BlockLayout, Equation, Term, join
from proxprop.deferred.observing import Cluster, Pair
from proxprop.deferred.preconditioner import (
    Form,
    Numbers,
    Operator,
    absolute_form,
    absolute_numbers,
    borrowed,
    fill,
    inverted_together,
    relative_form,
    relative_numbers,
    room,
    root_numbers,
)
from proxprop.deferred.writer import bring_operators, plain
from proxprop.torch_internals import add_all, multiply_all, norms
from proxprop.transfer import Shapes

MOST_DAMPING = 1e30
"""The largest damping: D is B long before, and float32 holds no number much larger."""

POWERS = (1.0, 0.5)
"""The powers of the inverse that can be asked for."""


@dataclass(frozen=True)
class Running:
    """Take S from an exponential average over steps instead of from the step's own samples.

    In one step of `update_every`, with S and N of that step, summed over all micro-batches and ranks,

        S̄ ← d·S̄ + S,    N̄ ← d·N̄ + N,    d = decay**update_every,    C = S̄ / N̄,

    so that C is a weighted mean over samples from the first step on, whatever their number in a step. With c the
    mean of C's diagonal (in each group) and B the gradient of the step, the direction is

        D = ((1 + ρ)·c)^p · (ρcI + C)^(-p) B,    ρ = damping, p = power.

    c makes one ρ serve layers of any input scale. The factor in front keeps the gradient's scale: where C is a
    multiple of the identity D is B itself, as ρ grows D tends to B, and with p = 1 the largest eigenvalue of `D = P B`
    times C, which bounds stable learning rates, is at most `(1 + ρ)·c`, while BackProp's is C's largest eigenvalue.

    Args:
        decay: how much of the average is kept from one step to the next, in [0, 1). It looks back as many steps
            whatever `update_every` is.
        update_every: S is summed in a layer's first step and every so many after it. The steps between run torch's own
            layer, at its own cost, and turn its gradient with what was kept.
        invert_every: a layer's average is inverted in the first step, and then in one of so many; a multiple of
            `update_every`. Large layers take turns, so that no step inverts them all: a layer's inverse is that of the
            last update before its turn. All small ones have theirs in the first of these steps, with the update.
        damping: ρ > 0, at most 1e30. None takes the layer's own `tau_theta` and `scaling`, with `N·C` of the step in
            the place of S; there are no turns then.
        power: 1, the proximal direction; or 0.5, halfway between it and the gradient. The inverse root is a mean of
            proximal directions over step sizes: a sum of some inverses with larger dampings, three to six as a rule,
            which is accurate to 1 % in every eigendirection. It takes as many times longer to make; steps do not.
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
    power: float = 1.0
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
        if self.damping is not None and not 0 < self.damping <= MOST_DAMPING:
            raise ValueError(
                f"damping should be > 0 and at most {MOST_DAMPING:g}, or None, but is {self.damping}"
            )
        if self.power not in POWERS:
            raise ValueError(f"power should be 1 or 0.5 but is {self.power}")
        if self.power != 1 and self.damping is None:
            raise ValueError(
                "power=0.5 should come with a damping, but that is None, which takes tau_theta's"
            )
        if not self.copies >= 0:
            raise ValueError(f"copies should be a number of bytes but is {self.copies!r}")
        if self.inverse_dtype not in (None, torch.bfloat16):
            raise ValueError(f"inverse_dtype should be torch.bfloat16 or None but is {self.inverse_dtype}")


def update(pairs: Sequence[tuple[Term, Term]], decay: float) -> None:
    """Take in a step of systems of one precision on one device, without waiting for it.

    A system whose S is not finite is left out, alone.

    Args:
        pairs: each system's average, in place, and what it has summed since, which is overwritten.
        decay: how much of an average is kept.
    """
    broken = not_finite([step for _, step in pairs])
    held, new, scales = list[Tensor](), list[Tensor](), list[Tensor]()
    kept = broken.new_full(broken.shape, decay, dtype=pairs[0][1].S.dtype).masked_fill_(broken, 1.0).unbind()
    left_out, by_kernel = broken.unbind(), device.use_triton(pairs[0][1].S)
    for index, (average, step) in enumerate(pairs):
        for averaged, summed in zip(average[1:], step[1:], strict=True):
            if averaged is None or summed is None:
                continue
            if by_kernel and summed.numel() >= tuning.AVERAGED_LEAST_NUMBERS and _lie_alike(averaged, summed):
                from proxprop.kernels import averaging

                averaging.take_in(averaged, summed, broken, index, decay)
                continue
            summed.masked_fill_(left_out[index], 0.0)
            held.append(averaged)
            new.append(summed)
            scales.append(kept[index])
    if held:
        multiply_all(held, scales)
        add_all(held, new)


def _lie_alike(average: Tensor, summed: Tensor) -> bool:
    """Whether a kernel may walk through two arrays without looking at their shapes."""
    return average.is_contiguous() and summed.is_contiguous() and average.dtype == summed.dtype


def not_finite(steps: Sequence[Term]) -> Tensor:
    """Where S is not finite."""
    return ~torch.stack(norms([step.S for step in steps], math.inf)).isfinite()


def clean(step: Term) -> None:
    """Set what was summed to zero if S is not finite."""
    broken = not_finite([step])[0]
    for tensor in step[1:]:
        if tensor is not None:
            tensor.masked_fill_(broken, 0.0)


Count = tuple[Equation, Tensor]
"""A system and its number of samples in this step."""

Asked = tuple[Operator, Term, Tensor | None]
"""An operator to be made anew, the average that it is made from, and the number of samples in this step."""


class Averages:
    """The running averages of a model. Those that other ranks own have a shape here but no memory.

    Args:
        running: the user's choice.
        clusters: all clusters of the model.

    Attributes:
        averages: each system's.
    """

    def __init__(self, running: Running, clusters: Sequence[Cluster]) -> None:
        self.running, self.clusters = running, clusters
        self.averages: dict[Equation, Term] = {}
        self._shapes: dict[
            Equation, Shapes
        ] = {}  # of what was trained: other parameters may have an S as large

    @property
    def bytes(self) -> int:
        """Memory of averages and inverses on this rank."""
        kept = [operator.kept for cluster in self.clusters for _, operator in cluster.pairs]
        held = [*(average.S for average in self.averages.values()), *kept]
        return sum(tensor.nbytes for tensor in held if not tensor.is_meta)

    def clear(self) -> None:
        """Drop all averages and inverses."""
        self.averages, self.clusters = {}, ()

    def let_go(self) -> None:
        """Free what other ranks own."""
        for cluster in self.clusters:
            if cluster.mine or not cluster.pairs:
                continue
            for system in cluster.systems:
                if system in self.averages:
                    self.averages[system] = self.averages[system].to("meta")
            if cluster.way == "gradient":  # they stay those for what was trained when they were made
                cluster.pairs = [
                    (e, borrowed(operator, torch.device("meta"))) for e, operator in cluster.pairs
                ]

    def take_in(self, steps: Mapping[Cluster, Sequence[Term]], resting: Iterable[Cluster]) -> None:
        """Take in S of an observed step, and make operators anew, on all ranks that keep them, where it is time.

        Args:
            steps: what was summed for clusters that are observed in this step.
            resting: clusters that are not.
        """
        counted = steps.items() if self.running.damping is None else ()
        samples = {cluster: _counts(terms) for cluster, terms in counted}  # before they are overwritten
        started = self._update(steps)
        every = self.running.invert_every
        due = {
            **{c: samples.get(c, ()) for c in steps if c in started or c.steps % every == c.turn},
            **{c: () for c in resting if c.steps % every == c.turn},
        }
        if due:
            self._invert(due)
            bring_operators({cluster: cluster.pairs for cluster in due if cluster.way == "inverse"})

    def _update(self, steps: Mapping[Cluster, Sequence[Term]]) -> set[Cluster]:
        """Update the averages; returns the clusters whose operators can't wait for their turn."""
        started = {cluster for cluster in steps if cluster.steps == 0 or not cluster.fits}
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Term, Term]]] = {}
        for cluster in started:
            self._drop_others(cluster)
            if len(steps[cluster]) < len(cluster.systems):
                # tied layers are inverted together from the first on
                used = {term.equation.layer for term in steps[cluster]}
                self._start(cluster, [s.name for s in cluster.systems if s.usual and s.layer not in used])
        for cluster, step in [(cluster, step) for cluster, terms in steps.items() for step in terms]:
            system, S = step.equation, step.S
            assert isinstance(system, System)
            held = self.averages.get(system)
            if held is None:
                started.add(cluster)
                self.averages[system], self._shapes[system] = step, system.summing.shapes
                if not S.is_meta:
                    clean(step)
                continue
            if held.S.dtype != S.dtype or (
                held.S.device != S.device if cluster.mine else self._has_moved(cluster)
            ):
                started.add(cluster)
                held = self.averages[system] = held.to(S)
            if not S.is_meta:
                alike.setdefault((S.device, S.dtype), []).append((held, step))
        decay = self.running.decay**self.running.update_every
        for pairs in alike.values():
            update(pairs, decay)
        for unused in self._unused(steps):
            unused.S.mul_(decay)
            if unused.counted is not None:
                unused.counted.mul_(decay)
        return started

    def _drop_others(self, cluster: Cluster) -> None:
        """Drop averages for other parameters than are trained now."""
        for system in cluster.systems:
            if system in self.averages and self._shapes[system] != system.shapes:
                del self.averages[system]

    def _unused(self, steps: Mapping[Cluster, Sequence[Term]]) -> Iterator[Term]:
        """Averages of systems that share parameters with those of a step but were not used in it: they age too."""
        for cluster, terms in steps.items():
            if len(terms) == len(cluster.systems):
                continue
            used = {term.equation for term in terms}
            held = (self.averages.get(system) for system in cluster.systems if system not in used)
            yield from (average for average in held if average is not None and not average.S.is_meta)

    def _has_moved(self, cluster: Cluster) -> bool:
        """Whether this rank's copy of an inverse is elsewhere than the layer, as the owner's S is then too."""
        kept = (operator.kept.device for _, operator in cluster.pairs if not operator.kept.is_meta)
        return len({cluster.device, *kept}) > 1

    def _joined(self, cluster: Cluster) -> Iterator[Term]:
        return join([self.averages[system] for system in cluster.systems if system in self.averages])

    def _invert(self, clusters: Mapping[Cluster, Sequence[Count]]) -> None:
        """Make the operators of clusters anew, given their systems' numbers of samples in this step."""
        alike: dict[tuple[object, ...], list[Asked]] = {}
        for cluster, samples in clusters.items():
            terms = [*self._joined(cluster)]
            self._make_room(cluster, terms)
            if not cluster.mine:
                continue
            for (equation, operator), term in zip(cluster.pairs, terms, strict=True):
                S, numbers = term.S, (self._numbers(equation), equation.layer.scaling, self._sizes(equation))
                kind = type(operator), S.shape, S.dtype, S.device, numbers
                alike.setdefault(kind, []).append(
                    (operator, term, _of(equation, samples) if samples else None)
                )
        for members in alike.values():
            count = inverted_together(members[0][1].S.nbytes)
            for start in range(0, len(members), count):
                self._fill(members[start : start + count])

    def _fill(self, members: Sequence[Asked]) -> None:
        """Make alike operators anew."""
        operators, terms, samples = zip(*members, strict=True)
        failures = fill(operators, self._form(terms, samples))
        for term, failed in zip(terms, failures, strict=False):
            term.equation.layer._note_failure(failed)

    def _make_room(self, cluster: Cluster, terms: Iterable[Term]) -> None:
        """Room for a cluster's operators: the ones before, or zeros; without memory where another rank holds them."""
        before = {equation.identity: operator for equation, operator in cluster.pairs}
        device = cluster.device if cluster.mine or cluster.way == "inverse" else torch.device("meta")
        pairs: list[Pair] = []
        for term in terms:
            equation = term.equation
            operator = room(
                Form(term.S, self._numbers(equation)),
                equation.layer._settings.solver,
                self.running.inverse_dtype,
                device,
                before.get(equation.identity),
            )
            pairs.append((equation, operator))
        cluster.keep(pairs)

    def _numbers(self, equation: Equation) -> Numbers:
        """λ and the factor of each summand of an equation's operator."""
        damping = self.running.damping
        if damping is None:
            return absolute_numbers(equation.layer._settings)
        if self.running.power == 1:
            return relative_numbers(damping)
        return root_numbers(damping, self._sizes(equation)[0])

    @staticmethod
    def _sizes(equation: Equation) -> tuple[int, int]:
        """The layer's features, and in how many blocks they are."""
        layout = equation.layout
        count, whole = (layout.count, layout.whole) if isinstance(layout, BlockLayout) else (1, layout)
        return whole.sizes.features, count

    def _form(self, terms: Sequence[Term], samples: Sequence[Tensor | None]) -> Form:
        """The forms of alike averages, as groups of one."""
        S, (first, *_) = torch.cat([term.S for term in terms]), terms
        if self.running.damping is not None:
            return relative_form(S, self._numbers(first.equation), *self._sizes(first.equation))
        held = [term.samples for term in terms]
        averaged = _for_groups(held, S)
        now = _for_groups([n if n is not None else own for n, own in zip(samples, held, strict=True)], S)
        now = torch.where(now > 0, now, averaged)  # a step without samples says nothing of those to come
        S.mul_(now / averaged.clamp(min=1e-30))
        return absolute_form(S, now, first.equation.layer._settings)

    def _start(self, cluster: Cluster, names: Iterable[str]) -> None:
        """Start averages of the systems of these names with zeros, for what was saved to be copied into."""
        for system in cluster.systems:
            if system.name not in names or system in self.averages or not system.trained:
                continue
            system.make_leaves()
            device = None if cluster.mine else "meta"
            self.averages[system] = Term(system, *(torch.zeros_like(x, device=device) for x in system.leaves))
            self._shapes[system] = system.summing.shapes

    def state(self, whole: bool) -> dict[str, Tensor]:
        """The state that this rank has, or all of it, brought from its owners."""
        found: dict[str, Tensor] = {}
        for name, tensor, cluster, owned in self._entries():
            if owned and whole and cluster.group is not None:
                if not cluster.mine:
                    tensor = torch.empty_like(tensor, device=cluster.device)
                cluster.group.bring([plain(tensor)], [cluster.owner], "state")
            if whole or cluster.mine or not owned:
                found[name] = tensor
        return found

    def _entries(self) -> Iterator[tuple[str, Tensor, Cluster, bool]]:
        """All state, in the same order on all ranks; what other ranks own has no memory.

        S̄ and N̄ of every system, and every cluster's number of steps, kept matrices and which parameters they are for;
        zeros before the first step. N̄ is a copy where S̄ holds it: formats of files refuse tensors that share memory.
        A tensor comes with its name, its cluster, and whether the cluster's owner alone has it.
        """
        for cluster in self.clusters:
            if not any(system in self.averages for system in cluster.systems):
                self._start(cluster, [system.name for system in cluster.systems if system.usual])
            if not cluster.pairs:
                self._make_room(cluster, self._joined(cluster))
            yield f"{cluster.name}.steps", torch.tensor(cluster.steps), cluster, False
            yield f"{cluster.name}.trained", torch.tensor(cluster.made_for), cluster, False
            for system in cluster.systems:
                if system in self.averages:
                    _, S, samples = self.averages[system]  # of what was trained, and now another bias may be
                    yield f"{system.name}.S", S, cluster, True
                    held = samples if samples is not None else S[0, -1, -1].clone()
                    yield f"{system.name}.samples", held, cluster, True
            for equation, operator in cluster.pairs:
                yield f"{equation.name}.kept", operator.kept, cluster, cluster.way == "gradient"

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state; tensors are copied, and those that other ranks own need not be there.

        A layer that trains other parameters now than when it was saved starts anew in its next step, as it would have.

        Raises:
            ValueError: an entry is missing, not expected, or of another shape; all averages then start anew.
        """
        now = {p: p.requires_grad for cluster in self.clusters for p in cluster.parameters}
        try:
            self._load(state)
        finally:
            for parameter, trained in now.items():
                parameter.requires_grad_(trained)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state, with the parameters trained that it was saved for."""
        for cluster in self.clusters:
            for parameter, trained in zip(
                cluster.parameters, state.get(f"{cluster.name}.trained", ()), strict=False
            ):
                parameter.requires_grad_(bool(trained))
            saved = [system.name for system in cluster.systems if f"{system.name}.S" in state]
            self._drop_others(cluster)
            for system in cluster.systems if cluster.mine else ():
                if system.name not in saved:
                    self.averages.pop(system, None)
            self._start(cluster, saved)
            self._make_room(cluster, self._joined(cluster))
        entries = [*self._entries()]
        expected = {name: tensor for name, tensor, cluster, owned in entries if cluster.mine or not owned}
        try:
            _check(state, expected, {name for name, *_ in entries})
        except ValueError:
            self.averages = {}
            for cluster in self.clusters:
                cluster.reach(0)
            raise
        for name, tensor in expected.items():
            tensor.copy_(state[name])
        for cluster in self.clusters:
            cluster.reach(int(state[f"{cluster.name}.steps"]))


def _counts(terms: Sequence[Term]) -> list[Count]:
    """Copies of terms' numbers of samples."""
    return [(term.equation, samples.clone()) for term in terms if (samples := term.samples) is not None]


def _of(equation: Equation, samples: Sequence[Count]) -> Tensor | None:
    """How many samples of this step an equation has; None where nobody counted any."""
    own = [count for other, count in samples if other.meets(equation, trained=True)]
    return reduce(torch.add, own) if own else None


def _for_groups(counts: Sequence[Tensor | None], S: Tensor) -> Tensor:
    """Numbers of samples of systems, to multiply their stacked S with."""
    stacked = torch.stack([count for count in counts if count is not None])
    return stacked.repeat_interleave(len(S) // len(stacked)).view(-1, *[1] * (S.dim() - 1))


def _check(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], known: Collection[str]) -> None:
    """Raise ValueError unless a state has what is expected, in its shape, and nothing that is not known."""
    remedy = "; a state fits a model of the same layers"
    for name, tensor in expected.items():
        if name not in state:
            raise ValueError(f"the state has no {name!r}, which this model needs{remedy}")
        if state[name].shape != tensor.shape:
            found, wanted = list(state[name].shape), list(tensor.shape)
            raise ValueError(f"{name!r} should have shape {wanted} but has {found}{remedy}")
    if unknown := sorted(state.keys() - known):
        raise ValueError(f"the state has {unknown[0]!r}, which this model has no use for{remedy}")
