"""What turns a gradient into a direction: `B -> Σ factor·(λI + M)⁻¹B`, by a solver, from rows, or by an inverse.

The sum has one summand, or as many as an inverse root takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.device import float32_products, round_up
from proxprop.replay import Outcome, replays
from proxprop.settings import Settings
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Exact, Sizes, Solution, Solver
from proxprop.solvers.cholesky import factorize_whole
from proxprop.solvers.inverse_root import resolvents
from proxprop.solvers.matmul import transposed_product
from proxprop.solvers.plan import remembered_plan
from proxprop.torch_internals import copy_all
from proxprop.transfer import LinearTransfer

Numbers = tuple[tuple[float, float], ...]
"""λ and the factor of each summand."""


class Form(NamedTuple):
    """M, and λ and the factor of each summand: all that a direction depends on beside B and the solver.

    Attributes:
        M: `[groups, features, features]`, or a diagonal `[groups, features]`.
        numbers: λ and what the solution is multiplied by.
    """

    M: Tensor
    numbers: Numbers


def absolute_form(S: Tensor, samples: Tensor | None, settings: Settings) -> Form:
    """A layer's own settings: `(I/τ_θ + S)⁻¹B`, or `(I + τ_θ·S/N)⁻¹B`. S is overwritten."""
    if settings.scaling == "gradient":
        assert samples is not None
        S = S.div_(samples.clamp(min=1.0))
    return Form(S, absolute_numbers(settings))


def absolute_numbers(settings: Settings) -> Numbers:
    """λ and the factor of a layer's own settings."""
    damping = 1 / settings.tau_theta
    return ((damping, damping if settings.scaling == "gradient" else 1.0),)


