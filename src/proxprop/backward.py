"""The one autograd.Function: the layer's own forward, a solved backward."""

import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from proxprop import device, tuning
from proxprop.direction import Direction, planned, prepare, solve
from proxprop.settings import Settings
from proxprop.side_streams import Aside, Fork, join_last, wait
from proxprop.solvers import DIAGONAL, SAMPLE, Plan
from proxprop.transfer import Affine, LayerCall, Parameters, Shapes, Transfer

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
            self._warn_if(any(failed.tolist()))
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


def precision(*tensors: Tensor) -> torch.dtype:
    """The precision to solve in: float64 where anything is, else float32."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True)
class Task:
    """All that backward needs to know of a call, beside tensors."""

    call: LayerCall
    settings: Settings
    failures: Failures
    observer: Observer | None
    inputs: int
    summing: "Summing | None" = None
    """What S is added to, in deferred mode; None in immediate mode."""
    sampling: "Sampling | None" = None
    """Which rows S is estimated from, in deferred mode; None for all."""
    aside: Aside | None = None
    """The stream to solve on, beside the backward pass; None in line with it."""

    @property
    def sums(self) -> int:
        """How many leaves stand behind the parameters: for S, and perhaps for the number of samples."""
        return self.summing.count if self.summing is not None else 0

    def transfer(self, saved: Sequence[Tensor], output: Tensor, shapes: Shapes) -> tuple[Transfer, Tensor]:
        """The transfer of this call and `output` (or its gradient), in the precision to solve in.

        That is as it came where all is bfloat16 on a GPU and the transfer takes that.
        """
        dtypes = {output.dtype, *(tensor.dtype for tensor in saved)}
        if self.call.takes_bfloat16 and output.is_cuda and dtypes == {torch.bfloat16}:
            return self.call.transfer(saved, output, shapes), output
        dtype = precision(output, *saved)
        inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in saved]
        output = output.to(dtype)
        return self.call.transfer(inputs, output, shapes), output

    def plan(self, inputs: Sequence[Tensor], output: Tensor, parameters: Sequence[Tensor | None]) -> Plan:
        """What backward will do for this call."""
        shapes = [p.shape if p is not None and p.requires_grad else None for p in parameters]
        transfer, _ = self.transfer([tensor.detach() for tensor in inputs], output.detach(), shapes)
        return planned(transfer, self.settings)

    def direction(self, transfer: Transfer, G: Tensor) -> Parameters:
        """The solved direction; a failure is noted and an observer shown."""
        ready = self.aside.take() if self.aside is not None else None
        coarse = transfer.coarse and not torch.compiler.is_compiling()
        with device.coarse_numbers() if coarse else nullcontext():
            direction = solve(transfer, G, self.settings, ready)
        self.failures.note(direction.failed)
        if self.observer is not None:
            self.observer(transfer, G, direction, self.settings)
        return direction.parameters


class Summing(Protocol):
    """Leaves whose gradients are S and perhaps the number of samples."""

    @property
    def count(self) -> int:
        """How many there are."""

    def keep(self, transfer: Transfer, dtype: torch.dtype) -> bool:
        """Keep the call's rows, in their own precision, instead of adding its S; False where S is to be added."""

    def note_again(self) -> None:
        """A graph is gone through again: its gradient is added, its S was."""


@dataclass(frozen=True)
class Sampling:
    """Draws rows without replacement, the same ones for the same seed, and leaves torch's random state alone.

    Layers with as many samples share a draw: it takes longer than the product of the rows.

    Example:
        >>> Sampling(3, (0, 1)).draw(100, torch.device("cpu")).shape
        torch.Size([3])
    """

    rows: int
    seed: tuple[int, ...]

    def draw(self, samples: int, device: torch.device) -> Tensor:
        """Indices of rows."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return _drawn(self, samples, device, stream)


@lru_cache(maxsize=8)
def _drawn(
    sampling: Sampling, samples: int, device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """A draw that is ready on a stream."""
    number = zlib.crc32(repr(sampling.seed).encode())
    generator = torch.Generator(device).manual_seed(number)
    return torch.randperm(samples, generator=generator, device=device)[: sampling.rows]


def summand(transfer: Transfer, G: Tensor, sampling: Sampling | None = None) -> Tensor:
    """What a call adds to its layer's S, or to its diagonal where it is diagonal."""
    groups, samples, features, _ = transfer.sizes
    if DIAGONAL in transfer.spaces:
        return transfer.diagonal()
    if sampling is not None and isinstance(transfer, Affine) and samples > sampling.rows and not G.is_meta:
        return transfer.sampled_gram(sampling.draw(samples, G.device))
    return transfer.gram() if samples else G.new_zeros(groups, features, features, dtype=precision(G))


