"""Solve beside the backward pass, on CUDA streams of their own.

A solve is a chain of kernels, many of them small, that leaves much of a GPU idle, and nothing but the optimizer waits
for a direction. So backward forks: G goes on to the layer's input, and to a node that belongs to another stream and
solves there, several layers at a time. The direction joins again in nodes that autograd runs after all others.

    output ── Fork ──┬── the layer's own nodes ── input        the stream of the forward pass
                     └── Proximal                              a stream of its own
                             └── handle ── parameter           the stream of the forward pass, last

K and its factor do not wait for G: the first Fork that runs has all small ones of its backward pass prepared.

All this is for steps that are captured in a CUDA graph. An eager step with layers this small waits for the host, to
which forks and streams are more work.

Autograd itself orders all this, by the rule that it documents: a node runs on the stream that was current when it was
made, waits for what it is given, and at its end a backward pass is complete on the caller's stream. It also tells the
allocator of tensors that cross from one stream to another. What it does not know of is held in `Aside.held`.
No number changes, but where three gradients or more meet in a parameter: they may be added in another order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.distributed import several_ranks
from proxprop.solvers import DIAGONAL, PreparedSolve


@dataclass(eq=False)
class Aside:
    """Where one call is solved.

    Attributes:
        turn: which of the streams.
        held: what that stream reads, between fork and join: the layer's inputs, which could otherwise be freed,
            and G, to which autograd would otherwise add another gradient in place.
        ready: what was prepared for the solve.
    """

    turn: int
    held: list[Tensor] = field(default_factory=list)
    ready: PreparedSolve | None = None

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Within, nodes are made that autograd runs on that stream."""
        return torch.cuda.stream(self._stream(device))

    def after_this(self, device: torch.device) -> AbstractContextManager[object]:
        """Within, that stream works on what the current stream, perhaps of another device, has done so far."""
        if (stream := self._stream(device)) is not None:
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        return streams(device)[self.turn % tuning.STREAMS]

    def take(self) -> PreparedSolve | None:
        """What was prepared, which is forgotten here."""
        ready, self.ready = self.ready, None
        return ready


@cache
def streams(device: torch.device) -> Sequence[torch.cuda.Stream | None]:
    """The streams of a device that systems are solved on."""
    return [torch.cuda.Stream(device) for _ in range(tuning.STREAMS)]


def pays(spaces: Sequence[str], output: Tensor, handles: Sequence[Tensor | None]) -> bool:
    """Whether a call should be solved aside.

    Not in an eager step. Not where there is nothing to solve but a division, or so much that it fills a GPU's memory.
    Not where something acts on each gradient as soon as it is there, for a join comes last: other ranks, or an
    optimizer that steps in backward. And not where reading the saved inputs may compute, as a checkpoint does: others
    would read the outcome on their own stream.

    Args:
        spaces: where the layer's system can be solved.
        output: of the layer.
        handles: views of the layer's parameters; without them there is nothing to join in.
    """
    if (
        torch.compiler.is_compiling()
        or not device.is_captured(output)
        or DIAGONAL in spaces
        or several_ranks()
    ):
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    trained = [handle for handle in handles if handle is not None and handle.requires_grad]
    unknowns = min(output.numel(), sum(handle.numel() for handle in trained))
    return unknowns <= tuning.STREAMS_MOST_UNKNOWNS and all(_can_wait(handle) for handle in trained)


def _can_wait(handle: Tensor) -> bool:
    parameter = handle._base
    return parameter is not None and not getattr(parameter, "_post_accumulate_grad_hooks", None)


_waiting: "WeakKeyDictionary[Any, Callable[[Any], None]]" = WeakKeyDictionary()
"""Nodes that no backward pass has come to, and what prepares each."""


def wait(node: Any, prepare: Callable[[Any], None]) -> None:
    """Have a node prepared when a backward pass that comes to it begins."""
    _waiting[node] = prepare


class Fork(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands G to the output and to a token."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor) -> Tensor:
        """Return the output, detached so that an in-place activation may follow."""
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient, twice."""
        _prepare_all()
        return G, G


def _prepare_all() -> None:
    """Prepare what this backward pass will come to, the first to be needed first."""
    waiting = [node for reference in _waiting.keyrefs() if (node := reference()) is not None]
    due = [node for node in waiting if torch._C._will_engine_execute_node(node)]
    for node in sorted(due, key=lambda node: -node._sequence_nr()):
        if (prepare := _waiting.pop(node, None)) is not None:
            prepare(node)


def join_last(handles: Sequence[Tensor | None], aside: Aside) -> None:
    """Let the views through which directions reach the parameters run when nothing else is left to do.

    Autograd runs later nodes first, by their sequence numbers: the first of all is the last to run. When one
    of them runs, its stream has waited for the whole solve, and what was held for it is let go.

    Args:
        handles: views of the parameters, made for this call alone.
        aside: where it is solved.
    """
    for handle in handles:
        if handle is not None and handle.requires_grad:
            node: Any = handle.grad_fn
            node._set_sequence_nr(0)
            node.register_prehook(lambda directions: aside.held.clear())
