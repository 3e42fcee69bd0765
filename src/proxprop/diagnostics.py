"""Look at what solves did: residual, angle to the gradient, spectrum, plan. Costs nothing when nobody asks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from proxprop.backward import Observer
from proxprop.direction import Direction
from proxprop.nn import ProximalLayer
from proxprop.settings import Settings
from proxprop.solvers import CG, Plan
from proxprop.transfer import Transfer


class Report(NamedTuple):
    """What one solve did.

    Attributes:
        plan: the chosen space and why.
        iterations: conjugate-gradient steps taken; None for an exact solve.
        residual: `‖AᵀG − (λI + AᵀA)D‖ / ‖AᵀG‖` for each output `[groups, outputs]`; 0 where `AᵀG` is 0.
        cosine: cosine of the angle between D and the gradient `AᵀG`, all parameters of the layer together;
            NaN where either is 0.
        failed: whether a factorisation failed and a substitute was taken.
    """

    plan: Plan
    iterations: int | None
    residual: Tensor
    cosine: Tensor
    failed: bool

    @property
    def space(self) -> str:
        """The space the system was solved in."""
        return self.plan.space


@contextmanager
def observe(model: nn.Module) -> Iterator[dict[str, list[Report]]]:
    """Collect a report of every solve in backward passes of forward passes made inside the `with` block.

    Each report costs about one more forward and backward of its layer.

    Raises:
        ValueError: the model is attached, and so solves nothing inside backward.

    Yields:
        A dict from layer name to its reports, oldest first.

    Example:
        >>> import proxprop
        >>> model = proxprop.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), proxprop.Exact())
        >>> with observe(model) as reports:
        ...     model(torch.randn(16, 4)).square().sum().backward()
        >>> bool(reports["0"][0].residual.max() < 1e-3)
        True
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ProximalLayer)}
    if any(layer._attached is not None for layer in layers.values()):
        raise ValueError(
            "observe looks at solves inside backward: call .detach() on what proxprop.attach returned first"
        )
    reports: dict[str, list[Report]] = {name: [] for name in layers}
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer._watched(_collector(reports[name])))
        yield reports


def _collector(reports: list[Report]) -> Observer:
    """Turns each solve that it is shown into a report."""
    return lambda *solve: reports.append(report(*solve))


def report(transfer: Transfer, G: Tensor, direction: Direction, settings: Settings) -> Report:
    """Measure a direction against the system it should solve, through φ and φ* alone."""
    samples = transfer.sizes.samples
    B = transfer.to_features(transfer.gradient(G))
    D = transfer.to_features(direction.parameters)
    V = D / settings.factor(samples) if samples else D
    left_over = B - settings.damping(samples) * V - transfer.normal(V)
    size = B.norm(dim=-2)
    return Report(
        plan=direction.plan,
        iterations=settings.solver.iterations if isinstance(settings.solver, CG) else None,
        residual=torch.where(size == 0, 0.0, left_over.norm(dim=-2) / size),
        cosine=(B * D).sum() / (B.norm() * D.norm()),
        failed=direction.failed is not None and bool(direction.failed.any()),
    )


class Spectrum(NamedTuple):
    """Eigenvalues of `AᵀA`, smallest first, in float64."""

    eigenvalues: Tensor

    @property
    def largest(self) -> float:
        """The largest eigenvalue: explicit steps longer than 2 over it diverge on the layer's quadratic."""
        return float(self.eigenvalues[-1])

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue."""
        return float(self.eigenvalues[0])

    @property
    def condition_number(self) -> float:
        """Largest over smallest; infinite where the smallest is 0."""
        return self.largest / self.smallest if self.smallest > 0 else float("inf")


def spectrum(A: Tensor) -> Spectrum:
    """Eigenvalues and condition number of `AᵀA`, the Hessian of a layer's quadratic (the paper's Section 4.1).

    Args:
        A: rows `[samples, features]`.

    Returns:
        All `features` eigenvalues; with fewer samples than features, the others are exactly 0.

    Example:
        >>> spectrum(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).condition_number
        4.0
    """
    if A.dim() != 2:
        raise ValueError(f"A should be [samples, features] but has shape {list(A.shape)}")
    A = A.detach().to(torch.float64)
    samples, features = A.shape
    if samples < features:
        eigenvalues = torch.linalg.eigvalsh(A @ A.mT)
        eigenvalues = torch.cat([eigenvalues.new_zeros(features - samples), eigenvalues])
    else:
        eigenvalues = torch.linalg.eigvalsh(A.mT @ A)
    return Spectrum(eigenvalues.clamp(min=0))
