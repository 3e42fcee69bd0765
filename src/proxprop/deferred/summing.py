"""The autograd.Function of deferred mode: the parameters receive their gradient, and S is summed beside it.

S is handed to a leaf as *its* gradient: autograd itself then sums S, over just the calls and backward passes whose
gradients it sums.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from proxprop import device
from proxprop.backward import (
    Task,
    in_own_precision,
    no_autocast,
    precision,
    refuse_second_derivative,
    save,
    trained_shapes,
)
from proxprop.deferred.system import System
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import is_due
from proxprop.transfer import Affine, Transfer


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


@dataclass(frozen=True)
class Summation:
    """Where S of a call is added, and from which rows it is estimated.

    Attributes:
        task: the call.
        system: whose leaves stand behind the parameters.
        sampling: None for all rows.
    """

    task: Task
    system: System
    sampling: Sampling | None

    def summand(self, transfer: Transfer, G: Tensor) -> Tensor:
        """What the call adds to S, or to its diagonal where it is diagonal."""
        groups, samples, features, _ = transfer.sizes
        if DIAGONAL in transfer.spaces:
            return transfer.diagonal()
        rows = samples if self.sampling is None else self.sampling.rows
        if self.sampling is not None and isinstance(transfer, Affine) and samples > rows and not G.is_meta:
            return transfer.sampled_gram(self.sampling.draw(samples, G.device))
        return transfer.gram() if samples else G.new_zeros(groups, features, features, dtype=precision(G))


class Summed(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands parameters their gradient and leaves what they sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, summation: Summation, *tensors: Tensor | None) -> Tensor:
        """Save what `Proximal` saves; the leaves come behind the parameters."""
        save(ctx, output, summation.task, tensors)
        ctx.summation, ctx.summed = summation, False
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """Return G for the output, the gradient for the parameters, and what is summed."""
        task: Task = ctx.task
        refuse_second_derivative(task.layer)
        with torch.no_grad(), no_autocast(G.device.type):
            saved = ctx.saved_tensors
            transfer, precise = task.transfer(saved, G, trained_shapes(ctx))
            gradient = in_own_precision(ctx, transfer.gradient(precise))
            sums = _summed_once(ctx, transfer, precise, saved[0].dtype)
        return (G, None, *[None] * task.inputs, *gradient, *sums)


def attach_sum(
    output: Tensor, summation: Summation, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None]
) -> Tensor:
    """Return `output` such that its backward gives the parameters their gradient, and adds to S."""
    leaves = summation.system.leaves(output.device, precision(output, *inputs))
    result: Tensor = Summed.apply(output, summation, *(t.detach() for t in inputs), *parameters, *leaves)
    return result


def _summed_once(ctx: Any, transfer: Transfer, G: Tensor, dtype: torch.dtype) -> Sequence[Tensor | None]:
    """What a call adds to its leaves: S belongs to the forward pass, so that of a retained graph is added once.

    Args:
        ctx: the node.
        transfer: its call.
        G: the output gradient.
        dtype: the precision that the input came in, in which its rows are kept.
    """
    summation: Summation = ctx.summation
    system, count = summation.system, summation.system.count
    if ctx.summed:
        system.note_again()
        return [None] * count
    if not torch.compiler.is_compiling():
        # Whether this pass adds to the leaves; `torch.autograd.grad` does not.
        (leaf, _), *_ = ctx.next_functions[-count:]
        ctx.summed = is_due(leaf)
        if not ctx.summed and device.is_captured(G):
            _refuse_gradients_alone(ctx, count)
        if ctx.summed and system.keep(transfer, dtype):
            return [None] * count
    S = summation.summand(transfer, G)
    return (S,) if count == 1 else (S, S.new_full((), transfer.sizes.samples))


def _refuse_gradients_alone(ctx: Any, leaves: int) -> None:
    """Raise RuntimeError if a CUDA graph is being made of gradients that no S will ever be summed for."""
    own = [node for node, _ in ctx.next_functions[1:-leaves] if node is not None]
    if any(is_due(node) for node in own):
        raise RuntimeError(
            f"{ctx.task.layer}: in deferred mode a step needs S beside the gradient, but a CUDA graph is "
            "captured of torch.autograd.grad, as torch.cuda.make_graphed_callables does, which asks for gradients "
            "alone. Capture the whole step with torch.cuda.graph, or use it in immediate mode, without proxprop.attach"
        )
