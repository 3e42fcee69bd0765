"""The ways to run a training step: as torch does, compiled, or captured in CUDA graphs.

`prepare` makes a step of a network in one of them, `as_timed` what a clock is held against, and `memory_of` says how
much it holds.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from networks import Network
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import proxprop
from proxprop import CG, Exact, Running, tuning
from proxprop import device as rules
from proxprop.replay import held_bytes

SOLVERS = {"cg1": CG(1), "cg3": CG(3), "cg10": CG(10), "exact": Exact()}
RUNNING = {
    "observed": Running(update_every=1, invert_every=1000, damping=None),
    "renewed": Running(update_every=1, invert_every=1),
}
"""Running averages in which every step costs the same: it forms S and inverts nothing, or it inverts everything."""

Step = Callable[[], None]
"""Takes one training step: forward, backward and optimizer."""


def as_it_is(model: nn.Module, example: Tensor) -> nn.Module:
    return model


def compiled(model: nn.Module, example: Tensor, mode: str | None = None) -> Callable:
    torch._dynamo.config.recompile_limit = (
        64  # each method's model counts as one more version of the same code
    )
    return torch.compile(model, mode=mode)


def graphed(model: nn.Module, example: Tensor) -> Callable:
    return torch.cuda.make_graphed_callables(model, (example,))


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        called: makes of a model and its batch what a step calls.
        captured: whether a whole step is one CUDA graph.
        graphed: whether passes are replayed, so that neither their memory nor autocast's cached weights can be seen.
        needs_gpu: whether a CPU has nothing like it.
    """

    called: Callable[[nn.Module, Tensor], Callable] = as_it_is
    captured: bool = False
    graphed: bool = False
    needs_gpu: bool = True


WAYS = {
    "eager": Way(needs_gpu=False),
    "compile": Way(compiled, needs_gpu=False),
    "reduce-overhead": Way(partial(compiled, mode="reduce-overhead"), graphed=True),
    "passes": Way(graphed, graphed=True),
    "graph": Way(captured=True),
}
"""As torch runs it; `torch.compile`d; with its mode of CUDA graphs; both passes captured; the whole step captured."""


def usual(device: str) -> str:
    """The way that is timed unless another is asked for."""
    return "eager" if device == "cpu" else "graph"


def prepare(
    network: Network, method: str, space: str | None, options: argparse.Namespace, precision: str
) -> tuple[nn.Module, Step]:
    """A model and a function that takes one training step of it, `options.way`; the model is not yet compiled."""
    torch.manual_seed(0)
    device, way = options.device, WAYS[options.way]
    model = network.model().to(device, memory_format=network.memory_format)
    x = network.input().to(device)
    x = x.to(memory_format=network.memory_format) if x.dim() == 4 else x
    if method in SOLVERS:
        proxprop.convert(model, SOLVERS[method], tau_theta=1.0, space=space)
    elif method in RUNNING:
        proxprop.convert(model, Exact())
    elif method == "isaac":
        replace_by_isaac(model)
    with torch.no_grad():
        y = network.target(model(x)).to(device)
    name = method if method in ("adam", "muon") else network.optimizer
    optimizers = make_optimizers(model, name, device, way.captured)
    if method in RUNNING:
        proxprop.attach(optimizers, model, running=RUNNING[method])
    in_precision = partial(
        torch.autocast, device, torch.bfloat16, enabled=precision == "bf16", cache_enabled=not way.graphed
    )
    run: Callable | None = None

    def step() -> None:
        nonlocal run
        if run is None:  # so that the model can be looked at first
            with in_precision():
                run = way.called(model, x)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with in_precision():
            loss = network.loss(run(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return model, step


def make_optimizers(
    model: nn.Module, name: str, device: str, captured: bool = True
) -> list[torch.optim.Optimizer]:
    """As a script would make them; those that a CUDA graph captures keep their count of steps on the GPU."""
    parameters = list(model.parameters())
    capturable = {"capturable": True} if device == "cuda" and captured else {}
    adam = partial(torch.optim.Adam, lr=1e-6, foreach=device == "cuda" or None, **capturable)
    if name == "sgd":
        return [torch.optim.SGD(parameters, lr=1e-6, momentum=0.95, nesterov=True)]
    if name == "adam":
        return [adam(parameters)]
    if name == "adamw":
        return [torch.optim.AdamW(parameters, lr=1e-6, fused=True, **capturable)]
    matrices = [p for p in parameters if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=1e-6), adam([p for p in parameters if p.dim() != 2])]


def replace_by_isaac(model: nn.Module) -> None:
    """Every linear layer but the last as `isaac.Linear`, the nearest relative: exact, bias left out."""
    import isaac

    layers = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linear = [entry for entry in layers if type(entry[2]) is nn.Linear]
    if len(linear) < 2:
        raise ValueError("isaac has no layer for this network")
    for parent, name, child in linear[:-1]:
        new = isaac.Linear(child.in_features, child.out_features, bias=child.bias is not None, la=1.0)
        setattr(parent, name, new.to(child.weight.device))


def as_timed(step: Step, options: argparse.Namespace) -> Step:
    """The step in the way that is timed, everything compiled and captured."""
    way = WAYS[options.way]
    if way.captured:
        return captured(step)
    for _ in range(4 if way.called is not as_it_is else 0):  # compile, warm up, capture, replay
        step()
    return step


def captured(step: Step) -> Step:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # what is left of earlier steps would tie parameters to their streams
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Callable = step) -> None:  # the graph reads memory that only `step` keeps alive
        graph.replay()

    return replay


