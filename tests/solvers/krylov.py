"""Inputs that make rounding matter, and what conjugate gradients should make of them.

Two yardsticks: the best point of each Krylov space, in float64 by Lanczos with full reorthogonalisation in the
coordinates of A's singular value decomposition; and the textbook's loop in the precision under test, in feature space
with a stop. The library may not be much worse than the latter, wherever that is worse than rounding explains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Generator, Tensor, nn

import proxprop
from proxprop.solvers import Solver

COLUMNS = 4
"""Outputs that are compared with the oracle; all are checked for what needs none."""

MOST_ITERATIONS = 100

Make = Callable[[int, int, Generator], Tensor]


def mean_and(spread: float) -> Make:
    return lambda rows, columns, g: 1 + spread * torch.randn(rows, columns, generator=g)


def scaled(scale: float) -> Make:
    return lambda rows, columns, g: scale * torch.randn(rows, columns, generator=g)


def geometric(least: float, repeated: bool = False) -> Make:
    """Singular values from 8 down to 8·least; repeated, a quarter of them in rows that occur three times."""

    def make(rows: int, columns: int, g: Generator) -> Tensor:
        noise = torch.randn(rows, columns, generator=g, dtype=torch.float64)
        U, _, Vh = torch.linalg.svd(noise, full_matrices=False)
        rank = min(rows, columns) // 4 if repeated else min(rows, columns)
        values = 8 * torch.linspace(0, 1, rank, dtype=torch.float64).mul(torch.tensor(least).log()).exp()
        A = ((U[:, :rank] * values) @ Vh[:rank]).float()
        return A[torch.arange(rows) % max(2, rows // 3)] if repeated else A

    return make


def repeated(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randn(rows // 6, columns, generator=g).repeat(6, 1)


def of_low_rank(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randn(rows, 5, generator=g) @ torch.randn(5, columns, generator=g)


def one_row(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randn(1, columns, generator=g).repeat(rows, 1)


def one_hot(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.eye(columns)[torch.randint(columns, (rows,), generator=g)]


def repeated_relu(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randn(rows // 4, columns, generator=g).relu().add(0.2).repeat(4, 1)


REGIMES: dict[str, Make] = {
    "normal": scaled(1.0),
    "repeated rows": repeated,
    "low rank": of_low_rank,
    **{f"mean, spread {spread:.0e}": mean_and(spread) for spread in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)},
    "normal + 1000": lambda *given: scaled(1.0)(*given) + 1000,
    "relu": lambda *given: scaled(1.0)(*given).relu() + 0.5,
    "repeated relu": repeated_relu,
    "one row": one_row,
    "ones": lambda rows, columns, g: torch.ones(rows, columns),
    **{f"spectrum to {least:.0e}": geometric(least) for least in (1e-2, 1e-4, 1e-6)},
    **{f"repeated spectrum to {least:.0e}": geometric(least, True) for least in (1e-2, 1e-4, 1e-6)},
    "one-hot": one_hot,
    "rows of every scale": lambda *given: scaled(1.0)(*given) * torch.logspace(0, -6, given[0])[:, None],
    "columns of every scale": lambda *given: scaled(1.0)(*given) * torch.logspace(0, -6, given[1]),
    **{f"scale {scale:.0e}": scaled(scale) for scale in (1e-8, 1e-6, 1e-3, 1e3, 1e6, 1e8)},
}


@dataclass(frozen=True)
class Precision:
    """How products round.

    Attributes:
        epsilon: of a product.
        round: what a product does to its factors.
    """

    epsilon: float
    round: Callable[[Tensor], Tensor]

    @property
    def close(self) -> float:
        """What an error may be anywhere: in sample space, ⟨ρ, Kρ⟩ tells a residual to `√ε` of ρ."""
        return 10 * self.epsilon**0.5


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to eleven bits, as tensor cores round float32 factors."""
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


FLOAT32 = Precision(2.0**-23, lambda x: x)
TF32 = Precision(2.0**-10, to_tf32)


