"""Replay the solves of eager steps as CUDA graphs.

An eager solve is dozens of small launches, and the GPU waits for the host between them. A solve of the same kind of
layer, the same shapes and the same settings launches the same kernels every time. So after a few of them one is
captured, and from then on a solve is: copy the input and G in, replay, multiply or copy D out. Layers of the same
shapes share a graph.

All graphs of a device share one pool of memory. Nothing in it outlives a replay, so the pool needs room for the
largest solve, not for all of them together. The largest is captured first, so that the others fit into its memory.
`use_cuda_graphs(False)` frees the pool.

A solve is not replayed under a compiler or a dispatch mode, in a step that is itself captured, while diagnostics watch
it, or if it is so large that the GPU is busy for longer than the host. Solvers and layers that do not promise to launch
the same kernels every time (`capturable`) are not replayed either. If a capture fails, its solves stay eager.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from threading import Lock, get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from proxprop import device, torch_internals, tuning
from proxprop.solvers.matmul import PendingProduct
from proxprop.transfer import Parameters, Products

Outcome = tuple[Products, Tensor | None]
"""The parts of a solution, some of which may still have to be multiplied, and whether the solve failed."""

Solve = Callable[[Sequence[Tensor]], Outcome]
"""From the tensors of a call to what solves it."""

_switched_on = True


def use_cuda_graphs(enabled: bool) -> None:
    """Whether eager steps on a GPU replay their solves as CUDA graphs, as they do by default.

    Graphs take memory for the largest solve that was captured, up to a few times the layer's input and output. Switch
    them off to save that, or to see every kernel in a profile. What was captured is freed.
    """
    global _switched_on
    _switched_on = enabled
    _replays.cache_clear()


class Replay(NamedTuple):
    """A captured solve.

    Attributes:
        run: solves again, for what is in `tensors`.
        tensors: to copy a call's tensors to.
        outcome: what a run writes to, until the next one.
    """

    run: Callable[[], None]
    tensors: list[Tensor]
    outcome: Outcome


Capture = Callable[[Solve, Sequence[Tensor]], Replay | None]


class Replays:
    """The captured solves of one device.

    Args:
        capture: captures a solve for tensors like these; raises RuntimeError where that is not possible, and returns
            None where it is not possible now.
        current_stream: the stream that the calling thread works on.
    """

    def __init__(self, capture: Capture, current_stream: Callable[[], torch.cuda.Stream | None]) -> None:
        self.capture, self.current_stream = capture, current_stream
        self.kept: OrderedDict[Hashable, Replay | None] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        self.largest = 0
        self.last: torch.cuda.Stream | None = None
        self.lock = Lock()

    def solve(
        self, question: Hashable, solve: Solve, tensors: list[Tensor]
    ) -> tuple[Parameters, Tensor | None] | None:
        """The solution for these tensors, and whether it failed, by a replay; None where it is to be solved eagerly.

        Args:
            question: what decides about the kernels of the solve, beside tensors and settings of torch.
            solve: what is captured.
            tensors: of the call.
        """
        if not are_small(tensors):
            return None
        layouts = [(t.shape, t.stride(), t.dtype) for t in tensors]
        question = question, device.precision_settings(), *layouts
        with self.lock:
            found = self.kept.get(question)
            if found is None:
                found = self._captured(question, solve, tensors)
                if found is None:
                    return None
            self.kept.move_to_end(question)
            self._follow()
            torch_internals.copy_all(found.tensors, tensors)
            found.run()
            return copied(*found.outcome)

    def _captured(self, question: Hashable, solve: Solve, tensors: Sequence[Tensor]) -> Replay | None:
        """A new replay, which is kept; None where it is not due, or where its capture fails or has failed."""
        if question in self.kept or not self._is_due(question, size(tensors)):
            return None
        del self.seen[question]
        try:
            found = self.capture(solve, tensors)
            if found is None:
                return None
        except RuntimeError:
            found = None
        self.kept[question] = found
        if len(self.kept) > tuning.REPLAYS:
            self.kept.popitem(last=False)
        return found

    def _is_due(self, question: Hashable, bytes: int) -> bool:
        """Whether a solve was seen often enough to be captured, and is not to wait for a larger one."""
        if len(self.seen) > tuning.REPLAYS_COUNTED:
            self.seen.clear()
        self.seen[question] = self.seen.get(question, 0) + 1
        self.largest = max(self.largest, bytes)
        often = self.seen[question] > tuning.REPLAYED_AFTER
        patient = self.seen[question] <= 2 * tuning.REPLAYED_AFTER  # the largest may never come again
        return often and not (patient and not self.kept and bytes < self.largest)

    def _follow(self) -> None:
        """Make this stream wait for the one that used the pool before."""
        current = self.current_stream()
        if self.last is not None and current is not None and current != self.last:
            current.wait_stream(self.last)
        self.last = current


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of all tensors."""
    return sum([tensor.nbytes for tensor in tensors])


def are_small(tensors: Sequence[Tensor]) -> bool:
    """Whether a GPU copies these tensors in less time than the host takes to launch a solve for them."""
    return size(tensors) <= tuning.REPLAYED_MOST_BYTES