STEPS_TO_REPLAY = 2 * tuning.REPLAYED_AFTER + 2
"""After so many eager steps all solves that are replayed are captured."""


def take_workspaces(device: str) -> None:
    """Let libraries take the memory that they keep for each thread and stream: it is not that of what comes first."""
    if device == "cuda":
        layers = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(tuning.STREAMS)))
        model = proxprop.convert(layers, CG(1), include_last=True)
        with as_if_captured():
            model(torch.ones(8, 64, device=device)).sum().backward()
        for _ in range(STEPS_TO_REPLAY):
            model(torch.ones(8, 64, device=device)).sum().backward()


@contextmanager
def as_if_captured() -> Iterator[None]:
    """Within, an eager step does what a captured one does; plain mocks would keep what they are asked about."""

    def is_captured(tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    with mock.patch.object(rules, "is_captured", is_captured):
        yield


def memory_of(step: Step, again: Callable, others: int, options: argparse.Namespace) -> float | None:
    """Most memory a step holds, in MiB, by what the device has to tell; `again` prepares the step anew."""
    if options.device == "cpu":
        return peak_memory_on_a_cpu(again)
    way = WAYS[options.way]
    return None if way.graphed else peak_memory(step, options.device, others, way.captured)


def held_memory(device: str) -> int:
    """Bytes that are held before a step is made; only a GPU's allocator tells."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak_memory(step: Step, device: str, others: int, captures: bool = False) -> float | None:
    """Most memory a step holds, in MiB, without what `others` held; only a GPU's allocator tells.

    The step is eager, but solves beside the backward pass if the one that is timed is captured, and so does.
    """
    if device == "cpu":
        step()
        return None
    proxprop.use_cuda_graphs(True)  # without those of the steps before
    with as_if_captured() if captures else nullcontext():
        for _ in range(1 if captures else STEPS_TO_REPLAY):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    replayed = held_bytes(torch.device("cuda", torch.cuda.current_device()))
    return (torch.cuda.max_memory_allocated() + replayed - others) / 2**20


def peak_memory_on_a_cpu(prepared: Callable[[], tuple[nn.Module, Step]]) -> float:
    """Most memory a model, its optimizer and its second step hold, in MiB, as torch's profiler sees it allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _, step = prepared()
        step()
        with record_function("second step"):
            step()
    events = profiler.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == "second step")
    held, most = 0, 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held) if event.start_ns() >= begin else most
    return most / 2**20
