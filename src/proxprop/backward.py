"""The autograd.Function of immediate mode: the layer's own forward, a solved backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.direction import Direction, described, most_precise, planned, prepare, solve
from proxprop.failures import FailureWarner
from proxprop.replay import Outcome, replays
from proxprop.settings import Settings
from proxprop.side_streams import SideSolve
from proxprop.solvers import SAMPLE, Plan
from proxprop.solvers.matmul import cast
from proxprop.torch_internals import in_transform
from proxprop.transfer import LayerCall, Parameters, Shapes, Transfer
from proxprop.transfer.call import in_precision

Observer = Callable[[Transfer, Tensor, Direction, Settings], None]
"""A callback for each solve, given the transfer, the output gradient G, the direction and the settings."""


@dataclass
class Task:
    """What the backward of one call needs to know, beside tensors.

    Attributes:
        call: how the layer was called.
        settings: how it is solved.
        layer: how messages call the layer.
        failures: warns of solves that failed.
        observer: called with each solve; None for nobody.
        inputs: number of saved tensors, which come before the parameters.
        side: where to solve beside the backward pass; None solves in line with it.
    """

    call: LayerCall
    settings: Settings
    layer: str
    failures: FailureWarner
    observer: Observer | None
    inputs: int
    side: SideSolve | None = None

    def transfer(self, saved: Sequence[Tensor], output: Tensor, shapes: Shapes) -> tuple[Transfer, Tensor]:
        """The transfer of this call and `output` (or its gradient), in the precision to solve in."""
        dtype = device.precision(output, *saved)
        output, *inputs = self.call.in_precision([output, *saved], dtype)
        return self.call.transfer(inputs, output, shapes), output

    def plan(self, inputs: Sequence[Tensor], output: Tensor, parameters: Sequence[Tensor | None]) -> Plan:
        """The plan that backward will follow for this call."""
        shapes = [p.shape if p is not None and p.requires_grad else None for p in parameters]
        transfer, like = self.transfer([tensor.detach() for tensor in inputs], output.detach(), shapes)
        return described(transfer, self.settings, like)

    def direction(self, saved: Sequence[Tensor], G: Tensor, shapes: Shapes) -> Parameters:
        """The solved direction. Warns of a failure and calls the observer."""
        found = self._replayed(saved, G, shapes)
        if found is None:
            transfer, G = self.transfer(saved, G, shapes)
            direction = self._solve(transfer, G)
            if direction.is_spoilt():
                direction = self._solve_again(saved, G, shapes, direction)
            if self.observer is not None:
                self.observer(transfer, G, direction, self.settings)
            found = direction.parameters, direction.failed
        parameters, failed = found
        self.failures.note(self.layer, failed, self.settings.solver.failure)
        return parameters

    def _solve(self, transfer: Transfer, G: Tensor, unmultiplied: bool = False) -> Direction:
        ready = self.side.take() if self.side is not None else None
        coarse = transfer.coarse and not torch.compiler.is_compiling()
        with device.coarse_numbers() if coarse else nullcontext():
            return solve(transfer, G, self.settings, ready, unmultiplied)

    def _solve_again(
        self, saved: Sequence[Tensor], G: Tensor, shapes: Shapes, spoilt: Direction
    ) -> Direction:
        """Solve in float64, and in the space where rounding costs least, what rounding spoilt; D in G's precision.

        That can take several times as long, so it is for what is rare, and not for a GPU, which would have to wait.
        """
        transfer = self.call.transfer(in_precision(saved, torch.float64), G.double(), shapes)
        settings = most_precise(transfer, self.settings)
        if G.dtype == torch.float64 and settings.space == spoilt.plan.space:
            return spoilt
        found = solve(transfer, G.double(), settings)
        products = tuple(cast(d, G.dtype) if d is not None else None for d in found.parameters)
        return Direction(products, spoilt.plan, found.failed)

    def _replayed(
        self, saved: Sequence[Tensor], G: Tensor, shapes: Shapes
    ) -> tuple[Parameters, Tensor | None] | None:
        """The direction by a CUDA graph, and whether it failed; None if the solve is not replayed."""
        found = replays(G)
        if found is None or self.observer is not None:
            return None
        if not (self.call.kind.capturable and self.settings.solver.capturable):
            return None

        def solved(given: Sequence[Tensor]) -> Outcome:
            direction = self._solve(*self.transfer(given[:-1], given[-1], shapes), unmultiplied=True)
            return direction.products, direction.failed

        return found.solve((self.call, self.settings, *shapes), solved, [*saved, G])


class Proximal(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands the parameters their direction.

    The output was computed by torch's own forward from detached parameters, so its value and the gradient to
    the layer's input are torch's own. Here G passes through untouched, and the parameters receive D.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, task: Task, *tensors: Tensor | None) -> Tensor:
        """Save the layer's inputs, as BackProp does, and shapes and precisions of its parameters and its output.

        With a `setup_context` of its own, torch would look up and bind this signature in every call.

        Returns:
            The output, detached so that an in-place activation may follow.
        """
        ctx.task, ctx.output = task, (output.shape, output.dtype)
        ctx.save_for_backward(*tensors[: task.inputs])
        parameters = tensors[task.inputs :]
        ctx.parameters = [(p.shape, p.dtype) if p is not None else None for p in parameters]
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """Return G for the output and D for the parameters."""
        task: Task = ctx.task
        refuse_second_derivative(task.layer)
        with device.no_autocast(G.device.type):
            saved = ctx.saved_tensors
            if task.side is not None:
                task.side.hold(G, *saved)
            found = task.direction(saved, G, trained_shapes(ctx))
        D = [cast(d, p[1]) if d is not None else None for d, p in zip(found, ctx.parameters, strict=True)]
        return (G, None, *[None] * task.inputs, *D)


def trained_shapes(ctx: Any) -> Shapes:
    """The shapes of a node's parameters; None for one that gets no gradient in this backward pass."""
    trained = ctx.needs_input_grad[2 + ctx.task.inputs :]
    return [p[0] if t else None for p, t in zip(ctx.parameters, trained, strict=True)]


