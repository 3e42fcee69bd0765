"""The one autograd.Function: the layer's own forward, a solved backward."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from proxprop.settings import Settings
from proxprop.solve import DIAGONAL, FEATURE, SAMPLE, Plan, plan
from proxprop.transfer import Parameters, Transfer

Shapes = Sequence[torch.Size | None]


class Build(Protocol):
    """Makes the transfer of one call."""

    def __call__(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> Transfer:
        """Return the transfer.

        Args:
            inputs: the tensors that were saved, floating ones in the precision to solve in.
            like: a tensor of the output's shape in that precision.
            shapes: the parameters' shapes, None for one that is not trained.
        """


@dataclass(frozen=True)
class Direction:
    """A solved direction and how it came about."""

    parameters: Parameters
    plan: Plan
    failed: Tensor | None


Observer = Callable[[Transfer, Tensor, Direction, Settings], None]
"""Is shown each solve: the transfer, the output gradient G, the direction, the settings."""


@dataclass
class Failures:
    """Warns once for a layer whose factorisation failed, without making a GPU wait.

    On a GPU the flag is copied to the host in the background and looked at in a later call.
    """

    layer: str
    warned: bool = False
    pending: tuple[Tensor, torch.cuda.Event] | None = field(default=None, compare=False, repr=False)

    def note(self, failed: Tensor | None) -> None:
        """Look at the outcome of one solve."""
        if failed is None or self.warned or failed.is_meta or torch.compiler.is_compiling():
            return
        if failed.device.type != "cuda":
            self._warn_if(bool(failed.any()))
        elif not torch.cuda.is_current_stream_capturing():
            self._look_later(failed.any())

    def _look_later(self, flag: Tensor) -> None:
        if self.pending is not None:
            arrived, event = self.pending
            if not event.query():
                return
            self._warn_if(bool(arrived))
        event = torch.cuda.Event()
        self.pending = flag.to("cpu", non_blocking=True), event
        event.record()

    def _warn_if(self, failed: bool) -> None:
        if not failed:
            return
        self.warned = True
        warnings.warn(
            f"{self.layer}: I/τ_θ + AᵀA is not positive definite in this precision, so the step was replaced "
            "by a scaled gradient. Likely causes: tau_theta is too large for float32, inputs of very large or "
            "very different scale, or many repeated inputs. Try a smaller tau_theta, CG(iterations), "
            "normalised inputs or float64. This layer will not warn again.",
            RuntimeWarning,
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer, "warned": self.warned, "pending": None}


def planned(transfer: Transfer, settings: Settings) -> Plan:
    """The plan for a call."""
    costs = transfer.gram_flops(), transfer.gram_price(), transfer.own_price()
    return plan(transfer.sizes, settings.solver, settings.space, transfer.spaces, *costs)


@dataclass(frozen=True)
class Call:
    """All that backward needs to know of a call, beside tensors."""

    build: Build
    settings: Settings
    failures: Failures
    observer: Observer | None
    inputs: int
    bfloat16: bool = False  # whether the transfer takes bfloat16 tensors as they are

    def transfer(self, saved: Sequence[Tensor], output: Tensor, shapes: Shapes) -> tuple[Transfer, Tensor]:
        """The transfer of this call and `output` (or its gradient).

        In float64 where anything is, else float32, unless all is bfloat16 on a GPU and the transfer takes that.
        """
        if self.bfloat16 and output.is_cuda and {output.dtype, *(t.dtype for t in saved)} == {torch.bfloat16}:
            return self.build(saved, output, shapes), output
        wide = any(tensor.dtype == torch.float64 for tensor in (output, *saved))
        dtype = torch.float64 if wide else torch.float32
        inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in saved]
        output = output.to(dtype)
        return self.build(inputs, output, shapes), output

    def plan(self, inputs: Sequence[Tensor], output: Tensor, parameters: Sequence[Tensor | None]) -> Plan:
        """What backward will do for this call."""
        shapes = [p.shape if p is not None and p.requires_grad else None for p in parameters]
        transfer, _ = self.transfer([tensor.detach() for tensor in inputs], output.detach(), shapes)
        return planned(transfer, self.settings)


def solve(transfer: Transfer, G: Tensor, settings: Settings) -> Direction:
    """Solve one layer's system: `D = (λI + AᵀA)⁻¹AᵀG` in the planned space.

    Args:
        transfer: the layer's call.
        G: gradient of the loss at the layer's output, in the output's layout.
        settings: the user's choices.

    Returns:
        The direction, in the shapes of the layer's parameters.
    """
    samples = transfer.sizes.samples
    chosen = planned(transfer, settings)
    damping, factor = settings.damping(samples), settings.factor(samples)
    solver = settings.solver
    if samples == 0 or transfer.sizes.features == 0:
        return Direction(transfer.gradient(G), chosen, None)
    if chosen.space == DIAGONAL:
        return Direction(transfer.divide(G, damping, factor), chosen, None)
    if chosen.space == SAMPLE:
        U, failed = solver.samples(transfer.kernel(), transfer.to_samples(G), damping)
        return Direction(transfer.gradient(transfer.from_samples(_times(U, factor))), chosen, failed)
    B = transfer.to_features(transfer.gradient(G))
    if chosen.space == FEATURE:
        V, failed = solver.features(transfer.gram(), B, damping)
    else:
        V, failed = solver.matrix_free(transfer.normal, B, damping)
    return Direction(transfer.from_features(_times(V, factor)), chosen, failed)


def _times(solution: Tensor, factor: float) -> Tensor:
    """The solution scaled in place; untouched in the paper's scaling."""
    return solution if factor == 1.0 else solution.mul_(factor)


