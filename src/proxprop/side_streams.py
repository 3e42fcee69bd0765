"""Solve beside the backward pass, on separate CUDA streams.

A solve is a chain of kernels, many of them small, which leaves much of a GPU idle, and only the optimizer waits for a
direction. So backward forks: G goes on to the layer's input, and also to a node on another stream, which solves there
while other layers do the same. The direction joins again in nodes that autograd runs after all others.

    output ── Fork ──┬── the layer's own nodes ── input        the stream of the forward pass
                     └── Proximal                              a stream of its own
                             └── view ── parameter             the stream of the forward pass, last

K and its factor do not depend on G. The first Fork to run prepares the small ones of its whole backward pass.

This is for steps that are captured in a CUDA graph. In an eager step, layers this small wait for the host, and forks
and streams are more work for the host.

Autograd orders all this by its documented rule: a node runs on the stream that was current when the node was made, it
waits for its inputs, and a finished backward pass is complete on the caller's stream. Autograd also tells the allocator
of tensors that cross streams; `SideSolve.hold` holds the tensors it does not know of. No number changes, with one
exception: three or more gradients that meet in a parameter may be added in another order.
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
"""A function that prepares the solve of a node."""


class SideStreams:
    """The streams of one device on which systems are solved.

    Args:
        streams: CUDA streams; None stands for the current one.

    Attributes:
        expected: nodes whose solves a backward pass may prepare early, and how.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        self.streams = streams
        self.expected: WeakKeyDictionary[Any, Prepare] = WeakKeyDictionary()

    def side_solve(self, number: int) -> "SideSolve":
        """A solve for the layer of this number; layers with consecutive numbers get different streams."""
        return SideSolve(self, self.streams[number % len(self.streams)])

    def prepare_expected(self) -> None:
        """Prepare the solves that this backward pass will reach, in the order in which it reaches them."""
        nodes = [node for reference in self.expected.keyrefs() if (node := reference()) is not None]
        due = [node for node in nodes if torch_internals.is_due(node)]
        for node in sorted(due, key=torch_internals.sequence_number, reverse=True):
            if (prepare := self.expected.pop(node, None)) is not None:
                prepare(node)


@cache
def side_streams(on: torch.device) -> SideStreams:
    """The side streams of a device."""
    return SideStreams([torch.cuda.Stream(on) for _ in range(tuning.STREAMS)])


class SideSolve:
    """The solve of one call on a stream beside the backward pass.

    Args:
        streams: the device's side streams.
        own: the stream of this solve.

    Attributes:
        held: tensors that the solve reads between fork and join. The layer's inputs could otherwise be freed, and
            autograd could add another gradient to G in place.
        ready: what was prepared early for the solve.
    """

    def __init__(self, streams: SideStreams, own: torch.cuda.Stream | None) -> None:
        self.streams, self.own = streams, own
        self.held: list[Tensor] = []
        self.ready: PreparedSamples | None = None

    def stream(self) -> AbstractContextManager[object]:
        """A context in which new nodes belong to the solve's stream."""
        return torch.cuda.stream(self.own)

    def after_current(self) -> AbstractContextManager[object]:
        """A context on the solve's stream, after what the current stream has done so far."""
        if self.own is not None:
            self.own.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.own)

    def expect(self, node: Any, prepare: Prepare) -> None:
        """Have the solve prepared at the start of a backward pass that will reach its node."""
        self.streams.expected[node] = prepare

    def fork(self, output: Tensor, token: Tensor) -> Tensor:
        """The output, such that its gradient also goes to the token."""
        forked: Tensor = Fork.apply(output, token, self.streams)
        return forked

    def hold(self, *tensors: Tensor) -> None:
        """Hold tensors that the solve reads until it joins."""
        self.held.extend(tensors)

    def keep(self, ready: PreparedSamples) -> None:
        """Keep what was prepared early."""
        self.ready = ready

    def take(self) -> PreparedSamples | None:
        """Return and forget what was prepared early."""
        ready, self.ready = self.ready, None
        return ready

    def join_last(self, views: Sequence[Tensor | None]) -> None:
        """Let directions reach the parameters when nothing else is left to do.

        Autograd runs the node with the highest sequence number first, so sequence number 0 runs last. When the node of
        a view runs, its stream has waited for the whole solve, and the held tensors are released.

        Args:
            views: views of the parameters, made for this call only.
        """
        for view in views:
            if view is not None and view.requires_grad:
                node: Any = view.grad_fn
                torch_internals.run_last(node)
                node.register_prehook(lambda directions: self.held.clear())


class Fork(torch.autograd.Function):
    """The identity on a layer's output; its backward gives G to the output and to a token."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, streams: SideStreams) -> Tensor:
        """Return the output, detached so that an in-place activation may follow."""
        ctx.streams = streams
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return G twice, and prepare solves early."""
        ctx.streams.prepare_expected()
        return G, G, None


def pays(spaces: Sequence[str], output: Tensor, views: Sequence[Tensor | None]) -> bool:
    """Whether to solve a call on a stream beside the backward pass.

    Solves stay in line in these cases:

    - The step is not captured in a CUDA graph.
    - The solve is only a division, or so large that several would fill a GPU's memory.
    - Something acts on each gradient as soon as it is finished (other ranks, an optimizer that steps in backward),
      but joins come last.
    - Reading the saved inputs may compute, as in a checkpoint; other streams would read the result too early.

    Args:
        spaces: spaces of the layer's system.
        output: the layer's output.
        views: views of the layer's parameters, in which directions join.
    """
    if torch.compiler.is_compiling() or not device.is_captured(output):
        return False
    if DIAGONAL in spaces or several_ranks() or torch_internals.saved_tensors_are_hooked():
        return False
    trained = [view for view in views if view is not None and view.requires_grad]
    unknowns = min(output.numel(), sum(view.numel() for view in trained))
    return unknowns <= tuning.STREAMS_MOST_UNKNOWNS and all(_can_wait(view) for view in trained)


def _can_wait(view: Tensor) -> bool:
    """Whether the gradient of a viewed parameter may come last."""
    parameter = torch_internals.viewed(view)
    return parameter is not None and not torch_internals.steps_in_backward(parameter)