def prepare_early(ctx: Any) -> None:
    """Prepare the solve of a node that has not run yet, on its stream, if it is in sample space.

    In feature space S is a product over many samples, which would delay the start of the backward pass.
    """
    task, saved, (shape, dtype) = ctx.task, ctx.saved_tensors, ctx.output
    where = saved[0].device
    with torch.no_grad(), device.no_autocast(where.type), task.side.after_current():
        output = torch.empty((), dtype=dtype, device=where).expand(shape)
        transfer, _ = task.transfer(saved, output, trained_shapes(ctx))
        if transfer.sizes.features and planned(transfer, task.settings).space == SAMPLE:
            task.side.keep(prepare(transfer, task.settings, output))


def attach_direction(
    output: Tensor, task: Task, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None]
) -> Tensor:
    """Return `output` such that its backward gives the parameters their proximal direction.

    Args:
        output: the layer's output, computed from detached parameters.
        task: how to solve.
        inputs: the tensors the layer was called with, as its products saw them.
        parameters: the layer's parameters, None for one it does not have.
    """
    saved, side = [t.detach() for t in inputs], task.side
    if side is None:
        result: Tensor = Proximal.apply(output, task, *saved, *parameters)
        return result
    side.join_last(parameters)
    with side.stream():
        token = Proximal.apply(output.detach(), task, *saved, *parameters)
    if 0 < output.numel() <= tuning.PREPARED_MOST_ROWS * output.shape[-1]:  # they are all held at once
        side.expect(token.grad_fn, prepare_early)
    return side.fork(output, token)


def refuse_second_derivative(layer: str) -> None:
    """Raise RuntimeError if backward is to be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{layer}: a proximal direction can't be differentiated again, but "
            "create_graph=True asks for it. Use proxprop.revert(model) for gradient penalties and Hessians"
        )


def refuse_transforms(layer: str) -> None:
    """Raise RuntimeError inside torch.func's transforms and forward-mode differentiation."""
    if not torch.compiler.is_compiling() and in_transform():
        raise RuntimeError(
            f"{layer}: a direction belongs to a whole batch and is not a derivative, so a proximal "
            "layer that trains refuses torch.func's grad, vjp and jvp, vmap and forward-mode differentiation. Use "
            "proxprop.revert(model), or torch.no_grad() where no direction is wanted; torch.autograd.grad with "
            "torch.func.functional_call works"
        )
