"""A few steps of the conjugate gradient method from zero, in any space, with the same iterates in each."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.solvers import eigenbasis
from proxprop.solvers.conjugate_gradients import ConjugateGradients
from proxprop.solvers.matmul import times
from proxprop.solvers.solver import (
    FEATURE,
    MATRIX_FREE,
    SAMPLE,
    PreparedSolve,
    ProductSolve,
    Sizes,
    Solution,
    Solver,
)
from proxprop.solvers.watching import Bounds


@dataclass(frozen=True)
class CG(Solver):
    """Approximate the proximal step by conjugate gradients on `(λI + AᵀA) D = AᵀG`, started at 0.

    A column (an output) whose residual has come down to rounding stops, whatever the number of steps. Where a few
    eigenvalues are far larger than all others, rounding makes CG lag behind exact arithmetic by a step or two.

    Args:
        iterations: how many steps to take, at least 1. Every number of steps gives a descent direction.
        per_output: the system acts on features only, so outputs are independent problems. True gives each
            output its own step lengths; False takes one step length for the whole layer, as the textbook
            does for the stacked vector.

    Example:
        >>> import torch
        >>> A, G = torch.eye(2)[None], torch.ones(1, 2, 1)
        >>> CG(1).features(A.mT @ A, A.mT @ G, damping=1.0).value.flatten()
        tensor([0.5000, 0.5000])
    """

    iterations: int = 3
    per_output: bool = True

    spaces: ClassVar[tuple[str, ...]] = (SAMPLE, FEATURE, MATRIX_FREE)
    capturable: ClassVar[bool] = True
    failure: ClassVar[str] = (
        "rounding of AᵀA or AAᵀ hides part of the direction from conjugate gradients, or these products overflowed. "
        "Likely causes: tau_theta is too large for float32, inputs of very large or very different scale, or many "
        "repeated inputs. Try a smaller tau_theta, normalised inputs, space='matrix_free' or float64"
    )

    def __post_init__(self) -> None:
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int):
            raise TypeError(f"CG's iterations should be a whole number but is {self.iterations!r}")
        if self.iterations < 1:
            raise ValueError(f"CG's iterations should be at least 1 but is {self.iterations}")

    def flops(self, sizes: Sizes, space: str) -> float:
        """One product with K, S or `AᵀA` an iteration, though a CPU may need fewer (`eigenbasis`)."""
        groups, samples, features, outputs = sizes
        product = {
            SAMPLE: 2.0 * samples**2 * outputs,
            FEATURE: 2.0 * features**2 * outputs,
            MATRIX_FREE: 4.0 * samples * features * outputs,
        }
        return self.iterations * groups * product[space]

    def backend(self, space: str, M: Tensor, outputs: int) -> str:
        """The iteration's backend: "triton" kernels, the torch loop in an "eigenbasis", or the "torch" loop."""
        if self._takes_triton(space, M):
            return "triton"
        formed = space != MATRIX_FREE and self.per_output
        return "eigenbasis" if formed and eigenbasis.pays(M, self.iterations, outputs) else "torch"

    def prepared(
        self, space: str, M: Tensor, damping: float, outputs: int, rotated: bool = False
    ) -> PreparedSolve:
        """Find the eigenbasis, where that pays."""
        if space == SAMPLE and self._takes_triton(SAMPLE, M):
            return lambda G: self._triton_samples(M, G, damping, rotated)
        pays = self.per_output and not rotated and eigenbasis.pays(M, self.iterations, outputs)
        if pays and (basis := eigenbasis.find(M, space)):
            return ProductSolve(basis.vectors, lambda B: self._in_eigenbasis(basis, B, damping))
        return super().prepared(space, M, damping, outputs, rotated)

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return U with `AᵀU` the iterate of `features`, from products with K alone."""
        if self._takes_triton(SAMPLE, K):
            return self._triton_samples(K, G, damping)
        return self._with_matrix(K, G, damping, SAMPLE)

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return the iterate from products with S."""
        if self._takes_triton(FEATURE, S):
            from proxprop.kernels import feature_cg

            return Solution(*feature_cg.feature_cg(S, B, damping, self.iterations, device.fp16_terms()))
        return self._with_matrix(S, B, damping, FEATURE)

    def matrix_free(self, apply: Callable[[Tensor], Tensor], B: Tensor, damping: float) -> Solution:
        """Return the iterate from products `V -> AᵀAV`."""
        dims = (-2,) if self.per_output else (-3, -2, -1)
        found = ConjugateGradients(apply, B, damping, self.iterations, dims).solve()
        return Solution(found.solution, _for_groups(found.stuck))

    def _takes_triton(self, space: str, M: Tensor) -> bool:
        """Whether a Triton kernel iterates with K or S."""
        if space == SAMPLE:
            few = self.iterations <= tuning.TRITON_CG_MOST_ITERATIONS
            few = few and M.shape[-1] <= tuning.TRITON_CG_MOST_SAMPLES
        else:
            few = space == FEATURE and M.shape[-1] <= tuning.TRITON_CG_MOST_FEATURES
        return few and self.per_output and device.use_fp16_products(M)

    def _triton_samples(self, K: Tensor, G: Tensor, damping: float, rotated: bool = False) -> Solution:
        """The iterate from the Triton kernel, which can rotate G as it reads it."""
        from proxprop.kernels import sample_cg

        terms = device.fp16_terms()
        return Solution(*sample_cg.sample_cg(K, G, damping, self.iterations, terms, rotated))

    def _with_matrix(self, M: Tensor, B: Tensor, damping: float, space: str) -> Solution:
        """The iterate from products with K or S, scaled by a power of two where sums of squares could overflow.

        A matrix that has overflowed is a failure. NaN comes from the inputs and is not a failure.

        A CPU works with outputs as rows, because products then split them among cores as all other operations do,
        and with some of them at a time, which saves memory. For few numbers that would cost more than it saves.
        """
        diagonal = M.diagonal(dim1=-2, dim2=-1)
        if B.device.type != "cpu" or device.is_transformed(B):
            mantissa, exponent = torch.frexp(diagonal.amax().clamp(min=damping))
            scale = torch.ldexp(torch.ones_like(mantissa), -exponent)
            weights = diagonal * scale if space == SAMPLE else None
            value, lost = self._iterate(partial(times, M * scale), B, damping * scale, weights)
            return Solution(value * scale, _either(diagonal.isinf().any(-1), lost))
        largest = max(float(diagonal.amax()), damping)
        if largest == math.inf:
            overflowed = diagonal.isinf().any(-1)
            there = overflowed[:, None, None]
            value, lost = self._with_matrix(M.masked_fill(there, 0.0), B, damping, space)
            return Solution(value.masked_fill(there, torch.nan), _either(overflowed, lost))
        unit = 1.0 if SAFE[0] < largest < SAFE[1] else power_of_two(largest, B.dtype)
        W, diagonal = (M, diagonal) if unit == 1.0 else (M / unit, diagonal / unit)
        weights = diagonal if space == SAMPLE else None
        bounds = Bounds(largest / unit, largest / unit * M.shape[-1])
        if B.is_contiguous() and B.numel() <= tuning.CPU_COLUMNS_MOST_NUMBERS:
            return self._iterate(partial(times, W), B, damping / unit, weights, bounds).times(1 / unit)
        rows = self._by_rows(lambda V: torch.bmm(V, W), B, damping / unit, weights, bounds)
        return rows.times(1 / unit)

    def _iterate(
        self,
        multiply: Callable[[Tensor], Tensor],
        B: Tensor,
        damping: float | Tensor,
        weights: Tensor | None = None,
        bounds: Bounds | None = None,
        out: Tensor | None = None,
        column: int = -2,
    ) -> Solution:
        """Take the steps; `weights` are K's diagonal in sample space, and `column` is the dimension of a column."""
        dims = (column,) if self.per_output else (-3, -2, -1)
        diagonal = weights.unsqueeze(-3 - column) if weights is not None else None
        problem = ConjugateGradients(multiply, B, damping, self.iterations, dims, diagonal, out, bounds)
        found = problem.solve()
        return Solution(found.solution, _for_groups(found.lost))

    def _in_eigenbasis(self, basis: eigenbasis.Basis, B: Tensor, damping: float) -> Solution:
        """The iterate in a basis in which the matrix is diagonal, `[groups, size, outputs]`."""
        largest = max(float(basis.values.amax()), damping)
        unit = power_of_two(largest, B.dtype)
        basis = basis.over(unit)
        weights = basis.noisy
        bounds = Bounds(largest / unit if weights is None else float(weights.amax()), largest / unit)
        multiply = basis.values.unsqueeze(-2).mul
        return self._by_rows(multiply, B, damping / unit, weights, bounds, basis).times(1 / unit)

    def _by_rows(
        self,
        multiply: Callable[[Tensor], Tensor],
        B: Tensor,
        damping: float,
        weights: Tensor | None,
        bounds: Bounds,
        basis: eigenbasis.Basis | None = None,
    ) -> Solution:
        """Solve for blocks of outputs as rows, perhaps in a basis that `multiply` and the solution are in."""

        def solve(columns: Tensor, out: Tensor | None = None) -> Solution:
            rows = columns.mT.contiguous() if basis is None else columns.mT @ basis.vectors
            found = self._iterate(multiply, rows, damping, weights, bounds, out, column=-1)
            if basis is None or basis.zeroed is None:
                return found
            hidden = eigenbasis.is_hidden(found.value, rows, basis, damping)
            return Solution(found.value, _either(hidden, found.failed))

        groups, size, outputs = B.shape
        width = self._width(B)
        if outputs <= width:
            X, lost = solve(B)
            return Solution(X.mT, lost)
        X = B.new_empty(groups, outputs, size)
        flags = [solve(*block).failed for block in zip(B.split(width, -1), X.split(width, -2), strict=True)]
        flagged = [flag for flag in flags if flag is not None]
        return Solution(X.mT, torch.stack(flagged).any(0) if flagged else None)

    def _width(self, B: Tensor) -> int:
        """Outputs to work on at a time."""
        groups, size, outputs = B.shape
        if not self.per_output:
            return outputs
        bytes_an_output = ARRAYS * B.element_size() * groups * size
        return max(tuning.CPU_BLOCK_LEAST_OUTPUTS, tuning.CPU_BLOCK_BYTES // bytes_an_output)


ARRAYS = 8
"""Arrays of a right-hand side's shape that the loop works in."""

SAFE = 2.0**-30, 2.0**30
"""Between these, sums of products of K, S and λ neither over- nor underflow in float32."""


def _for_groups(columns: Tensor | None) -> Tensor | None:
    """Whether a column of each group is flagged, `[groups]`; None for none."""
    return columns.any(-1).any(-1) if columns is not None else None


def _either(flagged: Tensor, lost: Tensor | None) -> Tensor:
    """Whether each group is flagged or lost."""
    return flagged if lost is None else flagged | lost


def power_of_two(size: float, dtype: torch.dtype) -> float:
    """The least power of two above `size`, kept away from the largest number; 1 where `size` is not finite."""
    most = math.frexp(torch.finfo(dtype).max)[1] - 2
    return 2.0 ** min(math.frexp(size)[1], most) if math.isfinite(size) else 1.0
