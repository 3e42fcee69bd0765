"""Eager solves that are replayed: the same directions, for the same questions alone, and never for long."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import proxprop
from proxprop import CG, Exact, Solver, backward, diagnostics, replay, tuning
from proxprop.replay import Replays
from replaying import Recorder

TIMES = 6
"""Enough calls for a capture and some replays."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replays on a CPU."""
    recorder = Recorder()
    replays = Replays(recorder, lambda: None)
    monkeypatch.setattr(backward, "replays", lambda like: replays)
    return recorder


def directions(model: nn.Module, x: Tensor, G: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward(G)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), (6, 7)),
    "no bias": (lambda: nn.Linear(7, 5, bias=False), (6, 7)),
    "tall": (lambda: nn.Linear(3, 5), (64, 3)),
    "sequences": (lambda: nn.Linear(3, 5), (4, 6, 3)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 5)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (4, 2, 5, 5)),
}


@pytest.mark.parametrize("solver", [CG(1), CG(3), Exact()], ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_replayed_directions_are_the_eager_ones(name: str, solver: Solver, recorder: Recorder) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    plain = make().double()
    model = proxprop.convert(plain, solver, include_last=True)
    for _ in range(TIMES):
        x = torch.randn(shape, dtype=torch.float64)
        G = torch.randn_like(model(x))
        found = directions(model, x, G)
        expected = eager_directions(model, x, G)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert recorder.captures == 1
    assert recorder.runs == TIMES - tuning.REPLAYED_AFTER


def eager_directions(model: nn.Module, x: Tensor, G: Tensor) -> list[Tensor]:
    """With an observer, solves are not replayed."""
    model.zero_grad()
    with diagnostics.observe(model):
        model(x).backward(G)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_another_batch_size_tau_or_frozen_parameter_is_another_solve(recorder: Recorder) -> None:
    model = proxprop.nn.Linear(4, 3)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(model, "tau_theta", 0.1),
        lambda: setattr(model, "solver", Exact()),
        lambda: setattr(model, "scaling", "gradient"),
        lambda: setattr(model, "space", "feature"),
        lambda: model.bias.requires_grad_(False),
        lambda: model.double(),
    ]
    for number, change in enumerate(changes):
        change()
        for samples in (5, 8):
            check_replays(model, samples)
        assert recorder.captures == 2 * (number + 1)


def check_replays(model: nn.Module, samples: int) -> None:
    for _ in range(TIMES):
        x = torch.randn(samples, 4, dtype=model.weight.dtype)
        G = torch.randn(samples, 3, dtype=model.weight.dtype)
        for a, b in zip(directions(model, x, G), eager_directions(model, x, G), strict=True):
            torch.testing.assert_close(a, b)


def test_layers_of_the_same_shapes_share_a_replay_and_keep_their_directions(recorder: Recorder) -> None:
    layers = [proxprop.nn.Linear(6, 6) for _ in range(4)]
    model = nn.Sequential(*layers)
    for _ in range(TIMES):
        x, G = torch.randn(8, 6), torch.randn(8, 6)
        found = directions(model, x, G)
    assert recorder.captures == 1
    for a, b in zip(found, eager_directions(model, x, G), strict=True):
        torch.testing.assert_close(a, b)


def test_a_direction_outlives_the_next_replay(recorder: Recorder) -> None:
    layer = proxprop.nn.Linear(4, 3)
    for _ in range(TIMES):
        layer.zero_grad()
        layer(torch.randn(5, 4)).sum().backward()
    kept = layer.weight.grad
    before, layer.weight.grad = kept.clone(), None
    layer(torch.randn(5, 4)).sum().backward()
    assert torch.equal(kept, before)


def test_a_capture_that_fails_is_not_tried_again(recorder: Recorder) -> None:
    recorder.broken = True
    layer = proxprop.nn.Linear(4, 3)
    check_replays(layer, 5)
    assert (recorder.captures, recorder.runs) == (1, 0)


def test_a_capture_that_is_not_possible_now_is_tried_later(recorder: Recorder) -> None:
    recorder.busy = True
    layer = proxprop.nn.Linear(4, 3)
    check_replays(layer, 5)
    assert recorder.captures == 0
    recorder.busy = False
    check_replays(layer, 5)
    assert recorder.captures == 1


def test_the_largest_is_captured_first(recorder: Recorder) -> None:
    model = nn.Sequential(proxprop.nn.Linear(4, 64), proxprop.nn.Linear(64, 64), proxprop.nn.Linear(64, 2))
    sizes: list[int] = []
    capture = recorder.__call__
    replays = Replays(lambda solve, t: sizes.append(replay.size(t)) or capture(solve, t), lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "replays", lambda like: replays)
        for _ in range(2 * TIMES):
            directions(model, torch.randn(8, 4), torch.randn(8, 2))
    assert len(sizes) == 3
    assert sizes[0] == max(sizes)


