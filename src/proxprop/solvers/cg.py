"""A few steps of the conjugate gradient method from zero, in any space, with the same iterates in each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from proxprop import device
from proxprop.solvers import eigenbasis
from proxprop.solvers.matmul import times
from proxprop.solvers.memory import is_transformed
from proxprop.solvers.solver import FEATURE, MATRIX_FREE, SAMPLE, Factored, Ready, Sizes, Solution, Solver

TURNED_NUMBERS = 2**16
"""From so many numbers of G on, a CPU works on it with outputs as rows."""

BYTES_IN_USE = 6 * 2**20
"""That it then works on at a time, in all arrays together."""

FEWEST_OUTPUTS = 512
"""That it does so for: with fewer, a product has to read K too often."""

ALIGNED = 64
"""Outputs that a CPU likes arrays to hold a multiple of."""

TYPICAL_OUTPUTS = 128
"""Whose columns of G are taken for all others', to choose polynomials by."""

SAFE = 1e-30, 1e24
"""Between these a float32 sum of squares has lost nothing, and λ times it does not overflow, for λ up to 1e14."""

FUSED_SAMPLES = 2048
"""Most samples of which the fused kernel holds whole columns."""

FUSED_ITERATIONS = 32
"""Most iterations whose residuals it keeps."""

FUSED_FEATURES = 16384
"""Most features of which the fused kernel splits a row of S at once."""


