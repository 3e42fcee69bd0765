"""Cholesky factorisations of `λI + M`: one class for each backend, and one rule for failure.

A factorisation has failed where a pivot is no larger than the rounding of its diagonal entry, because the rest of the
factor would be noise. Then `√(λ + trace M)·I` replaces the factor, and the solution is `B / (λ + trace M)`, the
gradient with a step that cannot overshoot. It is linear in B and is chosen without synchronisation. Where M is not
finite, neither is the solution. NaN in M is not a failure of the factorisation and is not flagged. A CPU also
flags a pivot that is only a little larger and a condition number that costs most digits, and keeps the factor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.solvers.matmul import LONGEST_SUM, transposed_product
from proxprop.solvers.rotation import rotate
from proxprop.solvers.solver import PreparedSolve, ProductSolve, Solution

LEAST_PIVOT = 4
"""A pivot must be larger than its diagonal entry times this multiple of `ε√size`."""

DOUBTFUL = 8
"""A CPU, which can solve again in float64, flags pivots up to this multiple of the least one, and keeps their factor.

Rows that are equal round in the same direction, so their sums are off by more than the least pivot allows for.
"""

DOUBTED_SIZE = LONGEST_SUM
"""Smaller matrices are treated as this large here, because their entries are rounded sums of as many numbers."""

ILL_CONDITIONED = 1
"""A CPU flags condition numbers above this multiple of `1/(ε√size)` too, of the matrix scaled to a diagonal of ones.