def copied(products: Products, failed: Tensor | None) -> tuple[Parameters, Tensor | None]:
    """A solution, multiplied, in memory of its own; the flag is where the next run writes."""
    found: list[Tensor | None] = []
    for p in products:
        found.append(p.multiply() if isinstance(p, PendingProduct) else p.clone() if p is not None else None)
    return tuple(found), failed


def replays(like: Tensor) -> Replays | None:
    """The replays of a tensor's device; None if solves are not replayed."""
    if not _switched_on or not like.is_cuda or device.is_traced() or device.is_captured(like):
        return None
    return _replays(like.device)


@cache
def _replays(on: torch.device) -> Replays:
    return Replays(GraphCapture(on), lambda: torch.cuda.current_stream(on))


def held_bytes(on: torch.device) -> int:
    """Memory that the captured solves of a device hold, beside what cuBLAS keeps for their stream."""
    captured = _replays(on).capture
    if not isinstance(captured, GraphCapture) or captured.pool is None:  # None would name all memory
        return 0
    return _pool_bytes(captured.pool)


def _pool_bytes(pool: Any) -> int:
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool))


class GraphCapture:
    """Captures solves on a device, in one pool of memory.

    The allocator adds memory to a pool whenever no free block is quite long enough. So the first solve, the largest, is
    captured several times, in pools that begin with one array that is freed at once, of several sizes. The smallest
    pool is kept.
    """

    def __init__(self, on: torch.device) -> None:
        self.device = on
        self.pool: Any = None

    def __call__(self, solve: Solve, tensors: Sequence[Tensor]) -> Replay | None:
        """Solve once as a graph would, so that all kernels are loaded, and capture it the second time."""
        if not is_common(torch.empty(1, device=self.device).data_ptr(), torch.cuda.memory_snapshot()):
            return None
        with torch.cuda.device(self.device), device.as_if_captured():
            solve(tensors)
            if self.pool is not None:
                return self._captured(solve, tensors, self.pool)
            found, self.pool = self._in_new_pool(solve, tensors, 0)
            first = _pool_bytes(self.pool)
            for share in BEGIN_WITH:
                other, pool = self._in_new_pool(solve, tensors, int(share * first))
                if _pool_bytes(pool) < _pool_bytes(self.pool):
                    found, self.pool = other, pool
            return found

    def _in_new_pool(self, solve: Solve, tensors: Sequence[Tensor], begin: int) -> tuple[Replay, Any]:
        pool = torch.cuda.graph_pool_handle()
        return self._captured(solve, tensors, pool, begin), pool

    def _captured(self, solve: Solve, tensors: Sequence[Tensor], pool: Any, begin: int = 0) -> Replay:
        def run() -> tuple[list[Tensor], Outcome]:
            torch.empty(begin, dtype=torch.uint8, device=self.device)
            inputs = [torch.empty_like(tensor) for tensor in tensors]
            return inputs, solve(inputs)

        stream, _ = _capture_stream(self.device, get_ident())
        graph, (inputs, outcome) = _graph_of(run, stream, pool)
        return Replay(graph.replay, [_borrowed(t) for t in inputs], _borrowed_outcome(*outcome))


BEGIN_WITH = 0.45, 0.6, 0.75
"""Sizes of the array that a pool begins with, as shares of the memory that the first solve takes without it."""


@cache
def _capture_stream(on: torch.device, thread: int) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The stream on which a thread captures solves, and a graph that owns what cuBLAS keeps for both.

    Others may tell cuBLAS to forget that memory, as `torch.compile(mode="reduce-overhead")` does, but captured solves
    go on using it. In a pool of its own, whose graph is never dropped, it is not given to anyone else.
    """
    stream, ones = torch.cuda.Stream(on), torch.ones(8, 8, device=on)
    with torch.cuda.device(on):
        torch.mm(ones, ones)
        graph, _ = _graph_of(lambda: torch.mm(ones, ones), stream, torch.cuda.graph_pool_handle())
    return stream, graph


Result = TypeVar("Result")


def _graph_of(
    run: Callable[[], Result], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """What a function launches, as a graph, and what it returned; other threads may go on using the GPU."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, result


def is_common(address: int, segments: Sequence[dict[str, Any]]) -> bool:
    """Whether memory at an address belongs to the pool that allocations come from unless they name another.

    A capture in memory that `torch.compile(mode="reduce-overhead")` lends to a thread would write to what others own.

    Args:
        address: on the GPU.
        segments: from `torch.cuda.memory_snapshot`.
    """
    common = (s for s in segments if tuple(s["segment_pool_id"]) == (0, 0))
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in common)


def _borrowed_outcome(products: Products, failed: Tensor | None) -> Outcome:
    """The same solution, in memory that the pool is free to use for other solves too."""
    found: list[Tensor | PendingProduct | None] = []
    for p in products:
        if isinstance(p, PendingProduct):
            found.append(PendingProduct([(_borrowed(left), _borrowed(right)) for left, right in p.pairs]))
        else:
            found.append(_borrowed(p) if p is not None else None)
    return tuple(found), _borrowed(failed) if failed is not None else None


_borrowed = torch_internals.without_owning
