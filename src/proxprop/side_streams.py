"""Solve beside the backward pass, on CUDA streams of their own.

A solve is a chain of kernels, many of them small, that leaves much of a GPU idle, and nothing but the optimizer waits
for a direction. So backward forks: G goes on to the layer's input, and to a node that belongs to another stream and
solves there, several layers at a time. The direction joins again in nodes that autograd runs after all others.

    output ── Fork ──┬── the layer's own nodes ── input        the stream of the forward pass
                     └── Proximal                              a stream of its own
                             └── view ── parameter             the stream of the forward pass, last

K and its factor do not wait for G: the first Fork that runs has all small ones of its backward pass prepared.

All this is for steps that are captured in a CUDA graph. An eager step with layers this small waits for the host, to
which forks and streams are more work.

Autograd itself orders all this, by the rule that it documents: a node runs on the stream that was current when it was
made, waits for what it is given, and at its end a backward pass is complete on the caller's stream. It also tells the
allocator of tensors that cross from one stream to another. What it does not know of is held by `SideSolve.hold`.
No number changes, but where three gradients or more meet in a parameter: they may be added in another order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from proxprop import device, torch_internals, tuning
from proxprop.direction import PreparedSamples
from proxprop.distributed import several_ranks
from proxprop.solvers import DIAGONAL

Prepare = Callable[[Any], None]
"""Prepares the solve of a node."""


class SideStreams:
    """The streams of one device that systems are solved on, and the solves that a backward pass may prepare early.

    Args:
        streams: CUDA streams; None stands for the current one.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        self.streams = streams
        self.expected: WeakKeyDictionary[Any, Prepare] = WeakKeyDictionary()

    def solve(self, turn: int) -> "SideSolve":
        """Where the call of a layer with this number is solved: neighbours are on different streams."""
        return SideSolve(self, self.streams[turn % len(self.streams)])

    def prepare_expected(self) -> None:
        """Prepare what this backward pass will come to, the first to be needed first."""
        nodes = [node for reference in self.expected.keyrefs() if (node := reference()) is not None]
        due = [node for node in nodes if torch_internals.is_due(node)]
        for node in sorted(due, key=torch_internals.sequence_number, reverse=True):
            if (prepare := self.expected.pop(node, None)) is not None:
                prepare(node)


@cache
def side_streams(device: torch.device) -> SideStreams:
    """Those of a device."""
    return SideStreams([torch.cuda.Stream(device) for _ in range(tuning.STREAMS)])


class SideSolve:
    """One call that is solved on a stream beside the backward pass.

    Args:
        streams: the device's.
        own: the one of them that this call is solved on.

    Attributes:
        held: what that stream reads, between fork and join: the layer's inputs, which could otherwise be freed,
            and G, to which autograd would otherwise add another gradient in place.
        ready: what was prepared for the solve.
    """

    def __init__(self, streams: SideStreams, own: torch.cuda.Stream | None) -> None:
        self.streams, self.own = streams, own
        self.held: list[Tensor] = []
        self.ready: PreparedSamples | None = None

    def stream(self) -> AbstractContextManager[object]:
        """Within, nodes are made that autograd runs on the solve's stream."""
        return torch.cuda.stream(self.own)

    def after_current(self) -> AbstractContextManager[object]:
        """Within, the solve's stream works on what the current stream has done so far."""
        if self.own is not None:
            self.own.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.own)

    def expect(self, node: Any, prepare: Prepare) -> None:
        """Have the solve's node prepared when a backward pass that comes to it begins."""
        self.streams.expected[node] = prepare

    def fork(self, output: Tensor, token: Tensor) -> Tensor:
        """The output, whose gradient goes to the token too."""
        forked: Tensor = Fork.apply(output, token, self.streams)
        return forked

    def hold(self, *tensors: Tensor) -> None:
        """Keep what the solve reads until it joins."""
        self.held.extend(tensors)

    def keep(self, ready: PreparedSamples) -> None:
        """Keep what was prepared."""
        self.ready = ready

    def take(self) -> PreparedSamples | None:
        """What was prepared, which is forgotten here."""
        ready, self.ready = self.ready, None
        return ready

    def join_last(self, views: Sequence[Tensor | None]) -> None:
        """Let the views through which directions reach the parameters run when nothing else is left to do.

        Autograd runs later nodes first, by their sequence numbers: the first of all is the last to run. When one
        of them runs, its stream has waited for the whole solve, and what was held for it is let go.

        Args:
            views: of the parameters, made for this call alone.
        """
        for view in views:
            if view is not None and view.requires_grad:
                node: Any = view.grad_fn
                torch_internals.run_last(node)
                node.register_prehook(lambda directions: self.held.clear())


class Fork(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands G to the output and to a token."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, streams: SideStreams) -> Tensor:
        """Return the output, detached so that an in-place activation may follow."""
        ctx.streams = streams
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient, twice."""
        ctx.streams.prepare_expected()
        return G, G, None


def pays(spaces: Sequence[str], output: Tensor, views: Sequence[Tensor | None]) -> bool:
    """Whether a call should be solved on a stream beside the backward pass.

    Not in an eager step. Not where there is nothing to solve but a division, or so much that it fills a GPU's memory.
    Not where something acts on each gradient as soon as it is there, for a join comes last: other ranks, or an
    optimizer that steps in backward. And not where reading the saved inputs may compute, as a checkpoint does: others
    would read the outcome on their own stream.

    Args:
        spaces: where the layer's system can be solved.
        output: of the layer.
        views: of the layer's parameters; without them there is nothing to join in.
    """
    if (
        torch.compiler.is_compiling()
        or not device.is_captured(output)
        or DIAGONAL in spaces
        or several_ranks()
    ):
        return False
    if torch_internals.saved_tensors_are_hooked():
        return False
    trained = [view for view in views if view is not None and view.requires_grad]
    unknowns = min(output.numel(), sum(view.numel() for view in trained))
    return unknowns <= tuning.STREAMS_MOST_UNKNOWNS and all(_can_wait(view) for view in trained)


def _can_wait(view: Tensor) -> bool:
    parameter = torch_internals.viewed(view)
    return parameter is not None and not torch_internals.steps_in_backward(parameter)