Equal columns have large pivots, and yet all of them together have one that is far larger.
"""

CLEAR = 2.0**-10
"""A CPU doubts no factor whose smallest pivot is a larger share of the largest diagonal entry, and `16ε` a row."""

FULL_RANK = 2.0**-5
"""A CPU takes M for nearly singular unless the smallest pivot is a larger share of the largest diagonal entry."""


class Factorization(ABC):
    """A factorised `λI + M`.

    Attributes:
        failed: for each group whether the factorisation failed or is doubtful, `[groups]`; it stays on the device.
        broken: for each group whether it failed, so that its factor was replaced.
        rank_is_full: False where a CPU saw that M may be nearly singular.
    """

    failed: Tensor
    broken: Tensor
    rank_is_full = True

    @abstractmethod
    def solve(self, B: Tensor) -> Tensor:
        """`(λI + M)⁻¹B [groups, size, outputs]`, or `B / (λ + trace M)` where the factorisation failed."""

    def prepared(self, outputs: int, rotated: bool = False) -> PreparedSolve:
        """The fastest solve for so many outputs; for `rotated` samples it rotates B first."""
        return lambda B: Solution(self.solve(rotate(B) if rotated else B), self.failed)


class TriangularFactorization(Factorization):
    """A factorisation `LLᵀ` that can give `L⁻¹` and the inverse."""

    @abstractmethod
    def inverse_factor(self) -> Tensor:
        """`L⁻¹ [groups, size, size]`. Two products with it are as accurate as two triangular solves."""

    @abstractmethod
    def inverse(self) -> Tensor:
        """`(λI + M)⁻¹ [groups, size, size]`."""

    def solve(self, B: Tensor) -> Tensor:
        """Two products with `L⁻¹`."""
        factor = self.inverse_factor()
        return factor.mT @ (factor @ B)


def factorize(M: Tensor, damping: float) -> Factorization:
    """Factorise `λI + M` for positive semidefinite M `[groups, size, size]`, which may be overwritten."""
    chosen = backend(M)
    if chosen == "blocks":
        from proxprop.solvers.block_cholesky import BlockFactorization

        return BlockFactorization(M, damping)
    return IN_ONE_PIECE[chosen](M, damping)


def factorize_whole(M: Tensor, damping: float) -> TriangularFactorization:
    """Factorise `λI + M` for the sake of `L⁻¹` or the inverse."""
    chosen = backend(M, whole=True)
    if chosen == "blocks":
        from proxprop.solvers.block_inverse import BlockInverse

        return BlockInverse(M, damping)
    return IN_ONE_PIECE[chosen](M, damping)


def backend(M: Tensor, whole: bool = False) -> str:
    """The backend that factorises `λI + M`.

    "triton" is for small systems on a GPU, where LAPACK's way waits from column to column. "blocks" is for large
    systems on a GPU. For a solution it takes the GPU less time than LAPACK but the host two to four times as much, so
    it is for steps that are captured in a CUDA graph. For an inverse LAPACK takes several times as long, and can't be
    captured. Everything else is "lapack" (cuSOLVER on a GPU).

    Args:
        M: as in `factorize`.
        whole: whether `L⁻¹` or the inverse is wanted.
    """
    if device.use_triton(M) and M.shape[-1] <= tuning.TRITON_CHOLESKY_MOST_ROWS:
        return "triton"
    if whole:
        by_blocks = device.use_triton(M) and M.shape[-1] > tuning.CHOLESKY_BLOCK
    else:
        by_blocks = len(M) == 1 and device.has_fast_bfloat16(M) and device.is_captured(M)
    return "blocks" if by_blocks else "lapack"


def upper_bound(M: Tensor, damping: float) -> Tensor:
    """`λ + trace M`, no smaller than the largest eigenvalue, `[groups]`; infinite where M overflowed."""
    return M.diagonal(dim1=-2, dim2=-1).sum(-1).add_(damping)


def divisor(bound: Tensor) -> Tensor:
    """The divisor of B where a factorisation failed: NaN where M overflowed, because `B / inf` would hide that."""
    return bound.masked_fill(bound == torch.inf, torch.nan)


def least_share(M: Tensor) -> float:
    """The smallest share of its diagonal entry that a pivot may be."""
    return float(LEAST_PIVOT * torch.finfo(M.dtype).eps * M.shape[-1] ** 0.5)


def doubtful_share(M: Tensor) -> float:
    """The largest share of its diagonal entry at which a CPU flags a pivot."""
    return float(least_share(M) * DOUBTFUL * max(1.0, DOUBTED_SIZE / max(1, M.shape[-1])) ** 0.5)


def _smallest_share(roots: Tensor, diagonal: Tensor, info: Tensor) -> float:
    """The smallest pivot of all over the largest diagonal entry of all, as a CPU sees it; zero where LAPACK failed.

    Args:
        roots: of the pivots, `[groups, size]`.
        diagonal: of the matrix that was factorised, `[groups, size]`.
        info: LAPACK's.
    """
    if diagonal.numel() == 0 or any(info.tolist()):
        return 0.0
    return float(roots.amin()) ** 2 / float(diagonal.amax())


class LapackFactorization(TriangularFactorization):
    """By torch.linalg: the lower factor `L [groups, size, size]`."""

    def __init__(self, M: Tensor, damping: float) -> None:
        diagonal = M.diagonal(dim1=-2, dim2=-1).add_(damping)
        self.L, info = torch.linalg.cholesky_ex(M)
        roots = self.L.diagonal(dim1=-2, dim2=-1)
        on_cpu = M.device.type == "cpu"
        if on_cpu and not device.is_transformed(M):
            smallest = _smallest_share(roots, diagonal, info)
            self.rank_is_full = smallest > FULL_RANK
            if smallest > max(CLEAR, 16 * M.shape[-1] * torch.finfo(M.dtype).eps):
                self.failed = self.broken = info.bool()
                return
        shares = roots.square() / diagonal
        sound = (shares > least_share(M)).all(-1) & (info == 0)
        bound = (diagonal - damping).sum(-1).add_(damping)
        identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        self.L = torch.where(sound.view(-1, 1, 1), self.L, identity * divisor(bound).sqrt().view(-1, 1, 1))
        self.failed = self.broken = (sound | bound.isnan()).logical_not()
        if on_cpu:
            rounding = torch.finfo(M.dtype).eps * max(M.shape[-1], DOUBTED_SIZE) ** 0.5
            doubtful = (shares <= doubtful_share(M)).any(-1)
            ill_conditioned = self._condition(M, diagonal) * rounding > ILL_CONDITIONED
            self.failed = self.broken | doubtful | ill_conditioned

    def _condition(self, M: Tensor, diagonal: Tensor) -> Tensor:
        """The condition number of `λI + M`, scaled to a diagonal of ones, `[groups]`; from below, but not by much.

        The norm of the inverse comes from two steps of the power method.

        Args:
            M: `λI + M`.
            diagonal: of it.
        """
        roots = diagonal.sqrt()[..., None]
        norm = torch.linalg.matrix_norm(M / roots / roots.mT)
        v = torch.arange(M.shape[-1], dtype=M.dtype, device=M.device).cos().expand(diagonal.shape)[..., None]
        for _ in range(2):
            v = v / torch.linalg.matrix_norm(v, keepdim=True)
            v = roots * self.solve(roots * v)
        condition: Tensor = norm * torch.linalg.matrix_norm(v)
        return condition

    def solve(self, B: Tensor) -> Tensor:
        """Two triangular solves.

        Those of cuBLAS are rounded to TF32 where products may be, which a solve magnifies; those of cuSOLVER are not,
        but can't be captured in a CUDA graph. A CPU solves faster for rows than for columns: `Xᵀ = Bᵀ(λI + M)⁻¹`.
        """
        if self.L.device.type == "cpu":
            half = torch.linalg.solve_triangular(self.L.mT, B.mT, upper=True, left=False)
            rows: Tensor = torch.linalg.solve_triangular(self.L, half, upper=False, left=False)
            return rows.mT
        eager = not (torch.compiler.is_compiling() or device.is_captured(self.L))
        if self.L.is_cuda and len(self.L) == 1 and eager:
            return torch.cholesky_solve(B, self.L)
        halfway = torch.linalg.solve_triangular(self.L, B, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(self.L.mT, halfway, upper=True)
        return solved

    def inverse(self) -> Tensor:
        """By LAPACK's own routine on a CPU; by a product on a GPU, where that routine can't be captured."""
        if not self.L.is_cuda:
            return torch.cholesky_inverse(self.L)
        with device.float32_products("ieee", self.L):
            factor = self.inverse_factor()
            return factor.mT @ factor

    def inverse_factor(self) -> Tensor:
        """By substitution for the columns of the identity."""
        identity = torch.eye(self.L.shape[-1], dtype=self.L.dtype, device=self.L.device)
        with device.float32_products("ieee", self.L):
            factor: Tensor = torch.linalg.solve_triangular(self.L, identity.expand_as(self.L), upper=False)
        return factor

    def prepared(self, outputs: int, rotated: bool = False) -> PreparedSolve:
        """With as many outputs as rows, a CPU multiplies by the inverse faster than it substitutes."""
        if outputs < self.L.shape[-1] or self.L.is_cuda or rotated:
            return super().prepared(outputs, rotated)
        return ProductSolve(self.inverse(), lambda B: Solution(B, self.failed))


class TritonFactorization(TriangularFactorization):
    """The Triton kernel for small systems; it gives L⁻¹, padded as tensor cores need it."""

    def __init__(self, M: Tensor, damping: float) -> None:
        from proxprop.kernels import cholesky

        self.size = M.shape[-1]
        self.padded, self.failed = cholesky.inverse_factor(M, damping, least_share(M))
        self.broken = self.failed

    def inverse_factor(self) -> Tensor:
        """Without the padding."""
        return self.padded[:, : self.size, : self.size]

    def solve(self, B: Tensor) -> Tensor:
        """Two products."""
        rows = self.padded[..., : self.size]
        return rows.mT @ (rows @ B)

    def inverse(self) -> Tensor:
        """One product."""
        rows = self.padded[..., : self.size]
        return rows.mT @ rows

    def prepared(self, outputs: int, rotated: bool = False) -> PreparedSolve:
        """With as many outputs as rows, multiply by the inverse, and rotate the inverse in place of B."""
        if outputs < self.size or len(self.padded) > 1:
            return super().prepared(outputs, rotated)
        wide = self.padded[0, :, : self.size].mT @ self.padded[0]
        if rotated:
            wide = rotate(wide[None])[0]
        # The product with the layer's input reads U faster with outputs as rows.
        return lambda B: Solution(transposed_product(B[0], wide).mT[None, : self.size], self.failed)


IN_ONE_PIECE: dict[str, Callable[[Tensor, float], TriangularFactorization]] = {
    "triton": TritonFactorization,
    "lapack": LapackFactorization,
}
"""Factorisations that do not work by blocks, by the names that `backend` gives them."""
