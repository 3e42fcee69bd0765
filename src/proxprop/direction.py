"""From a layer's call and its output gradient to its direction: plan, solve in the planned space, translate back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proxprop.settings import Settings
from proxprop.solvers import DIAGONAL, FEATURE, SAMPLE, Plan, PreparedSolve, ProductSolve, plan
from proxprop.solvers.plan import remembered_plan
from proxprop.transfer import LinearTransfer, Parameters, Transfer


@dataclass(frozen=True)
class Direction:
    """A solved direction and how it came about."""

    parameters: Parameters
    plan: Plan
    failed: Tensor | None


def planned(transfer: Transfer, settings: Settings) -> Plan:
    """The plan for a call."""
    costs = transfer.gram_flops(), transfer.gram_price(), transfer.own_price()
    question = transfer.sizes, settings.solver, settings.space, transfer.spaces, *costs
    return plan(*question) if torch.compiler.is_compiling() else remembered_plan(*question)


def prepare(transfer: Transfer, settings: Settings) -> PreparedSolve:
    """Do all of a solve in sample space that needs the layer's input alone."""
    samples, outputs = transfer.sizes.samples, transfer.sizes.outputs
    return settings.solver.prepared(SAMPLE, transfer.sample_gram(), settings.damping(samples), outputs)


def solve(transfer: Transfer, G: Tensor, settings: Settings, ready: PreparedSolve | None = None) -> Direction:
    """Solve one layer's system: `D = (λI + AᵀA)⁻¹AᵀG` in the planned space.

    Args:
        transfer: the layer's call.
        G: gradient of the loss at the layer's output, in the output's layout.
        settings: the user's choices.
        ready: what was prepared for it, in sample space.

    Returns:
        The direction, in the shapes of the layer's parameters.
    """
    _, samples, features, outputs = transfer.sizes
    chosen = planned(transfer, settings)
    damping, factor = settings.damping(samples), settings.factor(samples)
    if samples == 0 or features == 0:
        return Direction(transfer.gradient(G), chosen, None)
    if chosen.space == DIAGONAL:
        return Direction(transfer.divide(G, damping, factor), chosen, None)
    if chosen.space == SAMPLE:
        ready = ready or prepare(transfer, settings)
        if isinstance(ready, ProductSolve) and isinstance(transfer, LinearTransfer) and transfer.is_narrow():
            left = ready.left if factor == 1.0 else ready.left * factor
            parameters = transfer.direction(left, ready.right(transfer.to_samples(G)))
            return Direction(parameters, chosen, ready.failed)
        U, failed = ready(transfer.to_samples(G)).times(factor)
        given = [transfer.from_samples(U)]
        del U  # so that what it is given to can free it
        return Direction(transfer.gradient(given.pop()), chosen, failed)
    if chosen.space == FEATURE:
        S, gradient = transfer.normal_equations(G)
        ready, B = settings.solver.prepared(FEATURE, S, damping, outputs), transfer.to_features(gradient)
        del S, gradient  # what is not needed any more need not outlive this
        found = ready(B)
    else:
        B = transfer.to_features(transfer.gradient(G))
        found = settings.solver.matrix_free(transfer.normal, B, damping)
    V, failed = found.times(factor)
    return Direction(transfer.from_features(V), chosen, failed)