@dataclass(frozen=True, eq=False)
class System:
    """A linear layer's input with its ones column, an output gradient, and λ.

    Attributes:
        input: `[samples, features - 1]`, float32.
        G: `[samples, outputs]`, float32.
        tau_theta: 1/λ.
    """

    input: Tensor
    G: Tensor
    tau_theta: float

    @cached_property
    def A(self) -> Tensor:
        return torch.cat([self.input, torch.ones(len(self.input), 1)], dim=1)

    @cached_property
    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """In float64, without what is zero but for rounding."""
        U, values, Vh = torch.linalg.svd(self.A.double(), full_matrices=False)
        kept = values > 1e-12 * values[0]
        return U[:, kept], values[kept], Vh[kept]

    @cached_property
    def gradient(self) -> Tensor:
        return self.A.double().T @ self.G.double()

    @cached_property
    def exact(self) -> Tensor:
        U, values, Vh = self.svd
        shrunk = values / (values.square() + 1 / self.tau_theta)
        return Vh.T @ (shrunk[:, None] * (U.T @ self.G.double()))

    def amplification(self, precision: Precision) -> float:
        """By how much rounding of `AᵀA` may change the direction, relatively: `ε‖A‖²τ_θ`."""
        return precision.epsilon * float(self.svd[1][0]) ** 2 * self.tau_theta

    def best(self, iterations: int) -> Tensor:
        """The best point of the Krylov space, of the first columns: what exact arithmetic would make of CG."""
        (Q, T, right), (_, values, Vh) = self._lanczos, self.svd
        k, unit = min(iterations, T.shape[-1]), float(values[0]) ** 2
        damped = T[:, :k, :k] + torch.eye(k, dtype=T.dtype) / (self.tau_theta * unit)
        return Vh.T @ (Q[..., :k] @ torch.linalg.solve(damped, right[:, :k, None])).squeeze(-1).T / unit

    @cached_property
    def _lanczos(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each column a basis `[columns, rank, k]`, `QᵀSQ` and `QᵀB`, with S scaled to norm 1.

        Where a space grows no more, the vectors that follow are zero.
        """
        U, values, _ = self.svd
        squares = (values / values[0]).square()
        B = (values[:, None] * (U.T @ self.G[:, :COLUMNS].double())).T
        basis = [nn.functional.normalize(B, dim=-1, eps=1e-300)]
        for _ in range(1, min(MOST_ITERATIONS, len(values))):
            Q, new = torch.stack(basis, dim=-1), squares * basis[-1]
            for _ in range(3):
                new = new - (Q @ (Q.mT @ new[..., None])).squeeze(-1)
            size = new.norm(dim=-1, keepdim=True)
            basis.append(torch.where(size > 1e-14, new / size, 0.0))
        Q = torch.stack(basis, dim=-1)
        return Q, Q.mT @ (squares[:, None] * Q), (Q.mT @ B[..., None]).squeeze(-1)

    def textbook(self, iterations: int, precision: Precision) -> Tensor:
        """The textbook's loop, of the first columns, which stops at `10·ε‖B‖`."""
        A, G = precision.round(self.A), precision.round(self.G[:, :COLUMNS])
        S, B = A.T @ A, A.T @ G
        x, r = torch.zeros_like(B), B
        p, squared = r, B.square().sum(0)
        going, floor = squared > 0, (10 * precision.epsilon) ** 2 * squared
        for _ in range(iterations):
            image = precision.round(S) @ precision.round(p) + p / self.tau_theta
            curvature = (p * image).sum(0)
            length = torch.where(going & (curvature > 0), squared / curvature, 0.0)
            x, r = x + length * p, r - length * image
            before, squared = squared, r.square().sum(0)
            going = going & (squared > floor)
            p = r + torch.where(going, squared / before, 0.0) * p
        return x.double()

    def rounding(self, outputs: int, precision: Precision) -> Tensor:
        """Of `AᵀG`, however much of it cancels, for each output."""
        return precision.epsilon * float(self.svd[1][0]) * self.G[:, :outputs].double().norm(dim=0)

    @lru_cache  # noqa: B019 - as many as there are systems, which are kept too
    def allowed_error(self, iterations: int, outputs: int, precision: Precision) -> float:
        """The larger of what rounding explains and ten times what the textbook's loop is off by.

        Rounding makes conjugate gradients fall behind by a step here or there. In which step that shows is chance, so
        the textbook's loop is looked at a step earlier and later too.
        """
        textbooks = max(
            relative(self.textbook(k, precision)[:, :outputs], self.best(k)[:, :outputs])
            for k in (max(1, iterations - 1), iterations, iterations + 1)
        )
        rounded = (
            self.tau_theta
            * self.rounding(outputs, precision).norm()
            / self.best(iterations)[:, :outputs].norm()
        )
        return max(10 * textbooks, precision.close, 10 * self.amplification(precision), float(rounded))


@lru_cache
def system(regime: str, tau_theta: float, rows: int = 48, columns: int = 64, outputs: int = 32) -> System:
    """One of the regimes, made once."""
    return system_of(REGIMES[regime](rows, columns, Generator().manual_seed(0)), outputs, tau_theta)


def system_of(input: Tensor, outputs: int, tau_theta: float = 1.0) -> System:
    """With a random output gradient."""
    return System(input, torch.randn(len(input), outputs, generator=Generator().manual_seed(1)), tau_theta)


def layer_for(of: System, solver: Solver, space: str | None, outputs: int, device: str = "cpu") -> nn.Linear:
    """A linear layer that solves with these settings."""
    return proxprop.nn.Linear(
        of.input.shape[1], outputs, solver=solver, tau_theta=of.tau_theta, space=space, device=device
    )


def backward(layer: nn.Linear, of: System) -> Tensor:
    """Its direction, weight and bias as `[features, outputs]`, in float64."""
    device = layer.weight.device
    layer.zero_grad()
    layer(of.input.to(device)).backward(of.G[:, : layer.out_features].to(device))
    return torch.cat([layer.weight.grad.T, layer.bias.grad[None]]).double().cpu()


def direction(of: System, solver: Solver, space: str | None, outputs: int | None = None) -> Tensor:
    """Of a linear layer, with as many outputs as there are unless told."""
    return backward(layer_for(of, solver, space, outputs or of.G.shape[1]), of)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def assert_descends(D: Tensor, of: System, precision: Precision = FLOAT32, slack: float = 0.0) -> None:
    """Finite, downhill in every column, and no longer than the exact direction but by what rounding explains.

    That is rounding of `AᵀA`, in proportion to the direction, and of `AᵀG`, however much of it cancels.

    Args:
        D: `[features, outputs]`.
        of: what it was found for.
        precision: of products.
        slack: by how much of the rounding of `AᵀG` a direction may point uphill.
    """
    outputs = D.shape[1]
    lengths, exact = D.norm(dim=0), of.exact[:, :outputs].norm(dim=0)
    rounding = of.rounding(outputs, precision)
    assert bool(D.isfinite().all())
    slopes = (D * of.gradient[:, :outputs]).sum(0)
    assert bool((slopes + slack * rounding * lengths > 0).all())
    longest = (1.5 + 50 * of.amplification(precision)) * exact + of.tau_theta * rounding
    assert bool((lengths <= longest).all())


def assert_close(D: Tensor, of: System, iterations: int, precision: Precision = FLOAT32) -> None:
    """Near the best point of the Krylov space, in its first columns."""
    shown = min(COLUMNS, D.shape[1])
    error = relative(D[:, :shown], of.best(iterations)[:, :shown])
    assert error <= of.allowed_error(iterations, shown, precision), error


IMAGES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "equal": (44.0, lambda x: 1e6 * x[:1].expand_as(x)),
    "small": (170.0, lambda x: 1e-6 * x),
    "with a mean": (1e4, lambda x: 1 + 1e-3 * x),
}
"""A τ_θ, and what to make of normal images."""


def check_patches(solver: Solver, images: str, device: str) -> None:
    """A convolution in sample space: U is up to `τ_θ·G`, and its product with a large mean would be rounding alone."""
    generator = torch.Generator().manual_seed(0)
    tau_theta, make = IMAGES[images]
    x = make(torch.randn(8, 3, 3, 3, generator=generator))
    of = System(x.flatten(1), torch.randn(8, 16, generator=generator), tau_theta)
    layer = proxprop.nn.Conv2d(3, 16, 3, solver=solver, tau_theta=tau_theta, space="sample", device=device)
    layer(x.to(device)).backward(of.G[..., None, None].to(device))
    D = torch.cat([layer.weight.grad.flatten(1).T, layer.bias.grad[None]]).double().cpu()
    assert_descends(D, of)
    expected = of.best(solver.iterations) if isinstance(solver, proxprop.CG) else of.exact
    assert relative(D[:, : expected.shape[1]], expected) < 1e-4