def summed_once(ctx: Any, saved: Sequence[Tensor], transfer: Transfer, G: Tensor) -> Sequence[Tensor | None]:
    """What a call adds to its leaves: S belongs to the forward pass, so that of a retained graph is added once."""
    task: Task = ctx.task
    if task.summing is None:
        return ()
    if ctx.summed:
        task.summing.note_again()
        return [None] * task.sums
    if not torch.compiler.is_compiling():
        # Whether this pass adds to the leaves; `torch.autograd.grad` does not.
        (leaf, _), *_ = ctx.next_functions[-task.sums :]
        ctx.summed = torch._C._will_engine_execute_node(leaf)
        if not ctx.summed and device.is_captured(G):
            refuse_gradients_alone(ctx)
        if ctx.summed and task.summing.keep(transfer, saved[0].dtype):
            return [None] * task.sums
    S = summand(transfer, G, task.sampling)
    return (S,) if task.sums == 1 else (S, S.new_full((), transfer.sizes.samples))


def refuse_gradients_alone(ctx: Any) -> None:
    """Raise RuntimeError if a CUDA graph is being made of gradients that no S will ever be summed for."""
    own = [node for node, _ in ctx.next_functions[1 : -ctx.task.sums] if node is not None]
    if any(torch._C._will_engine_execute_node(node) for node in own):
        raise RuntimeError(
            f"{ctx.task.failures.layer}: in deferred mode a step needs S beside the gradient, but a CUDA graph is "
            "captured of torch.autograd.grad, as torch.cuda.make_graphed_callables does, which asks for gradients "
            "alone. Capture the whole step with torch.cuda.graph, or use it in immediate mode, without proxprop.attach"
        )


class Proximal(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands the parameters their direction.

    The output was computed by torch's own forward from detached parameters, so its value and the gradient to
    the layer's input are torch's own. Here G passes through untouched, and the parameters receive D. In deferred
    mode they receive the gradient, and S is handed to a leaf as *its* gradient: autograd itself then sums S, over
    just the calls and backward passes whose gradients it sums.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, task: Task, *tensors: Tensor | None) -> Tensor:
        """Save the layer's inputs, as BackProp does, and the parameters' shapes.

        With a `setup_context` of its own, torch would look up and bind this signature in every call.

        Returns:
            The output, detached so that an in-place activation may follow.
        """
        ctx.task, ctx.summed = task, False
        ctx.save_for_backward(*tensors[: task.inputs])
        parameters = tensors[task.inputs : len(tensors) - task.sums]
        ctx.parameters = [(p.shape, p.dtype) if p is not None else None for p in parameters]
        ctx.output = output.shape, output.dtype
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """Return G for the output, D (or the gradient) for the parameters, and what is summed."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{ctx.task.failures.layer}: a proximal direction can't be differentiated again, but "
                "create_graph=True asks for it. Use proxprop.revert(model) for gradient penalties and Hessians"
            )
        task: Task = ctx.task
        with torch.no_grad(), no_autocast(G.device.type):
            saved = ctx.saved_tensors
            if task.aside is not None:
                task.aside.held.extend((G, *saved))
            transfer, precise = task.transfer(saved, G, trained_shapes(ctx))
            found = transfer.gradient(precise) if task.sums else task.direction(transfer, precise)
            D = [d.to(p[1]) if d is not None else None for d, p in zip(found, ctx.parameters, strict=True)]
            sums = summed_once(ctx, saved, transfer, precise)
        return (G, None, *[None] * task.inputs, *D, *sums)


def trained_shapes(ctx: Any) -> Shapes:
    """The shapes of a node's parameters, None for one that this backward pass gives nothing to."""
    trained = ctx.needs_input_grad[2 + ctx.task.inputs :][: len(ctx.parameters)]
    return [p[0] if t else None for p, t in zip(ctx.parameters, trained, strict=True)]


def prepare_aside(ctx: Any) -> None:
    """Prepare the solve of a node that is still to be run, on its stream, if that is in sample space.

    In feature space S is a product over many samples, which would stand in the way of the first of the backward pass.
    """
    task, saved, (shape, dtype) = ctx.task, ctx.saved_tensors, ctx.output
    device = saved[0].device
    with torch.no_grad(), no_autocast(device.type), task.aside.after_this(device):
        output = torch.empty((), dtype=dtype, device=device).expand(shape)
        transfer, _ = task.transfer(saved, output, trained_shapes(ctx))
        if transfer.sizes.features and planned(transfer, task.settings).space == SAMPLE:
            task.aside.ready = prepare(transfer, task.settings)


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


def no_autocast(device: str) -> Any:
    """Autocast off, where it is on; the meta device has none."""
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def attach_direction(
    output: Tensor,
    task: Task,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    sums: Sequence[Tensor] = (),
) -> Tensor:
    """Return `output` such that its backward gives the parameters their proximal direction.

    Args:
        output: the layer's output, computed from detached parameters.
        task: how to solve.
        inputs: the tensors the layer was called with, as its kernels saw them.
        parameters: the layer's parameters, None for one it does not have.
        sums: in deferred mode, the leaves that S and the number of samples are added to.
    """
    saved = [t.detach() for t in inputs]
    if task.aside is None:
        result: Tensor = Proximal.apply(output, task, *saved, *parameters, *sums)
        return result
    join_last(parameters, task.aside)
    with task.aside.on(output.device):
        token = Proximal.apply(output.detach(), task, *saved, *parameters)
    if 0 < output.numel() <= tuning.PREPARED_MOST_ROWS * output.shape[-1]:  # they are all held at once
        wait(token.grad_fn, prepare_aside)
    forked: Tensor = Fork.apply(output, token)
    return forked
