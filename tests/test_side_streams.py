"""Directions that are solved beside the backward pass are those that are solved in line with it.

On a CPU the graph of nodes and the decision are tested, without streams; the streams themselves need a GPU.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import proxprop
from proxprop import CG, Exact, backward, device, side_streams, tuning
from proxprop.nn import layer
from proxprop.side_streams import SideSolve, SideStreams
from proxprop.solvers import Solver
from proxprop.tuning import TRITON_CHOLESKY_MOST_ROWS
from training import assert_same, directions, images, loss_of, small_model

works = pytest.mark.compatibility
LOADING = f"exact systems of over {TRITON_CHOLESKY_MOST_ROWS:,} rows load kernels while they are captured: a driver of CUDA 12.3 or later"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class NotedStreams(SideStreams):
    """No streams, but a list of the solves that were made and of their numbers."""

    def __init__(self) -> None:
        super().__init__([None] * tuning.STREAMS)
        self.made: list[SideSolve] = []
        self.numbers: list[int] = []

    def side_solve(self, number: int) -> SideSolve:
        self.made.append(super().side_solve(number))
        self.numbers.append(number)
        return self.made[-1]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> NotedStreams:
    """Fork on a CPU as on a GPU, but without streams."""
    streams = NotedStreams()
    monkeypatch.setattr(device, "is_captured", lambda tensor: True)
    monkeypatch.setattr(layer, "side_streams", lambda device: streams)
    return streams


@pytest.fixture
def solves(noted: NotedStreams) -> list[SideSolve]:
    """The solves beside the backward pass, to which each fork adds one."""
    return noted.made


def in_line(found: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "is_captured", lambda tensor: False)
        return found()


@pytest.mark.parametrize("solver", [Exact(), CG(1), CG(3)])
@pytest.mark.parametrize("frozen", [None, "0.weight", "3.bias"])
def test_directions_beside_backward_equal_those_in_line(
    solves: list[SideSolve], frozen: str | None, solver: Solver
) -> None:
    model = small_model(solver)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)

    def found() -> dict[str, Tensor]:
        model.zero_grad()
        loss_of(model, images()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    beside = found()
    assert len(solves) == 2
    assert_same(beside, in_line(found), 0.0)


def test_directions_accumulate_over_retained_graphs(solves: list[SideSolve]) -> None:
    model, x = small_model(Exact()), images().requires_grad_()

    def found() -> dict[str, Tensor]:
        model.zero_grad()
        x.grad = None
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad.clone() for name, p in [*model.named_parameters(), ("x", x)]}

    assert_same(found(), in_line(found), 0.0)


def test_autograd_grad_of_one_parameter_solves_for_it_alone(solves: list[SideSolve]) -> None:
    model = small_model(Exact())

    def found() -> dict[str, Tensor]:
        return {"bias": torch.autograd.grad(loss_of(model, images()), model[0].bias)[0]}

    assert_same(found(), in_line(found), 0.0)


def test_consecutive_layers_get_different_streams(noted: NotedStreams) -> None:
    directions(small_model(Exact()), images())
    first, second = noted.numbers
    assert second == first + 1


def test_directions_join_after_everything_else(solves: list[SideSolve]) -> None:
    """A stream should wait for directions only when it has nothing else to do."""
    model = small_model(Exact())
    order: list[str] = []
    x = images().requires_grad_()
    x.register_hook(lambda g: order.append("input"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: order.append(name))
    loss_of(model, x).backward()
    converted = {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert set(order[order.index("input") + 1 :]) == converted


def test_what_a_solve_reads_is_held_until_it_joins(solves: list[SideSolve]) -> None:
    """In a residual network autograd would otherwise add to G in place while it is read."""
    linear = proxprop.nn.Linear(4, 4, solver=Exact())
    held: list[list[Tensor]] = []
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda g: held.append(list(solves[0].held)))
    (x + linear(x)).sum().backward()
    assert [len(tensors) for tensors in held] == [2]
    assert solves[0].held == []
    assert held[0][0].eq(1).all()


def prepared_during_backward(solves: list[SideSolve], samples: int) -> list[bool]:
    """Which of two calls is prepared when G has passed the second."""
    first, second = (proxprop.nn.Linear(16, 16, solver=Exact()) for _ in range(2))
    found: list[bool] = []
    x = torch.tanh(first(torch.randn(samples, 16)))
    x.register_hook(lambda g: found.extend(solve.ready is not None for solve in solves))
    second(x).square().mean().backward()
    assert not any(solve.ready for solve in solves)
    return found


def test_systems_in_sample_space_are_prepared_early(solves: list[SideSolve]) -> None:
    assert prepared_during_backward(solves, samples=3) == [True, False]


def test_systems_in_feature_space_are_not_prepared_early(solves: list[SideSolve]) -> None:
    assert prepared_during_backward(solves, samples=100) == [False, False]


def test_large_systems_are_not_prepared_early(
    solves: list[SideSolve], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PREPARED_MOST_ROWS", 2)
    assert prepared_during_backward(solves, samples=3) == [False, False]


def test_systems_of_another_graph_are_not_prepared_early(solves: list[SideSolve]) -> None:
    first, second = (proxprop.nn.Linear(4, 4, solver=Exact()) for _ in range(2))
    one, other = first(torch.randn(3, 4)).sum(), second(torch.randn(3, 4)).sum()
    one.backward()
    assert solves[1].ready is None
    other.backward()
    assert second.weight.grad is not None


def test_a_dropped_graph_is_no_longer_expected(noted: NotedStreams) -> None:
    loss = proxprop.nn.Linear(4, 4, solver=Exact())(torch.randn(3, 4)).sum()
    assert len(noted.expected) == 1
    del loss
    assert len(noted.expected) == 0


def test_a_diagonal_system_stays_in_line(solves: list[SideSolve]) -> None:
    embedding = proxprop.nn.Embedding(4, 3, solver=Exact())
    embedding(torch.arange(4)).sum().backward()
    assert solves == []


def test_large_systems_stay_in_line(solves: list[SideSolve], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STREAMS_MOST_UNKNOWNS", 6 * 8)  # the linear layer's output
    directions(small_model(Exact()), images())
    assert len(solves) == 2
    monkeypatch.setattr(tuning, "STREAMS_MOST_UNKNOWNS", 6 * 8 - 1)
    directions(small_model(Exact()), images())
    assert len(solves) == 3


def test_an_optimizer_in_backward_stays_in_line(solves: list[SideSolve]) -> None:
    model = small_model(Exact())
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    directions(model, images())
    assert len(solves) == 1


def test_a_checkpoint_stays_in_line(solves: list[SideSolve]) -> None:
    model = small_model(Exact())
    directions(model, images(), lambda x: checkpoint(model, x, use_reentrant=False))
    assert solves == []


def test_many_ranks_an_observer_and_deferred_mode_stay_in_line(
    solves: list[SideSolve], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(Exact())
    with proxprop.diagnostics.observe(model):
        directions(model, images())
    proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    directions(model, images())
    parameter = torch.randn(3, requires_grad=True)
    asked = model[3].spaces, images()
    assert side_streams.pays(*asked, [parameter.view_as(parameter), None])
    assert not side_streams.pays(*asked, [parameter])
    monkeypatch.setattr(side_streams, "several_ranks", lambda: True)
    assert not side_streams.pays(*asked, [parameter.view_as(parameter)])
    assert solves == []


def test_a_cpu_stays_in_line() -> None:
    assert not device.is_captured(images())


@needs_gpu
def test_an_eager_step_stays_in_line() -> None:
    assert not device.is_captured(images().cuda())


class Branches(nn.Module):
    """Residual branches, a layer that is called twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        x = x + self.block(x) + 0.5 * x
        x = x + torch.tanh(self.block(x))
        return self.last(self.other(torch.tanh(self.one(x))))


