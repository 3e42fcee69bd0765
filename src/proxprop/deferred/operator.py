"""What turns a gradient into a direction: `B -> factor·(λI + M)⁻¹B`, solved anew or with an inverse that was kept."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from proxprop.settings import Settings
from proxprop.solvers import Exact, Solution, Solver
from proxprop.solvers.cholesky import factorize
from proxprop.tuning import TRITON_CHOLESKY_MOST_ROWS


class Operator(Protocol):
    """`B -> factor·(λI + M)⁻¹B`."""

    @property
    def kept(self) -> Tensor:
        """The matrix it holds."""

    def apply(self, B: Tensor) -> Solution:
        """The direction for `B [groups, features, outputs]`."""

    def scale(self) -> Tensor:
        """What each feature is multiplied by `[groups, features]`, where M is diagonal."""


@dataclass(frozen=True)
class Form:
    """M, λ and the factor: all that a direction depends on beside B and the solver.

    Attributes:
        M: `[groups, features, features]`, or a diagonal `[groups, features]`.
        damping: λ.
        factor: what the solution is multiplied by.
    """

    M: Tensor
    damping: float
    factor: float


def absolute_form(S: Tensor, samples: Tensor | None, settings: Settings) -> Form:
    """A layer's own settings: `(I/τ_θ + S)⁻¹B`, or `(I + τ_θ·S/N)⁻¹B`. S is overwritten."""
    damping = 1 / settings.tau_theta
    if settings.scaling == "paper":
        return Form(S, damping, 1.0)
    assert samples is not None
    return Form(S.div_(samples.clamp(min=1.0)), damping, damping)


def relative_form(S: Tensor, damping: float) -> Form:
    """`(1 + ρ)·c·(ρcI + S)⁻¹B` with c the mean of S's diagonal, for each group: the scale of S drops out.

    Where S is c times the identity this is B itself, whatever ρ; as ρ grows it tends to B. S is overwritten.

    Args:
        S: any multiple of it gives the same.
        damping: ρ.
    """
    diagonal = S if S.dim() == 2 else S.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)
    mean = torch.where(mean == 0, 1.0, mean).view(-1, *[1] * (S.dim() - 1))
    return Form(S.div_(mean), damping, 1 + damping)


@dataclass(frozen=True)
class Solve:
    """Asks the solver each time."""

    form: Form
    solver: Solver

    @property
    def kept(self) -> Tensor:
        """M."""
        return self.form.M

    def apply(self, B: Tensor) -> Solution:
        """The solver's answer; M is left as it is."""
        if B.numel() == 0:
            return Solution(B)
        return self.solver.features(self.form.M.clone(), B, self.form.damping).times(self.form.factor)

    def scale(self) -> Tensor:
        """`factor / (λ + M)`."""
        return self.form.factor / (self.form.M + self.form.damping)


@dataclass(frozen=True)
class SolveOnce(Solve):
    """Asks the solver once, which may overwrite M."""

    def apply(self, B: Tensor) -> Solution:
        """The solver's answer."""
        if B.numel() == 0:
            return Solution(B)
        return self.solver.features(self.form.M, B, self.form.damping).times(self.form.factor)


@dataclass(eq=False)
class Inverse:
    """`factor·(λI + M)⁻¹` as a matrix; `1/(λ + trace M)` times the factor where a factorisation failed.

    Attributes:
        kept: the matrix `[groups, features, features]`, which may be moved to lie beside others.
    """

    kept: Tensor

    @classmethod
    def of(cls, form: Form) -> tuple["Inverse", Tensor]:
        """Factorise and invert, and say for each group whether that failed; M is overwritten."""
        factorization = factorize(form.M, form.damping)
        return cls(factorization.inverse().mul_(form.factor)), factorization.failed

    def apply(self, B: Tensor) -> Solution:
        """One product."""
        return Solution(self.kept @ B)

    def scale(self) -> Tensor:
        """Not for a diagonal M."""
        raise NotImplementedError("a diagonal is divided by, not inverted")


def kept_operators(forms: Iterable[tuple[Form, Solver]]) -> list[tuple[Operator, Tensor | None]]:
    """Operators to be used many times: inverses for `Exact`, else what the solver is asked with.

    Small matrices of one size are inverted together, as groups of one system; large ones as they come, so that only
    one of them is held beside its average.

    Returns:
        Each operator, and for each of its groups whether it failed to be made, where that can be.
    """
    made: dict[int, tuple[Operator, Tensor | None]] = {}
    small: dict[tuple[object, ...], dict[int, Form]] = {}
    for place, (form, solver) in enumerate(forms):
        M = form.M
        if not isinstance(solver, Exact) or M.dim() == 2:
            made[place] = Solve(form, solver), None
        elif M.shape[-1] > TRITON_CHOLESKY_MOST_ROWS:
            made[place] = Inverse.of(form)
        else:
            alike = M.shape[1:], M.dtype, M.device, form.damping, form.factor
            small.setdefault(alike, {})[place] = form
    for together in small.values():
        made.update(zip(together, _inverses(list(together.values())), strict=True))
    return [made[place] for place in range(len(made))]


def _inverses(forms: Sequence[Form]) -> Iterator[tuple[Inverse, Tensor]]:
    """`Inverse.of` forms that differ in M alone."""
    groups = [len(form.M) for form in forms]
    inverse, failed = Inverse.of(replace(forms[0], M=torch.cat([form.M for form in forms])))
    for kept, own in zip(inverse.kept.split(groups), failed.split(groups), strict=True):
        yield Inverse(kept), own