@dataclass(frozen=True)
class CG(Solver):
    """Approximate the proximal step by conjugate gradients on `(λI + AᵀA) D = AᵀG`, started at 0.

    Where one eigenvalue is far larger than all others, as the mean of activations makes it, rounding has steps fall
    behind those of exact arithmetic, in float32 after a few of them. Not so where they are solved for at once, as up to
    a dozen are on a CPU of few cores for layers of many outputs.

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

    def __post_init__(self) -> None:
        if isinstance(self.iterations, bool) or not isinstance(self.iterations, int):
            raise TypeError(f"CG's iterations should be a whole number but is {self.iterations!r}")
        if self.iterations < 1:
            raise ValueError(f"CG's iterations should be at least 1 but is {self.iterations}")

    def flops(self, sizes: Sizes, space: str) -> float:
        """One product with K, S or `AᵀA` an iteration, though a CPU may need fewer (`spectral`)."""
        groups, samples, features, outputs = sizes
        product = {
            SAMPLE: 2.0 * samples**2 * outputs,
            FEATURE: 2.0 * features**2 * outputs,
            MATRIX_FREE: 4.0 * samples * features * outputs,
        }
        return self.iterations * groups * product[space]

    def prepared(self, space: str, M: Tensor, damping: float, outputs: int) -> Ready:
        """Find the eigenbasis, where that pays."""
        return self._in_eigenbasis(space, M, damping, outputs) or super().prepared(space, M, damping, outputs)

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """Return U with `AᵀU` the iterate of `features`, from products with K alone."""
        few = G.shape[-2] <= FUSED_SAMPLES and self.iterations <= FUSED_ITERATIONS
        if few and self.per_output and device.use_fp16_products(G):
            from proxprop.kernels import sample_cg as fused

            return Solution(fused.sample_cg(K, G, damping, self.iterations, device.fp16_terms()))
        ready = self._in_eigenbasis(SAMPLE, K, damping, G.shape[-1])
        if ready is not None:
            return ready(G)
        many = self.per_output and G.numel() >= TURNED_NUMBERS
        if many and G.device.type == "cpu" and not is_transformed(G):
            one = self.iterations == 1
            return Solution(one_step(K, G, damping) if one else by_rows(K, G, damping, self.iterations))
        return Solution(sample_cg(K, G, damping, self.iterations, self._sums, rounding(K)))

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """Return the iterate from products with S."""
        if self.per_output and B.shape[-2] <= FUSED_FEATURES and device.use_fp16_products(B):
            from proxprop.kernels import feature_cg as fused

            return Solution(fused.feature_cg(S, B, damping, self.iterations, device.fp16_terms()))
        ready = self._in_eigenbasis(FEATURE, S, damping, B.shape[-1])
        if ready is not None:
            return ready(B)
        if B.device.type == "cpu":  # outputs as rows, as in `by_rows`
            return self.matrix_free(lambda V: times(V.mT, S).mT, B.mT.contiguous().mT, damping)
        return self.matrix_free(lambda V: times(S, V), B, damping)

    def matrix_free(self, apply: Callable[[Tensor], Tensor], B: Tensor, damping: float) -> Solution:
        """Return the iterate from products `V -> AᵀAV`."""
        B, scale = normalize(B, self._sums)

        def damped(V: Tensor) -> Tensor:
            return apply(V).add(V, alpha=damping)

        return Solution(feature_cg(damped, B, damping, self.iterations, self._sums).mul_(scale))

    def _in_eigenbasis(self, space: str, M: Tensor, damping: float, outputs: int) -> Factored | None:
        """What solves in the eigenbasis of K or S, on a CPU; None where that does not pay or there is none."""
        if not self.per_output or M.device.type != "cpu" or is_transformed(M):
            return None
        pays = eigenbasis.pays(M.shape[-1], self.iterations, outputs)
        basis = eigenbasis.eigenbasis(M, space) if pays else None
        if basis is None:
            return None
        values, vectors, weights = basis
        diagonal = values.add_(damping)
        rows = diagonal.unsqueeze(-2), weights.unsqueeze(-2) if weights is not None else None

        def in_steps(B: Tensor) -> Tensor:
            return on_diagonal(*rows, vectors, B, damping, self.iterations).mT

        def at_once(B: Tensor) -> Tensor:
            return in_krylov_space(diagonal, weights, vectors, B, self.iterations, in_steps)

        return Factored(vectors, at_once if self.iterations <= eigenbasis.MOST_POLYNOMIALS else in_steps)

    @property
    def _sums(self) -> tuple[int, ...]:
        """The dimensions an inner product sums over."""
        return (-2,) if self.per_output else (-3, -2, -1)


def by_rows(K: Tensor, G: Tensor, damping: float, iterations: int) -> Tensor:
    """`sample_cg` with outputs as rows, a block of them at a time, in the same memory.

    A product shares out its rows among a processor's cores just as all that follows does, so that each core finds
    its numbers in its own cache, and none writes to what another has read.
    """
    U, noise = G.new_empty(G.mT.shape), rounding(K)
    for columns, *arrays in blocks(G, U, arrays=5):
        _, _, pi, *_ = arrays
        sample_cg(K, pi.copy_(columns.mT), damping, iterations, (-1,), noise, arrays)
    return U.mT


def one_step(K: Tensor, G: Tensor, damping: float) -> Tensor:
    """`by_rows` for a single step, which is G times a length for each column.

    Their scale cancels, so G is not normalized first; columns whose sums turn out to need that are solved again, but
    those that are zero.
    """
    U, shortest, noise = G.new_empty(G.mT.shape), shortest_step(K, damping), rounding(K)
    for columns, out, K_pi, spare in blocks(G, U, arrays=2):
        pi = out.copy_(columns.mT)
        torch.bmm(pi, K, out=K_pi)
        squared, image = dot(pi, K_pi, (-1,), spare), dot(K_pi, K_pi, (-1,), spare)
        out.mul_(first_length(squared, image, damping, shortest))
        sums = torch.stack((squared, image))
        unsafe = (sums.clamp(*SAFE) != sums).any(dim=(0, 1, 3)).nonzero().squeeze(-1)
        if len(unsafe):
            unsafe = unsafe[out[:, unsafe].any(dim=(0, 2))]
        if len(unsafe):
            out[:, unsafe] = sample_cg(K, columns.mT[:, unsafe], damping, 1, (-1,), noise)
    return U.mT


def on_diagonal(
    diagonal: Tensor, weights: Tensor | None, vectors: Tensor, B: Tensor, damping: float, iterations: int
) -> Tensor:
    """`feature_cg` in a basis in which the matrix is diagonal, with outputs as rows, a block of them at a time.

    Args:
        diagonal: `[groups, 1, size]`.
        weights: of an inner product's summands, `[groups, 1, size]`; None where all are 1.
        vectors: the basis, `[groups, size, size]` as columns.
        B: right-hand side `[groups, size, outputs]`, in the basis it came in.
        damping: λ.
        iterations: how many steps.

    Returns:
        `[groups, outputs, size]`, in that basis.
    """
    if is_transformed(B):
        normal, scale = normalize(B.mT @ vectors, (-1,))
        return feature_cg(diagonal.mul, normal, damping, iterations, (-1,), weights).mul_(scale)
    D = B.new_empty(B.mT.shape)
    for columns, out, residual, search, image, spare in blocks(B, D, arrays=4):
        _, scale = normalize(torch.bmm(columns.mT, vectors, out=image), (-1,), spare, search)
        apply, arrays = partial(torch.mul, diagonal, out=image), (out, residual, search, spare)
        feature_cg(apply, search, damping, iterations, (-1,), weights, arrays).mul_(scale)
    return D


def in_krylov_space(
    diagonal: Tensor,
    weights: Tensor | None,
    vectors: Tensor,
    B: Tensor,
    iterations: int,
    in_steps: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `on_diagonal` comes to in few steps, without taking them; a block of columns at a time.

    Args:
        diagonal: `[groups, size]`.
        weights: of an inner product's summands, `[groups, size]`; None where all are 1.
        vectors: the basis, `[groups, size, size]` as columns.
        B: right-hand side `[groups, size, outputs]`, in the basis it came in.
        iterations: how many steps.
        in_steps: takes them, for columns whose equations are near singular.

    Returns:
        `[groups, size, outputs]`, in that basis.
    """
    if is_transformed(B):
        return in_steps(B)
    groups, size, outputs = B.shape
    exact = torch.float64
    count = -(-outputs // at_a_time((2 * B.itemsize + exact.itemsize) * groups * size))
    width = device.round_up(-(-outputs // count), ALIGNED)
    memory = B.new_empty(groups * size * width)
    for_squares = torch.empty_like(memory, dtype=exact)
    D, sums = B.new_empty(B.shape), for_squares.new_empty(groups, iterations * (iterations + 1), outputs)
    basis = None
    for columns, out, those in zip(*(array.split(width, dim=-1) for array in (B, D, sums)), strict=True):
        entries, squares = (array[: out.numel()].view(out.shape) for array in (memory, for_squares))
        out.copy_(torch.bmm(vectors.mT, columns, out=entries))
        squares.copy_(entries).mul_(squares)
        basis = basis or eigenbasis.polynomials(diagonal, weights, squares[..., :TYPICAL_OUTPUTS], iterations)
        if basis is None:
            return in_steps(B)
        torch.bmm(basis.moments, squares, out=those)
    assert basis is not None
    shares, safe = eigenbasis.coefficients(sums, iterations)
    for some, out in zip(shares.to(B.dtype).split(width, dim=-1), D.split(width, dim=-1), strict=True):
        out.mul_(torch.bmm(basis.values.mT, some, out=memory[: out.numel()].view(out.shape)))
    again = safe.logical_not()
    if again.any():
        which = again.any(0).nonzero().squeeze(-1)
        some = B.index_select(-1, which)
        left = (again[:, which] & some.any(-2)).any(0)  # but columns of zeros
        if left.any():
            D[..., which[left]] = in_steps(some[..., left])
    return D


def blocks(B: Tensor, X: Tensor, arrays: int) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of the columns of B `[groups, size, outputs]` and of the rows of X `[groups, outputs, size]`.

    Each comes with so many arrays of its rows' shape to work in, always the same ones.
    """
    groups, _, size = X.shape
    rows = at_a_time((1 + arrays) * X.itemsize * groups * size)
    memory = X.new_empty(arrays * X[:, :rows].numel())
    for columns, out in zip(B.split(rows, dim=-1), X.split(rows, dim=-2), strict=True):
        yield columns, out, *memory[: arrays * out.numel()].view(arrays, *out.shape).unbind()


def at_a_time(size: int) -> int:
    """How many outputs of this size in bytes, in all arrays together, are worked on at a time."""
    return max(FEWEST_OUTPUTS, BYTES_IN_USE // size)


def feature_cg(
    apply: Callable[[Tensor], Tensor],
    B: Tensor,
    damping: float,
    iterations: int,
    sums: tuple[int, ...],
    weights: Tensor | None = None,
    arrays: Sequence[Tensor | None] = (None,) * 4,
) -> Tensor:
    """Textbook conjugate gradients on `(λI + AᵀA) D = B` from `D = 0`.

    Args:
        apply: the product `V -> (λI + AᵀA)V`.
        B: right-hand side `[groups, features, outputs]`.
        damping: λ.
        iterations: how many steps.
        sums: the dimensions an inner product sums over.
        weights: of its summands; None where all are 1.
        arrays: memory to work in, of B's shape each; the third may be B.

    Returns:
        D `[groups, features, outputs]`, in the first of the arrays.
    """
    for_D, for_residual, for_search, spare = arrays
    residual, search = B, B
    squared, image = dot(residual, residual, sums, spare, weights), apply(search)
    length = quotient(squared, dot(search, image, sums, spare, weights), 1 / damping)
    D = torch.mul(length, search, out=for_D)
    for _ in range(1, iterations):
        residual = torch.addcmul(residual, length, image, value=-1, out=for_residual)
        before, squared = squared, dot(residual, residual, sums, spare, weights)
        search = torch.addcmul(residual, quotient(squared, before, 0.0), search, out=for_search)
        image = apply(search)
        length = quotient(squared, dot(search, image, sums, spare, weights), 1 / damping)
        D.addcmul_(length, search)
    return D


def sample_cg(
    K: Tensor,
    G: Tensor,
    damping: float,
    iterations: int,
    sums: tuple[int, ...],
    noise: Tensor,
    arrays: Sequence[Tensor | None] = (None,) * 6,
) -> Tensor:
    """The recurrence of `feature_cg` on coefficients: residual `r = Aᵀρ`, search `p = Aᵀπ`, `D = AᵀU`.

    Every inner product of the primal recurrence becomes one with `K = AAᵀ`:

        ⟨r, r⟩ = ⟨ρ, Kρ⟩        ⟨p, (λI + AᵀA)p⟩ = λ⟨π, Kπ⟩ + ‖Kπ‖²

    and `Kπ` follows π's own recurrence, so there is one product with K a step. Conjugate gradients on the
    system `(λI + K) U = G` in the Euclidean inner product would be another method with other iterates.

    Part of ρ can lie in the null space of K and never shrink (more samples than features, equal rows). It
    does not reach D, but its rounding reaches ⟨ρ, Kρ⟩; below that noise a column has converged and stands
    still. The first step goes along the gradient itself, so there only its length is held to what is possible,
    `1/(λ + trace K)` to `1/λ`.

    Args:
        K: `AAᵀ [groups, samples, samples]`.
        G: `[groups, samples, outputs]`, or `[groups, outputs, samples]` where `sums` is the last dimension.
        damping: λ.
        iterations: how many steps.
        sums: the dimensions an inner product sums over.
        noise: rounding of K's diagonal `[groups, samples]`.
        arrays: memory to work in, of G's shape each; the third may be G.

    Returns:
        U in G's shape, in the first of the arrays.
    """
    by_rows = sums == (-1,)

    def multiply(right: Tensor, out: Tensor | None) -> Tensor:
        pair = (right, K) if by_rows else (K, right)
        return times(*pair, out)

    for_U, for_rho, for_pi, for_K_rho, for_K_pi, spare = arrays
    noise = noise.unsqueeze(-2 if by_rows else -1)
    pi, scale = normalize(G, sums, spare, for_pi)
    rho = pi
    K_pi = multiply(pi, for_K_pi)
    squared = dot(rho, K_pi, sums, spare)
    shortest = shortest_step(K, damping)
    shortest = shortest if len(sums) == 1 else shortest.min()
    length = first_length(squared, dot(K_pi, K_pi, sums, spare), damping, shortest)
    U = torch.mul(length * scale, pi, out=for_U)
    for _ in range(1, iterations):
        image = torch.add(K_pi, pi, alpha=damping, out=for_K_rho)
        rho = torch.addcmul(rho, length, image, value=-1, out=for_rho)
        K_rho = multiply(rho, for_K_rho)
        before, squared = squared, dot(rho, K_rho, sums, spare)
        least = dot(rho, rho, sums, spare, noise)
        squared.masked_fill_(squared <= least, 0.0)
        ratio = quotient(squared, before, 0.0)
        pi = torch.addcmul(rho, ratio, pi, out=for_pi)
        K_pi = torch.addcmul(K_rho, ratio, K_pi, out=for_K_pi)
        curvature = dot(K_pi, K_pi, sums, spare).add_(dot(K_pi, pi, sums, spare), alpha=damping)
        length = quotient(squared, curvature, 1 / damping)
        U.addcmul_(length * scale, pi)
    return U


def first_length(squared: Tensor, image: Tensor, damping: float, shortest: Tensor) -> Tensor:
    """Of the step along the gradient, from `⟨π, Kπ⟩` and `‖Kπ‖²`."""
    length = quotient(squared, image.add(squared, alpha=damping), 1 / damping)
    return length.clamp_(max=1 / damping).maximum(shortest)


def shortest_step(K: Tensor, damping: float) -> Tensor:
    """`1/(λ + trace K) [groups, 1, 1]`."""
    return K.diagonal(dim1=-2, dim2=-1).sum(-1).view(-1, 1, 1).add(damping).reciprocal()


def rounding(K: Tensor) -> Tensor:
    """Of K's diagonal, `[groups, samples]`."""
    return torch.finfo(K.dtype).eps * K.diagonal(dim1=-2, dim2=-1)


def dot(
    left: Tensor,
    right: Tensor,
    sums: tuple[int, ...],
    spare: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Inner product over the dimensions `sums`, which are kept with size 1; an array to spare is overwritten."""
    product = torch.mul(left, right, out=spare)
    return (product if weights is None else product.mul_(weights)).sum(sums, keepdim=True)


def quotient(numerator: Tensor, denominator: Tensor, degenerate: float) -> Tensor:
    """`numerator / denominator`, or `degenerate` where the denominator is exactly zero; NaN stays NaN.

    A zero denominator means a column with nothing left to solve, or an A so small that `AᵀA` underflows:
    there the step length `1/λ` is the exact solution. No epsilon is added, so the result does not depend on
    the scale of G.
    """
    return (numerator / denominator).masked_fill_(denominator.logical_not(), degenerate)


def normalize(
    B: Tensor, sums: tuple[int, ...], spare: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split B into columns of largest entry 1 and their scale, so that squares neither over- nor underflow."""
    scale = torch.abs(B, out=spare).amax(sums, keepdim=True)
    scale.masked_fill_(scale.logical_not(), 1.0)
    return torch.div(B, scale, out=out), scale
