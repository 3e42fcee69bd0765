"""Deferred mode on a GPU: the same step, without waiting for the device, also inside a CUDA graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import relative_error
from proxprop import CG, Exact, Running
from proxprop.solvers import Solver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SOLVERS = pytest.mark.parametrize("solver", [Exact(), CG(3)], ids=str)


def network(solver: Solver) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    return proxprop.convert(model.cuda(), solver)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 3, 8, 8).cuda(), torch.randn(64, 4).cuda()


def passes(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for part, wanted in zip(x.split(24), y.split(24), strict=True):
        ((model(part) - wanted).square().sum() / y.numel()).backward()


@SOLVERS
def test_the_step_is_immediate_modes_of_the_whole_batch(solver: Solver) -> None:
    model, (x, y) = network(solver), batch()
    whole = copy.deepcopy(model)
    (whole(x) - y).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model)
    passes(model, x, y)
    optimizer.step()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert relative_error(one.grad, other.grad) < 1e-3


@SOLVERS
@pytest.mark.parametrize("samples", [512, 1000])
def test_rows_give_the_step_of_s(solver: Solver, samples: int) -> None:
    """Wide enough for tensor cores, with factors by our own kernel and by cuSOLVER."""
    torch.manual_seed(0)
    x, G = torch.randn(samples, 4096).cuda(), torch.randn(samples, 512).cuda()
    found = []
    for space, dtype in ((None, torch.float32), ("feature", torch.float64)):
        torch.manual_seed(0)
        layer = proxprop.nn.Linear(4096, 512, solver=solver, tau_theta=0.1, space=space).to("cuda", dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        handle = proxprop.attach(optimizer, layer)
        for part, g in zip(x.to(dtype).split(256), G.to(dtype).split(256), strict=True):
            layer(part).backward(g)
        assert bool(handle.systems[0]._rows) is (space is None)
        optimizer.step()
        found.append(layer.weight.grad)
    assert relative_error(found[0].double(), found[1]) < 1e-3


@SOLVERS
@pytest.mark.parametrize(
    "running",
    [
        None,
        Running(update_every=1, invert_every=2),
        Running(update_every=1, invert_every=2, rows=50),
        Running(update_every=2, invert_every=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_waits_for_the_gpu(solver: Solver, running: Running | None, set_to_none: bool) -> None:
    model, (x, y) = network(solver), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model, running=running)

    def steps() -> None:
        for given_up in (False, False, True):
            passes(model, x, y)
            if not given_up:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    steps()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.compatibility("CUDA graphs of a whole step (`torch.cuda.graph`)", mode="deferred")
@SOLVERS
def test_a_whole_step_in_a_cuda_graph(solver: Solver) -> None:
    models, (x, y) = [network(solver) for _ in range(2)], batch()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        proxprop.attach(optimizer, model)

    def step(which: int) -> None:
        optimizers[which].zero_grad(set_to_none=True)
        passes(models[which], x, y)
        optimizers[which].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step(0)
    for _ in range(2):
        graph.replay()
    for _ in range(5):
        step(1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert relative_error(one, other) < 1e-3
