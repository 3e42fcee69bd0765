"""Deferred mode on a GPU: the same step, without waiting for the device, also inside a CUDA graph."""

import copy

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import relative_error
from proxprop import CG, Exact, Running
from proxprop.deferred.preconditioner import inverse
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
        Running(update_every=1, invert_every=2, power=0.5),
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


@pytest.mark.compatibility("CUDA graphs of a whole step (`torch.cuda.graph`)", mode="deferred")
def test_a_period_of_running_averages_in_cuda_graphs() -> None:
    """One graph for each step between two inversions, replayed in turn."""
    running, period = Running(decay=0.8, update_every=3, invert_every=3), 3
    models, (x, y) = [network(Exact()) for _ in range(2)], batch()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        proxprop.attach(optimizer, model, running=running)

    def step(which: int) -> None:
        optimizers[which].zero_grad(set_to_none=True)
        passes(models[which], x, y)
        optimizers[which].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(period):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    graphs, pool = [torch.cuda.CUDAGraph() for _ in range(period)], torch.cuda.graph_pool_handle()
    for graph in graphs:
        optimizers[0].zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, pool=pool):
            step(0)
    for _ in range(2):
        for graph in graphs:
            graph.replay()
    for _ in range(3 * period):
        step(1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert relative_error(one, other) < 1e-3


@pytest.mark.parametrize("size", [200, 1000, 1025, 2048, 3073])
@pytest.mark.parametrize("damping", [0.3, 0.01])
def test_inverses_on_a_gpu_are_as_accurate_as_on_a_cpu(size: int, damping: float) -> None:
    torch.manual_seed(0)
    A = torch.randn(2 * size, size, dtype=torch.float64) * torch.logspace(0.5, -1, size).double()
    M = A.mT @ A
    M = (M / M.diagonal().mean())[None].cuda()
    exact = torch.linalg.inv(M + damping * torch.eye(size, device="cuda"))
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            found, failed = inverse(M.float(), damping)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert not failed.any()
        limit = (
            1e-4 if size > 1024 or precision == "highest" else 3e-3
        )  # a small one is the square of its factor
        assert relative_error(found.double(), exact) < limit


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_directions_of_running_averages_have_the_stated_error(
    dtype: torch.dtype | None, autocast: bool
) -> None:
    """`2⁻¹¹·(1 + ρ)/ρ` of the gradient's norm, or `2⁻⁹` where inverses are kept in bfloat16."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(320, 320), nn.Linear(320, 320), nn.Linear(320, 8)).cuda()
    model = proxprop.convert(layers, Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    running = Running(update_every=2, invert_every=2, inverse_dtype=dtype)
    handle = proxprop.attach(optimizer, model, running=running)
    x = torch.randn(2048, 320).cuda() * torch.logspace(0.5, -1, 320).cuda()
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(x)
        output.float().square().sum().backward()
        B = [torch.cat([layer.weight.grad.T, layer.bias.grad[None]]).double() for layer in model[:2]]
        optimizer.step()
    for i, layer in enumerate(model[:2]):
        C = handle.state_dict()[f"{i}.S"][0].double() / handle.state_dict()[f"{i}.samples"]
        c = C.diagonal().mean()
        expected = 1.3 * c * torch.linalg.solve(0.3 * c * torch.eye(321).cuda() + C, B[i])
        found = torch.cat([layer.weight.grad.T, layer.bias.grad[None]]).double()
        bound = (2.0**-9 if dtype else 2.0**-11) * 1.3 / 0.3 * B[i].norm()
        assert (found - expected).norm() < 2 * bound
    A = (x.bfloat16() if autocast else x).double()
    first = handle.state_dict()["0.S"][0, :320, :320].double()
    assert relative_error(first, A.T @ A) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_model_has_two_graphs() -> None:
    torch.compiler.reset()
    model, (x, y) = network(Exact()), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    proxprop.attach(optimizer, model, running=Running(update_every=2, invert_every=2))
    eager = network(Exact())
    other = torch.optim.SGD(eager.parameters(), lr=0.01)
    proxprop.attach(other, eager, running=Running(update_every=2, invert_every=2))
    compiled = torch.compile(model, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(6):
        for call, each in ((compiled, optimizer), (eager, other)):
            each.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                output = call(x)
            (output.float() - y).square().mean().backward()
            each.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for one, found in zip(model.parameters(), eager.parameters(), strict=True):
        assert relative_error(one, found) < 0.02
    torch.compiler.reset()