def test_what_was_not_used_for_longest_goes_first(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "REPLAYS", 2)
    layer = proxprop.nn.Linear(4, 3)
    for samples in (5, 6, 5, 7, 5):
        check_replays(layer, samples)
    assert recorder.captures == 3
    check_replays(layer, 6)
    assert recorder.captures == 4


def test_a_solver_that_does_not_promise_the_same_kernels_stays_eager(recorder: Recorder) -> None:
    class Own(Exact):
        capturable = False

    for _ in range(TIMES):
        proxprop.nn.Linear(4, 3, solver=Own())(torch.randn(5, 4)).sum().backward()
    assert recorder.captures == 0


def test_large_solves_stay_eager(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "REPLAYED_MOST_BYTES", 4 * (5 * 4 + 5 * 3))
    layer = proxprop.nn.Linear(4, 3)
    check_replays(layer, 6)
    assert recorder.captures == 0
    check_replays(layer, 5)
    assert recorder.captures == 1


def test_a_cpu_stays_eager() -> None:
    assert replay.replays(torch.ones(1)) is None


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def graphs() -> Replays:
    """Those of the GPU, none captured."""
    proxprop.use_cuda_graphs(True)
    found = replay.replays(torch.ones(1, device="cuda"))
    assert found is not None
    return found


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("solver", [CG(1), CG(3), Exact()], ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_eager_directions(
    name: str, solver: Solver, dtype: torch.dtype, graphs: Replays
) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = proxprop.convert(make().to("cuda", dtype), solver, include_last=True)
    for _ in range(TIMES):
        x = torch.randn(shape, dtype=dtype, device="cuda")
        G = torch.randn_like(model(x))
        found, expected = directions(model, x, G), eager_directions(model, x, G)
        for a, b in zip(found, expected, strict=True):
            error = (a - b).norm() / b.norm()
            assert error <= {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float64: 1e-10}[dtype]
    assert [captured is not None for captured in graphs.kept.values()] == [True]


@GPU
def test_graphs_of_changing_sizes_share_their_memory(graphs: Replays) -> None:
    layer, sizes = proxprop.nn.Linear(512, 512, device="cuda"), (64, 200, 256, 31)
    held = []
    for samples in sizes:
        for _ in range(TIMES):
            x, G = torch.randn(samples, 512, device="cuda"), torch.randn(samples, 512, device="cuda")
            found, expected = directions(layer, x, G), eager_directions(layer, x, G)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected[0].abs().max()))
        held.append(replay.held_bytes(torch.device("cuda", torch.cuda.current_device())))
    assert len(graphs.kept) == len(sizes)
    assert held[-1] == held[sizes.index(max(sizes))]  # what is smaller finds room


@GPU
def test_other_streams_wait_for_the_pool(graphs: Replays) -> None:
    layer, streams = proxprop.nn.Linear(256, 256, device="cuda"), [torch.cuda.Stream() for _ in range(3)]
    for turn in range(4 * TIMES):
        x, G = torch.randn(128, 256, device="cuda"), torch.randn(128, 256, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 3]):
            found = directions(layer, x, G)
        torch.cuda.synchronize()
        torch.testing.assert_close(found, eager_directions(layer, x, G), rtol=1e-3, atol=1e-4)
    assert len(graphs.kept) == 1


@GPU
def test_switched_off_nothing_is_held(graphs: Replays) -> None:
    layer = proxprop.nn.Linear(64, 64, device="cuda")
    for _ in range(TIMES):
        directions(layer, torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda"))
    assert graphs.kept
    proxprop.use_cuda_graphs(False)
    try:
        assert replay.replays(torch.ones(1, device="cuda")) is None
    finally:
        proxprop.use_cuda_graphs(True)


@GPU
def test_a_failed_solve_is_warned_of_once(graphs: Replays) -> None:
    layer = proxprop.nn.Linear(64, 64, solver=Exact(), tau_theta=1e8, device="cuda")

    def solve() -> None:
        for _ in range(40):
            x = torch.randn(32, 2, device="cuda") @ torch.randn(2, 64, device="cuda")
            layer(x).sum().backward()
            torch.cuda.synchronize()

    with pytest.warns(RuntimeWarning, match="not positive definite") as caught:
        solve()
    assert len(caught) == 1
    assert len(graphs.kept) == 1


def test_memory_of_other_graphs_is_told_from_common_memory() -> None:
    segments = [
        {"address": 1000, "total_size": 500, "segment_pool_id": (0, 0)},
        {"address": 2000, "total_size": 500, "segment_pool_id": (0, 1)},
    ]
    found = [replay.is_common(address, segments) for address in (999, 1000, 1499, 1500, 2000)]
    assert found == [False, True, True, False, False]
