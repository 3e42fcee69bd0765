"""Look at what solves did: residual, angle to the gradient, spectrum, plan. Costs nothing when nobody asks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from proxprop.backward import Observer
from proxprop.deferred import Attached
from proxprop.deferred.equation import BlockLayout, Term
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
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = proxprop.convert(model, proxprop.Exact())
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
        """The largest eigenvalue. Explicit steps longer than 2 over it diverge on the layer's quadratic."""
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


Source = Mapping[str, Sequence[Report]] | Attached
"""What `scalars` takes: the reports of `observe`, or what `attach` and `wrap` return."""


@overload
def scalars(source: Source, *, prefix: str = ..., wait: Literal[True] = ...) -> dict[str, float]: ...
@overload
def scalars(source: Source, *, prefix: str = ..., wait: Literal[False]) -> dict[str, Tensor]: ...
def scalars(
    source: Source, *, prefix: str = "proxprop", wait: bool = True
) -> dict[str, float] | dict[str, Tensor]:
    """Numbers to plot in TensorBoard, Weights & Biases and others: a dict with keys `prefix/layer/quantity`.

    Of the reports of `observe`, over all solves of a layer: the mean `angle` between direction and gradient in degrees,
    the largest relative `residual`, and the share of solves that `failed`.

    Of an attached model, for each running average C of a layer's inputs: c, its `mean_square` over features; the
    `damping` ρc that is added to it; and its `spread`, the root mean square of C's eigenvalues over their mean. A
    spread of 1 means white inputs, where a proximal step has nothing to gain; the largest possible is the root of the
    number of features. Before the first step there are no averages. Each of several ranks reports the layers it owns.

    Args:
        source: the reports, or the handle.
        prefix: the first part of the names.
        wait: return floats, all read from the device at once. False returns tensors without dimensions and waits for
            nothing.

    Raises:
        TypeError: the source is neither.
        ValueError: the handle keeps no running averages.

    Example:
        >>> import proxprop
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> attached = proxprop.wrap(optimizer, model)
        >>> model(torch.ones(16, 4)).sum().backward()
        >>> optimizer.step()
        >>> {name: round(value, 3) for name, value in scalars(attached).items()}
        {'proxprop/0/mean_square': 1.0, 'proxprop/0/damping': 0.3, 'proxprop/0/spread': 2.236}
    """
    if isinstance(source, Attached):
        found = _averaged(source)
    elif isinstance(source, Mapping):
        found = {name: _reported(reports) for name, reports in source.items() if reports}
    else:
        raise TypeError(
            "scalars should be given the reports of observe or what attach returned but was given "
            f"{type(source).__name__}"
        )
    named = {f"{prefix}/{layer}/{name}": v for layer, values in found.items() for name, v in values.items()}
    if not wait or not named:
        return named
    device = next(iter(named.values())).device
    read: list[float] = torch.stack([value.to(device, torch.float64) for value in named.values()]).tolist()
    return dict(zip(named, read, strict=True))


def _reported(reports: Sequence[Report]) -> dict[str, Tensor]:
    cosines = torch.stack([report.cosine for report in reports])
    return {
        "angle": cosines.clamp(-1, 1).acos().rad2deg().mean(),
        "residual": torch.stack([report.residual.max() for report in reports]).max(),
        "failed": torch.tensor([float(report.failed) for report in reports]).mean(),
    }


def _averaged(attached: Attached) -> dict[str, dict[str, Tensor]]:
    averages = attached.averages
    if averages is None:
        raise ValueError(
            "the handle keeps no running averages to tell of: attach with running=proxprop.Running(...), or "
            "observe a model that is not attached"
        )
    damping = averages.running.damping
    return {
        equation.name: _moments(average, damping)
        for equation, average in averages.averages.items()
        if not average.S.is_meta
    }


def _moments(average: Term, damping: float | None) -> dict[str, Tensor]:
    layout, samples = average.equation.layout, average.samples
    assert samples is not None
    whole = layout.whole if isinstance(layout, BlockLayout) else layout
    C = average.S / samples.clamp(min=1e-30)
    diagonal = C if C.dim() == 2 else C.diagonal(dim1=-2, dim2=-1)
    features = whole.sizes.groups * whole.sizes.features
    mean = diagonal.sum() / features
    added = {"damping": damping * mean} if damping is not None else {}
    return {"mean_square": mean, **added, "spread": C.norm() / (mean * features**0.5)}