def convolutions() -> nn.Sequential:
    conv = nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 2), nn.Flatten()
    return nn.Sequential(*conv, nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


MODELS = pytest.mark.parametrize("make", [Branches, convolutions])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start solves a millisecond late: whoever does not wait for them reads unwritten memory."""
    for name in ("prepare", "solve"):
        plain = getattr(backward, name)

        def late(*args: object, plain: Callable[..., object] = plain) -> object:
            torch.cuda._sleep(2_000_000)
            return plain(*args)

        monkeypatch.setattr(backward, name, late)
    monkeypatch.setattr(device, "is_captured", lambda tensor: tensor.is_cuda)  # in eager steps, too
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(100, 3, 4, 4).cuda(), torch.randn(100, 3).cuda()


def loss_on_gpu(model: nn.Module, seed: int = 0) -> Tensor:
    x, y = batch(seed)
    return (model(x) - y).square().mean()


def once(model: nn.Module) -> None:
    loss_on_gpu(model).backward()


def accumulated(model: nn.Module) -> None:
    for set_to_none in (True, False):
        model.zero_grad(set_to_none)
        loss_on_gpu(model, 1).backward()
        loss = loss_on_gpu(model, 2)
        loss.backward(retain_graph=True)
        loss.backward()


def asked_for(model: nn.Module) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss_on_gpu(model), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient.clone()


def hooked(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    loss_on_gpu(model).backward()


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(5):
        optimizer.zero_grad()
        loss_on_gpu(model, seed).backward()
        optimizer.step()


def trained_in_backward(model: nn.Module) -> None:
    def descend(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for seed in range(3):
        loss = loss_on_gpu(model, seed)
        if seed == 0:  # the first graph is there already
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(descend)
        loss.backward()


def trained_in_a_graph(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch()

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        x.copy_(batch(seed)[0])
        graph.replay()


def trained_in_graphs_of_its_passes(model: nn.Module) -> None:
    """The forward and the backward pass each in a graph, the optimizer not."""
    graphed = torch.cuda.make_graphed_callables(model, (batch()[0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        optimizer.zero_grad()
        x, y = batch(seed)
        (graphed(x) - y).square().mean().backward()
        optimizer.step()


RUNS = [once, accumulated, asked_for, hooked, trained, trained_in_backward, trained_in_a_graph]


@needs_gpu
@works("CUDA graphs of a whole step (`torch.cuda.graph`)", note=LOADING)
@works("CUDA graphs of both passes (`torch.cuda.make_graphed_callables`)", note=LOADING)
@MODELS
@pytest.mark.parametrize("run", [*RUNS, trained_in_graphs_of_its_passes])
@pytest.mark.parametrize("solver", [Exact(), CG(3)])
def test_on_a_gpu_no_bit_is_different(
    slow: None, make: Callable[[], nn.Module], run: Callable[[nn.Module], None], solver: Solver
) -> None:
    def found() -> dict[str, Tensor]:
        gc.collect()  # what is left of another case, and freed while a graph is captured, would spoil it
        torch.manual_seed(0)
        model = proxprop.convert(make().cuda(), solver, tau_theta=0.5)
        run(model)
        torch.cuda.synchronize()
        parameters = dict(model.named_parameters())
        gradients = {f"{n}.grad": p.grad for n, p in parameters.items() if p.grad is not None}
        return {name: value.detach().clone() for name, value in (parameters | gradients).items()}

    beside, wanted = found(), in_line(found)
    assert all(torch.equal(beside[name], value) for name, value in wanted.items())
