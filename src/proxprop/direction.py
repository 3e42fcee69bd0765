"""From a layer's call and its output gradient to its direction: plan, solve in the planned space, translate back."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from proxprop.device import is_transformed, precision
from proxprop.settings import Settings, Space
from proxprop.solvers import (
    DIAGONAL,
    FEATURE,
    SAMPLE,
    Plan,
    PreparedSolve,
    ProductSolve,
    choose_plan,
)
from proxprop.solvers.matmul import PendingProduct
from proxprop.solvers.plan import remembered_plan
from proxprop.solvers.rotation import always_rotates, mean_dominates
from proxprop.transfer import LinearTransfer, Parameters, Products, Transfer


class Direction(NamedTuple):
    """A solved direction and how it came about.

    Attributes:
        products: in the shapes of the layer's parameters; large products may still be pending.
        plan: what was planned.
        failed: as in `Solution`.
    """

    products: Products
    plan: Plan
    failed: Tensor | None

    @property
    def parameters(self) -> Parameters:
        """One tensor for each of the layer's parameters."""
        return tuple([p.multiply() if isinstance(p, PendingProduct) else p for p in self.products])

    def is_spoilt(self) -> bool:
        """Whether the solve failed, as far as that can be seen without waiting: on a CPU."""
        if self.failed is None or self.failed.device.type != "cpu" or is_transformed(self.failed):
            return False
        return any(self.failed.tolist())


def planned(transfer: Transfer, settings: Settings) -> Plan:
    """The plan for a call."""
    method = transfer.gram_method()
    costs = method.flops, method.price, transfer.own_price()
    pinned = settings.space if settings.space in transfer.spaces else None  # a bias alone has no sample space
    question = transfer.sizes, settings.solver, pinned, transfer.spaces, *costs
    return choose_plan(*question) if torch.compiler.is_compiling() else remembered_plan(*question)


def most_precise(transfer: Transfer, settings: Settings) -> Settings:
    """The settings under which rounding costs least: matrix-free if the solver can, else with the smaller of K and S.

    The larger of the two is singular but for λ.
    """
    _, samples, features, _ = transfer.sizes
    formed: tuple[Space, ...] = ("sample", "feature") if samples < features else ("feature", "sample")
    for space in ("matrix_free", *formed):
        if space in settings.solver.spaces and space in transfer.spaces:
            return replace(settings, space=space)
    return settings


def described(transfer: Transfer, settings: Settings, like: Tensor) -> Plan:
    """The plan for a call and its backend; `like` is a tensor of the call in the precision to solve in."""
    chosen = planned(transfer, settings)
    groups, samples, features, outputs = transfer.sizes
    size = samples if chosen.space == SAMPLE else features
    M = like.new_empty((), dtype=precision(like)).expand(groups, size, size)
    found = "closed form" if chosen.space == DIAGONAL else settings.solver.backend(chosen.space, M, outputs)
    if chosen.space == FEATURE:
        found += f", S by {transfer.gram_method().name}"
    return replace(chosen, backend=found)


@dataclass(frozen=True)
class PreparedSamples:
    """All of a solve in sample space that needs the layer's input alone.

    Attributes:
        transfer: the layer's call, which may keep its rotated rows.
        solve: from `G [groups, samples, outputs]` to U.
        rotated: whether U comes out rotated.
    """

    transfer: Transfer
    solve: PreparedSolve
    rotated: bool


def prepare(transfer: Transfer, settings: Settings, like: Tensor) -> PreparedSamples:
    """Form K and do everything that needs no G. Samples are rotated if their mean would cost K its digits.

    Args:
        transfer: the layer's call.
        settings: the user's choices.
        like: a tensor of the call, for its device.
    """
    _, samples, _, outputs = transfer.sizes
    rotated = always_rotates(samples, like)
    K = transfer.rotated_sample_gram() if rotated else transfer.sample_gram()
    if not rotated and mean_dominates(K):
        rotated, K = True, transfer.rotated_sample_gram()
    ready = settings.solver.prepared(SAMPLE, K, settings.damping(samples), outputs, rotated)
    return PreparedSamples(transfer, ready, rotated)


def solve(
    transfer: Transfer,
    G: Tensor,
    settings: Settings,
    prepared: PreparedSamples | None = None,
    unmultiplied: bool = False,
) -> Direction:
    """Solve one layer's system: `D = (λI + AᵀA)⁻¹AᵀG` in the planned space.

    Args:
        transfer: the layer's call.
        G: gradient of the loss at the layer's output, in the output's layout.
        settings: the user's choices.
        prepared: what was prepared for it, in sample space.
        unmultiplied: whether to leave a large last product for later.

    Returns:
        The direction, in the shapes of the layer's parameters.
    """
    _, samples, features, _ = transfer.sizes
    chosen = planned(transfer, settings)
    if samples == 0 or features == 0:
        return Direction(transfer.gradient(G), chosen, None)
    if chosen.space == DIAGONAL:
        damping, factor = settings.damping(samples), settings.factor(samples)
        return Direction(transfer.divide(G, damping, factor), chosen, None)
    found: Products
    if chosen.space == SAMPLE:
        prepared = prepared or prepare(transfer, settings, G)
        found, failed = _in_sample_space(transfer, G, settings, prepared, unmultiplied)
    elif chosen.space == FEATURE:
        found, failed = _in_feature_space(transfer, G, settings)
    else:
        found, failed = _matrix_free(transfer, G, settings)
    return Direction(found, chosen, failed)


def _in_sample_space(
    transfer: Transfer, G: Tensor, settings: Settings, prepared: PreparedSamples, unmultiplied: bool
) -> tuple[Products, Tensor | None]:
    """The direction `AᵀU`, and whether the solve failed."""
    G, factor, ready = transfer.to_samples(G), settings.factor(transfer.sizes.samples), prepared.solve
    if prepared.rotated:
        U, failed = ready(G).times(factor)
        rows = prepared.transfer
        return rows.rotated_products(U) if unmultiplied else rows.rotated_gradient(U), failed
    if isinstance(ready, ProductSolve) and isinstance(transfer, LinearTransfer) and transfer.is_narrow():
        right, failed = ready.right(G)
        return transfer.direction(ready.left if factor == 1.0 else ready.left * factor, right), failed
    U, failed = ready(G).times(factor)
    given = [transfer.from_samples(U)]
    del U  # `gradient` can then free it
    return transfer.gradient(given.pop()), failed


def _in_feature_space(transfer: Transfer, G: Tensor, settings: Settings) -> tuple[Parameters, Tensor | None]:
    """The direction D from S, and whether the solve failed."""
    _, samples, _, outputs = transfer.sizes
    S, B = transfer.normal_equations(G)
    ready = settings.solver.prepared(FEATURE, S, settings.damping(samples), outputs)
    del S  # free its memory before the solve
    V, failed = ready(B).times(settings.factor(samples))
    return transfer.from_features(V), failed


def _matrix_free(transfer: Transfer, G: Tensor, settings: Settings) -> tuple[Parameters, Tensor | None]:
    """The direction D from products with A and Aᵀ alone, and whether the solve failed."""
    samples, B = transfer.sizes.samples, transfer.to_features(transfer.gradient(G))
    found = settings.solver.matrix_free(transfer.normal, B, settings.damping(samples))
    V, failed = found.times(settings.factor(samples))
    return transfer.from_features(V), failed