def relative_form(S: Tensor, numbers: Numbers, features: int, blocks: int = 1) -> Form:
    """S divided by c, the mean of its diagonal, for each group: the scale of S drops out.

    Where S is zero it says nothing of inputs to come, those of an expert that saw no token yet; the identity stands
    for it. S is overwritten.

    Args:
        S: any multiple of it gives the same.
        numbers: λ and the factor of each summand.
        features: of the layer.
        blocks: how many groups of S are the blocks of one matrix.
    """
    diagonal = S if S.dim() == 2 else S.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.reshape(len(S) // blocks, -1).sum(-1) / features
    mean = mean[:, None].expand(-1, blocks).reshape(-1, *[1] * (S.dim() - 1))
    unseen = mean == 0
    S.div_(torch.where(unseen, 1.0, mean))
    diagonal.add_(unseen.view(-1, 1))
    return Form(S, numbers)


def relative_numbers(damping: float) -> Numbers:
    """λ and the factor of `(1 + ρ)·(ρI + M)⁻¹`: B stays B where M is the identity, and as ρ grows."""
    return ((damping, 1 + damping),)


def root_numbers(damping: float, features: int) -> Numbers:
    """λ and the factor of each summand of `√(1 + ρ)·(ρI + M)^(-1/2)`, where no eigenvalue of M is above `features`."""
    scale = math.sqrt(1 + damping)
    return tuple((damping + s, scale * weight) for s, weight in resolvents(damping, damping + features))


@dataclass(eq=False)
class Solve:
    """Asks the solver.

    Attributes:
        form: the system.
        solver: the layer's.
        once: whether it is asked once, and may overwrite M.
    """

    form: Form
    solver: Solver
    once: bool = False

    @property
    def kept(self) -> Tensor:
        """M."""
        return self.form.M

    def apply(self, B: Tensor) -> Solution:
        """The solver's answer."""
        if B.numel() == 0:
            return Solution(B)
        solver, (M, numbers) = self.solver, self.form

        def solve(given: Sequence[Tensor]) -> Solution:
            S, B = given
            kept = len(numbers) > 1 or (S is M and not self.once)  # a replay has a copy of its own
            found = [
                solver.features(S.clone() if kept else S, B, damping).times(factor)
                for damping, factor in numbers
            ]
            return reduce(Solution.plus, found)

        return replayed((solver, numbers), solve, (M, B)) if solver.capturable else solve((M, B))

    def scale(self) -> Tensor:
        """What each feature is multiplied by where M is diagonal: `Σ factor / (λ + M)`, `[groups, features]`."""
        M, numbers = self.form
        return reduce(torch.add, [factor / (M + damping) for damping, factor in numbers])


@dataclass(eq=False)
class Inverse:
    """`Σ factor·(λI + M)⁻¹` as a matrix; where a factorisation failed, `1/(λ + trace M)` stands for that inverse.

    Attributes:
        kept: the matrix `[groups, features, features]`, which may be moved to lie beside others.
    """

    kept: Tensor

    def apply(self, B: Tensor) -> Solution:
        """One product."""
        with float32_products("tf32", B):
            return Solution(self.kept.to(B.dtype) @ B)


@dataclass(frozen=True)
class RowSolve:
    """`B -> factor·(λI + AᵀA)⁻¹B` for a layer's rows A; CG takes the steps that it would take with S.

    `K = AAᵀ` takes the place of S, for whatever is in `.grad` at the step: it may have been clipped, or hold more than
    `AᵀG`, so that immediate mode's `D = Aᵀ(λI + K)⁻¹G` is not at hand. Woodbury's identity is,

        X = (λI + K)⁻¹AB,    D = (B − AᵀX)/λ,

    but where λ is small beside S the difference cancels. What rounding leaves of it is in the row space of A, where
    exactly `AD = X`, and solved for without a difference: `D + Aᵀ(λI + K)⁻¹(X − AD)`. Without that step float32 errors
    are two to five times those of a Cholesky factor of S; with it about the same, or up to thirty times smaller.

    Attributes:
        transfer: all calls of a step as one.
        settings: the layer's.
    """

    transfer: LinearTransfer
    settings: Settings

    @property
    def kept(self) -> Tensor:
        """The rows."""
        return self.transfer.rows()

    def apply(self, B: Tensor) -> Solution:
        """The direction for `B [1, features, outputs]`."""
        if B.numel() == 0:
            return Solution(B)
        if not self.settings.solver.capturable:
            return self._solved(B)
        (A,), settings = self.kept, self.settings
        layout = self.transfer.with_rows(A[:0])

        def solve(given: Sequence[Tensor]) -> Solution:
            return RowSolve(layout.with_rows(given[0]), settings)._solved(given[1])

        question = settings, layout.weight_shape, layout.bias, layout.transposed
        return replayed(question, solve, (A, B))

    def _solved(self, B: Tensor) -> Solution:
        samples, solver = self.transfer.sizes.samples, self.settings.solver
        damping, factor = self.settings.damping(samples), self.settings.factor(samples)
        if isinstance(solver, Exact):
            found = self._solve(B, damping)
        else:
            found = solver.matrix_free(lambda V: self._adjoint(self._image(V)), B, damping)
        return found.times(factor)

    def _image(self, V: Tensor) -> Tensor:
        """`AV`, on a GPU's tensor cores, where the layer's own forward would not be."""
        (A,) = self.transfer.rows()
        inputs = A.shape[1]
        product = transposed_product(A.mT, V[0, :inputs])
        return (product.add_(V[0, inputs:]) if self.transfer.bias else product)[None]

    def _adjoint(self, U: Tensor) -> Tensor:
        """`AᵀU`."""
        transfer = self.transfer
        return transfer.to_features(transfer.gradient(transfer.from_samples(U)))

    def _solve(self, B: Tensor, damping: float) -> Solution:
        """`(λI + AᵀA)⁻¹B` for any `B [1, features, outputs]`; where the factorisation failed, `B / (λ + trace K)`.

        A failure is substituted in small matrices, where it costs little: without R, D is a multiple of B.
        """
        factorization = factorize_whole(self.transfer.sample_gram(), damping)
        R, failed = factorization.inverse_factor(), factorization.failed
        broken = factorization.broken[:, None, None]
        shrink = torch.where(broken, R[:, :1, :1].square() * damping, 1.0)  # R is I/√(λ + trace K) there
        R = torch.where(broken, 0.0, R)
        X = R.mT @ (R @ self._image(B))
        D = (B * shrink).sub_(self._adjoint(X)).div_(damping)
        D += self._adjoint(R.mT @ (R @ (X - self._image(D))))
        return Solution(D, failed)


Operator = Solve | Inverse | RowSolve
"""`B -> Σ factor·(λI + M)⁻¹B`; `kept` is the matrix that it holds, for many steps where it is an inverse."""


def room(
    form: Form,
    solver: Solver,
    dtype: torch.dtype | None,
    device: torch.device,
    before: Operator | None = None,
) -> Operator:
    """An operator to be filled: an inverse for `Exact`, else what the solver is asked with.

    Args:
        form: as it will be filled with; M may have no memory.
        solver: the layer's.
        dtype: the precision that inverses are kept in; None for that of M.
        device: where to keep it.
        before: the operator that was filled last. The new one is in its place if it fits there, because a CUDA graph
            of a step goes on reading it; else it holds zeros.
    """
    kind = Inverse if isinstance(solver, Exact) and form.M.dim() == 3 else Solve
    dtype = dtype if dtype is not None and kind is Inverse else form.M.dtype
    fits = type(before) is kind and _layout(before.kept) == (form.M.shape, dtype, device)
    if kind is Solve:
        M = before.kept if before is not None and fits else torch.zeros_like(form.M, device=device)
        return Solve(form._replace(M=M), solver)
    if before is not None and fits:
        return before
    return Inverse(aligned(form.M, len(form.M), dtype, device).zero_())


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """What two tensors have in common if one can be copied into the other's place."""
    return tensor.shape, tensor.dtype, tensor.device


def inverted_together(size: int) -> int:
    """How many averages of so many bytes are inverted at a time: their copies should not take much memory."""
    return max(1, tuning.INVERTED_TOGETHER_MOST_BYTES // max(size, 1))


def fill(operators: Sequence[Operator], form: Form) -> Sequence[Tensor]:
    """Make alike operators anew.

    Args:
        operators: all of one kind.
        form: their forms, with all matrices as groups of one M, which is overwritten.

    Returns:
        For each inverse, whether it failed to be made for each of its groups; nothing where a solver is asked.
    """
    groups = len(form.M) // len(operators)
    if isinstance(operators[0], Solve):
        copy_all([operator.kept for operator in operators], form.M.split(groups))
        return ()
    X, factor, failed = _summed(form)
    for operator, own in zip(operators, X.split(groups), strict=True):
        torch.mul(own, factor, out=operator.kept)
    failures: Sequence[Tensor] = failed.split(groups)
    return failures


def _summed(form: Form) -> tuple[Tensor, float, Tensor]:
    """The sum of inverses up to a factor, that factor, and for each group whether an inverse failed to be made.

    Several inverses are made at a time, from copies of M that have more or less on their diagonals.
    """
    M, ((least, factor), *more) = form
    if not more:
        X, failed = inverse(M, least)
        return X, factor, failed
    found, failures, together = torch.zeros_like(M), list[Tensor](), inverted_together(M.nbytes)
    for start in range(0, len(form.numbers), together):
        numbers = form.numbers[start : start + together]
        copies = M.repeat(len(numbers), 1, 1)
        for copy, (damping, _) in zip(copies.split(len(M)), numbers, strict=True):
            copy.diagonal(dim1=-2, dim2=-1).add_(damping - least)
        X, failed = inverse(copies, least)
        for own, (_, factor) in zip(X.split(len(M)), numbers, strict=True):
            found.add_(own, alpha=factor)
        failures += failed.split(len(M))
    return found, 1.0, torch.stack(failures).any(0)


def borrowed(operator: Operator, device: torch.device) -> Operator:
    """An operator like another one, with room for its matrix on a device."""
    if isinstance(operator, Inverse):
        return Inverse(aligned(operator.kept, len(operator.kept), operator.kept.dtype, device))
    assert isinstance(operator, Solve)  # rows stay on their rank
    M = torch.empty_like(operator.kept, device=device)
    return replace(operator, form=operator.form._replace(M=M))


def aligned(like: Tensor, groups: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Room for so many matrices like these, whose rows begin where a GPU likes them to.

    Inverses lie so wherever they come from: products with rows that begin elsewhere are rounded otherwise.
    """
    _, rows, columns = like.shape
    size = groups, rows, round_up(columns, tuning.ALIGNED)
    return like.new_empty(size, dtype=dtype, device=device or like.device)[..., :columns]


def replayed(
    question: object, solve: Callable[[Sequence[Tensor]], Solution], tensors: Sequence[Tensor]
) -> Solution:
    """A solve, by a CUDA graph in an eager step on a GPU: there the host takes longer to launch it than it takes.

    Args:
        question: what decides about the kernels of the solve, beside tensors and settings of torch.
        solve: from the tensors, which it may overwrite, to the solution.
        tensors: what it depends on.
    """

    def solved(given: Sequence[Tensor]) -> Outcome:
        value, failed = solve(given)
        return (value,), failed

    found = replays(tensors[0])
    made = found.solve(question, solved, list(tensors)) if found is not None else None
    if made is None:
        return solve(tensors)
    (value,), failed = made
    assert value is not None
    return Solution(value, failed.clone() if failed is not None else None)


def inverse(M: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """`(λI + M)⁻¹ [groups, size, size]`, and for each group whether it failed; M may be overwritten."""

    def solve(given: Sequence[Tensor]) -> Solution:
        factorization = factorize_whole(given[0], damping)
        return Solution(factorization.inverse(), factorization.failed)

    X, failed = replayed(("inverse", damping), solve, (M,))
    assert failed is not None
    return X, failed


def rows_pay(sizes: Sizes, settings: Settings) -> bool:
    """Whether a step is cheaper from so many rows than from S, in no more memory.

    Args:
        sizes: the system's, with the samples of all calls together.
        settings: the layer's; a pinned space decides.

    Example:
        >>> wide = Sizes(groups=1, samples=500, features=3073, outputs=4000)
        >>> rows_pay(wide, Settings(Exact())), rows_pay(wide._replace(samples=2000), Settings(Exact()))
        (True, False)
    """
    solver = settings.solver
    space = rows_space(solver)
    if space not in solver.spaces or not 0 < sizes.samples <= sizes.features:
        return False
    if settings.space is not None:
        return settings.space == space
    costs = remembered_plan(sizes, solver).costs
    return costs[space].effort + products_with_rows(sizes, space) < costs[FEATURE].effort


def rows_space(solver: Solver) -> str:
    """Where a step from rows is solved."""
    return SAMPLE if isinstance(solver, Exact) else MATRIX_FREE


def products_with_rows(sizes: Sizes, space: str) -> float:
    """FLOPs of a step from rows beyond those of immediate mode: in sample space, products with A and Aᵀ, twice each."""
    groups, samples, features, outputs = sizes
    return 8.0 * groups * samples * features * outputs if space == SAMPLE else 0.0
