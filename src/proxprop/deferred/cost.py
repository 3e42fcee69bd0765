"""What a call costs in deferred mode: S is formed and solved with, wherever immediate mode would solve."""

from dataclasses import replace

from proxprop.deferred.equation import Equation
from proxprop.deferred.handle import Attachment
from proxprop.deferred.preconditioner import products_with_rows, rows_pay, rows_space
from proxprop.nn import ProximalLayer
from proxprop.solvers import DIAGONAL, FEATURE, Plan
from proxprop.transfer import LinearTransfer


def deferred_plan(plan: Plan, layer: ProximalLayer) -> Plan | None:
    """How a call of a converted layer is solved in deferred mode; None where the layer has no S.

    A step of one call is counted. With running averages it is one that updates and inverts them.

    Args:
        plan: how it is solved in immediate mode.
        layer: the layer, attached or not.
    """
    if plan.space == DIAGONAL:
        return plan
    if FEATURE not in plan.costs or not layer._parts():
        return None
    settings = layer._settings
    if _may_keep_rows(layer) and rows_pay(plan.sizes, settings):
        space = rows_space(settings.solver)
        cost = plan.costs[space]
        cost = replace(cost, flops=cost.flops + products_with_rows(plan.sizes, space))
        return replace(plan, space=space, costs={**plan.costs, space: cost}, pinned=settings.space == space)
    return replace(plan, space=FEATURE, pinned=settings.space == FEATURE)


def _may_keep_rows(layer: ProximalLayer) -> bool:
    """Whether rows may stand for S: those of a linear layer that shares no weight and has no running average."""
    attached = layer._attached
    if isinstance(attached, Attachment) and not any(system.alone for system in attached.systems.values()):
        return False
    layouts = (Equation.of("", layer, part).layout for part in layer._parts().values())
    return any(isinstance(layout, LinearTransfer) for layout in layouts)