class Proximal(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands the parameters their direction.

    The output was computed by torch's own forward from detached parameters, so its value and the gradient to
    the layer's input are torch's own. Here G passes through untouched, and the parameters receive D.
    """

    @staticmethod
    def forward(output: Tensor, call: Call, *tensors: Tensor | None) -> Tensor:
        """Return the output, detached so that an in-place activation may follow."""
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the layer's inputs, as BackProp does, and the parameters' shapes."""
        _, call, *tensors = inputs
        ctx.call = call
        ctx.save_for_backward(*tensors[: call.inputs])
        ctx.parameters = tuple((p.shape, p.dtype) if p is not None else None for p in tensors[call.inputs :])

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """Return G for the output and D for the parameters."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{ctx.call.failures.layer}: a proximal direction can't be differentiated again, but "
                "create_graph=True asks for it. Use proxprop.revert(model) for gradient penalties and Hessians"
            )
        call: Call = ctx.call
        trained = ctx.needs_input_grad[2 + call.inputs :]
        with torch.no_grad(), _no_autocast(G.device.type):
            shapes = [p[0] if t else None for p, t in zip(ctx.parameters, trained, strict=True)]
            transfer, precise = call.transfer(ctx.saved_tensors, G, shapes)
            direction = solve(transfer, precise, call.settings)
            call.failures.note(direction.failed)
            if call.observer is not None:
                call.observer(transfer, precise, direction, call.settings)
            D = [
                d.to(p[1]) if d is not None else None
                for d, p in zip(direction.parameters, ctx.parameters, strict=True)
            ]
        return (G, None, *[None] * call.inputs, *D)


def refuse_transforms(layer: str) -> None:
    """Raise RuntimeError inside torch.func's transforms and forward-mode differentiation."""
    if not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        raise RuntimeError(
            f"{layer}: a direction belongs to a whole batch and is not a derivative, so a proximal "
            "layer that trains refuses torch.func's grad, vjp and jvp, vmap and forward-mode differentiation. Use "
            "proxprop.revert(model), or torch.no_grad() where no direction is wanted; torch.autograd.grad with "
            "torch.func.functional_call works"
        )


def _no_autocast(device: str) -> Any:
    """Autocast off; the meta device has none."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def attach_direction(
    output: Tensor, call: Call, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None]
) -> Tensor:
    """Return `output` such that its backward gives the parameters their proximal direction.

    Args:
        output: the layer's output, computed from detached parameters.
        call: how to solve.
        inputs: the tensors the layer was called with, as its kernels saw them.
        parameters: the layer's parameters, None for one it does not have.
    """
    result: Tensor = Proximal.apply(output, call, *[t.detach() for t in inputs], *parameters)
    return result
