"""Running averages of S, inverted every so many steps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proxprop.deferred.equation import Equation
from proxprop.deferred.joint import Term, join
from proxprop.deferred.operator import (
    Form,
    Inverse,
    Operator,
    Solve,
    absolute_form,
    kept_operator,
    relative_form,
)
from proxprop.deferred.system import System
from proxprop.solve import Exact


@dataclass(frozen=True)
class Running:
    """Take S from an exponential average over steps instead of from the step's own samples.

    With `S_t` and `N_t` of step t, summed over all micro-batches and ranks,

        S̄_t = decay·S̄_{t-1} + S_t,    N̄_t = decay·N̄_{t-1} + N_t,    C = S̄_t / N̄_t,

    so that C is a weighted mean over samples from the first step on, whatever their number in a step. With c the
    mean of C's diagonal (in each group) and B the gradient of the step, the direction is

        D = (1 + ρ)·c·(ρcI + C)⁻¹ B,    ρ = damping.

    c makes one ρ serve layers of any input scale. The factor in front keeps the gradient's scale: where C is a
    multiple of the identity D is B itself, as ρ grows D tends to B, and the largest eigenvalue of `D = P B` times C,
    which bounds stable learning rates, is at most `(1 + ρ)·c` where BackProp's is C's largest.

    Args:
        decay: how much of the average is kept from one step to the next, in [0, 1).
        every: the average is updated in every step, and inverted in the first step and every so many after it.
        damping: ρ > 0. None takes the layer's own `tau_theta` and `scaling`, with `N_t·C` in the place of S.
        rows: estimate S of a call from so many of its rows, drawn without replacement, and scale it up. The
            estimate is unbiased, and its mean square error is `N²/rows·(1 − rows/N)·s²`, with
            `s² = Σ‖aaᵀ − S/N‖² / (N − 1)` over the N rows a. The gradient takes all rows. None takes all for S too.

    Example:
        >>> Running(decay=0.9, every=5)
        Running(decay=0.9, every=5, damping=0.3, rows=None)
    """

    decay: float = 0.95
    every: int = 10
    damping: float | None = 0.3
    rows: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay should be at least 0 and less than 1 but is {self.decay}")
        for name, value in (("every", self.every), ("rows", self.rows)):
            if name == "rows" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} should be a whole number of at least 1 but is {value!r}")
        if self.damping is not None and not (self.damping > 0 and math.isfinite(self.damping)):
            raise ValueError(f"damping should be > 0 and finite, or None, but is {self.damping}")


@dataclass
class Average:
    """S̄ and N̄ of one system."""

    S: Tensor
    samples: Tensor

    def update(self, S: Tensor, samples: Tensor, decay: float) -> None:
        """Take in one step; one with numbers that are not finite is left out, without waiting for the device."""
        diagonal = S if S.dim() == 2 else S.diagonal(dim1=-2, dim2=-1)
        broken = ~diagonal.isfinite().all()  # |S_ij|² ≤ S_ii·S_jj: an overflow shows on the diagonal
        kept = S.new_full((), decay).masked_fill_(broken, 1.0)
        self.S.mul_(kept).add_(S.masked_fill_(broken, 0.0))
        self.samples.mul_(kept).add_(samples.masked_fill(broken, 0.0))


@dataclass(eq=False)
class Cluster:
    """Systems that share parameters, mostly one alone, and what turns their gradients into directions.

    Attributes:
        systems: the systems.
        operators: an equation and its operator each, since they were last made.
        steps: how many steps it took.
    """

    systems: Sequence[System]
    operators: list[tuple[Equation, Operator]] = field(default_factory=list)
    steps: int = 0

    @property
    def name(self) -> str:
        """The first system's."""
        return self.systems[0].name


class Averages:
    """The running averages of all systems of a model.

    Args:
        running: the user's choice.
    """

    def __init__(self, running: Running) -> None:
        self.running = running
        self.averages: dict[System, Average] = {}

    def average(self, system: System, S: Tensor, samples: Tensor) -> Average:
        """A system's average, where S is and in its precision.

        At zero where nothing was taken in yet, or of the same size: other parameters are trained now.
        """
        held = self.averages.get(system)
        if held is None or held.S.shape != S.shape:
            self.averages[system] = Average(torch.zeros_like(S), torch.zeros_like(samples))
        elif (held.S.device, held.S.dtype) != (S.device, S.dtype):
            self.averages[system] = Average(held.S.to(S), held.samples.to(S))
        return self.averages[system]

    def operators(self, cluster: Cluster, terms: Iterable[Term]) -> list[tuple[Equation, Operator]]:
        """Take in a step of a cluster's systems, and return what turns their gradients into directions."""
        samples: Tensor | None = None
        changed = False
        for system, S, count in terms:
            assert isinstance(system, System)
            assert count is not None
            held, average = self.averages.get(system), self.average(system, S, count)
            average.update(S, count, self.running.decay)
            samples = count if samples is None else samples + count
            changed = changed or average is not held
        if cluster.steps % self.running.every == 0 or changed:
            cluster.operators = [self._operator(term, samples) for term in self._joined(cluster)]
        cluster.steps += 1
        return cluster.operators

    def _joined(self, cluster: Cluster) -> Iterable[Term]:
        found = [(system, self.averages[system]) for system in cluster.systems if system in self.averages]
        return join([Term(system, average.S, average.samples) for system, average in found])

    def _operator(self, term: Term, samples: Tensor | None) -> tuple[Equation, Operator]:
        settings = term.equation.layer._settings
        assert term.samples is not None
        return term.equation, kept_operator(self._form(term, samples), settings.solver)

    def _form(self, term: Term, samples: Tensor | None) -> Form:
        assert term.samples is not None
        C = term.S / term.samples.clamp(min=1e-30)
        if self.running.damping is not None:
            return relative_form(C, self.running.damping)
        assert samples is not None
        return absolute_form(C.mul_(samples), samples, term.equation.layer._settings)

    def empty_operators(self, cluster: Cluster) -> list[tuple[Equation, Operator]]:
        """Operators that hold zeros, for what was saved to be copied into."""
        return [(term.equation, self._empty(term)) for term in self._joined(cluster)]

    def _empty(self, term: Term) -> Operator:
        solver, form = term.equation.layer._settings.solver, self._form(term, term.samples)
        zeros = torch.zeros_like(form.M)
        if isinstance(solver, Exact) and zeros.dim() == 3:
            return Inverse(zeros)
        return Solve(Form(zeros, form.damping, form.factor), solver)
