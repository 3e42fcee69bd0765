"""A step from rows: what a wide layer with few samples keeps instead of S.

`D = (λI + AᵀA)⁻¹B` with `K = AAᵀ` in the place of S, for whatever is in `.grad` at the step: it may have been clipped,
or hold more than `AᵀG`, so that immediate mode's `D = Aᵀ(λI + K)⁻¹G` is not at hand. Woodbury's identity is,

    X = (λI + K)⁻¹AB,    D = (B − AᵀX)/λ,

but where λ is small beside S the difference cancels. What rounding leaves of it is in the row space of A, where exactly
`AD = X`, and solved for without a difference: `D + Aᵀ(λI + K)⁻¹(X − AD)`. Without that step float32 errors are two to
five times those of a Cholesky factor of S; with it about the same, or up to thirty times smaller.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxprop.settings import Settings
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Exact, Sizes, Solution, Solver
from proxprop.solvers.cholesky import factorize_whole
from proxprop.solvers.matmul import transposed_product
from proxprop.solvers.plan import remembered_plan
from proxprop.transfer import LinearTransfer


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


@dataclass(frozen=True)
class RowSolve:
    """`B -> factor·(λI + AᵀA)⁻¹B` for a layer's rows A; CG takes the steps that it would take with S.

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
        samples, solver = self.transfer.sizes.samples, self.settings.solver
        damping, factor = self.settings.damping(samples), self.settings.factor(samples)
        if isinstance(solver, Exact):
            found = solve(self.transfer, B, damping)
        else:
            found = solver.matrix_free(lambda V: adjoint(self.transfer, image(self.transfer, V)), B, damping)
        return found.times(factor)

    def scale(self) -> Tensor:
        """Not for rows."""
        raise NotImplementedError("rows have no diagonal S")


def image(transfer: LinearTransfer, V: Tensor) -> Tensor:
    """`AV`, on a GPU's tensor cores, where the layer's own forward would not be."""
    (A,) = transfer.rows()
    inputs = A.shape[1]
    product = transposed_product(A.mT, V[0, :inputs])
    return (product.add_(V[0, inputs:]) if transfer.bias else product)[None]


def adjoint(transfer: LinearTransfer, U: Tensor) -> Tensor:
    """`AᵀU`."""
    return transfer.to_features(transfer.gradient(transfer.from_samples(U)))


def solve(transfer: LinearTransfer, B: Tensor, damping: float) -> Solution:
    """`(λI + AᵀA)⁻¹B` for any `B [1, features, outputs]`; where the factorisation failed, `B / (λ + trace K)`.

    A failure is substituted in small matrices, where it costs little: without R, D is a multiple of B.
    """
    factorization = factorize_whole(transfer.sample_gram(), damping)
    R, failed = factorization.inverse_factor(), factorization.failed
    broken = failed[:, None, None]
    shrink = torch.where(broken, R[:, :1, :1].square() * damping, 1.0)  # R is I/√(λ + trace K) there
    R = torch.where(broken, 0.0, R)
    X = R.mT @ (R @ image(transfer, B))
    D = (B * shrink).sub_(adjoint(transfer, X)).div_(damping)
    D += adjoint(transfer, R.mT @ (R @ (X - image(transfer, D))))
    return Solution(D, failed)
