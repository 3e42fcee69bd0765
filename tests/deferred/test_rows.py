"""Deferred mode with rows in the place of S: the same step as from S and as immediate mode, and as accurate."""

import copy
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import proxprop
from cases import randn, relative_error
from proxprop import CG, Attached, Exact, Running
from proxprop.deferred.preconditioner import RowSolve, rows_pay
from proxprop.settings import Settings
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Sizes, Solver
from proxprop.transfer import LinearTransfer
from training import handle_of, told_of_failure

SOLVERS = pytest.mark.parametrize("solver", [Exact(), CG(1), CG(3), CG(10), CG(3, per_output=False)], ids=str)
FEW = pytest.mark.parametrize("solver", [Exact(), CG(3)], ids=str)
SCALINGS = pytest.mark.parametrize("scaling", ["paper", "gradient"])
FEATURES, OUTPUTS = 40, 6

Calls = Sequence[tuple[Tensor, Tensor]]


EXACT = Exact()


def wide(solver: Solver = EXACT, **options) -> proxprop.nn.Linear:
    """A layer that is much wider than its batches."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "tau_theta": 0.7, **options}
    return proxprop.nn.Linear(FEATURES, OUTPUTS, solver=solver, **options)


def attached(layer: nn.Module, **options) -> tuple[torch.optim.Optimizer, Attached]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    return optimizer, proxprop.attach(optimizer, layer, **options)


def batches(*sizes: int) -> Calls:
    """Inputs and output gradients."""
    return [(randn(size, FEATURES, seed=i), randn(size, OUTPUTS, seed=9 + i)) for i, size in enumerate(sizes)]


def run(layer: nn.Module, calls: Calls) -> None:
    for x, G in calls:
        layer(x).backward(G)


def grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def kept(handle: Attached) -> list[int]:
    """How many rows the first system holds, call by call."""
    return [len(rows) for rows in handle.systems[0]._rows]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert relative_error(found[name], expected[name]) < tolerance, name


def from_s(layer: proxprop.nn.Linear, act: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """What a step makes of the same events where S is summed."""
    layer = copy.deepcopy(layer)
    layer.zero_grad()
    layer.space = FEATURE
    optimizer, handle = attached(layer)
    act(layer)
    assert not kept(handle)
    optimizer.step()
    return grads(layer)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 1, 5), (2, 0, 5)], ids=str)
@SOLVERS
@SCALINGS
@pytest.mark.parametrize("bias", [True, False])
def test_the_step_is_that_of_s_and_of_one_batch(sizes, solver: Solver, scaling: str, bias: bool) -> None:
    layer = wide(solver, scaling=scaling, bias=bias)
    calls = batches(*sizes)
    whole = copy.deepcopy(layer)
    whole(torch.cat([x for x, _ in calls])).backward(torch.cat([G for _, G in calls]))
    expected = from_s(layer, lambda each: run(each, calls))
    optimizer, handle = attached(layer)
    run(layer, calls)
    assert kept(handle) == list(sizes)
    optimizer.step()
    assert not handle.systems[0].holds
    assert_same(grads(layer), expected)
    assert_same(grads(layer), grads(whole))


@FEW
@SCALINGS
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_only_what_is_trained_is_solved_for(frozen: str, solver: Solver, scaling: str) -> None:
    layer = wide(solver, scaling=scaling)
    layer.get_parameter(frozen).requires_grad_(False)
    calls = batches(2, 5)
    expected = from_s(layer, lambda each: run(each, calls))
    optimizer, handle = attached(layer)
    run(layer, calls)
    assert bool(kept(handle)) is (frozen == "bias")
    optimizer.step()
    assert_same(grads(layer), expected)


@FEW
@SCALINGS
@pytest.mark.parametrize("bias", [True, False])
def test_rows_that_become_too_many_are_summed(solver: Solver, scaling: str, bias: bool) -> None:
    layer = wide(solver, scaling=scaling, bias=bias)
    calls = batches(4, 3, 50, 2)
    expected = from_s(layer, lambda each: run(each, calls))
    optimizer, handle = attached(layer)
    run(layer, calls[:2])
    assert kept(handle) == [4, 3]
    run(layer, calls[2:])
    assert kept(handle) == []
    optimizer.step()
    assert_same(grads(layer), expected)


@FEW
def test_no_more_is_kept_than_s_would_take(solver: Solver) -> None:
    layer = wide(solver, space=SAMPLE if isinstance(solver, Exact) else MATRIX_FREE)
    _, handle = attached(layer)
    for total in range(5, 70, 5):
        run(layer, batches(5))
        assert (sum(kept(handle)) == total) is (total <= FEATURES + 1)


@FEW
@pytest.mark.parametrize("second", [3, 60], ids=["few", "many"])
def test_a_layer_called_twice(solver: Solver, second: int) -> None:
    (x, _), (y, _) = batches(4, second)

    def twice(each: nn.Module) -> None:
        (each(x).square().sum() + each(y).tanh().sum()).backward()

    layer = wide(solver, scaling="gradient")
    expected = from_s(layer, twice)
    optimizer, handle = attached(layer)
    twice(layer)
    optimizer.step()
    assert not handle.systems[0].holds
    assert_same(grads(layer), expected)


@FEW
def test_a_retained_graph_counts_once(solver: Solver) -> None:
    (x, _), (y, G) = batches(4, 3)

    def again(each: nn.Module) -> None:
        loss = each(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        each(y).backward(G)

    layer = wide(solver)
    expected = from_s(layer, again)
    optimizer, handle = attached(layer)
    again(layer)
    assert kept(handle) == [4, 3]
    optimizer.step()
    assert_same(grads(layer), expected)


@FEW
def test_autograd_grad_keeps_nothing(solver: Solver) -> None:
    layer, calls = wide(solver), batches(4, 3)
    optimizer, handle = attached(layer)
    run(layer, calls[:1])
    found = torch.autograd.grad(layer(calls[1][0]).sum(), list(layer.parameters()))
    assert all(gradient.isfinite().all() for gradient in found)
    assert kept(handle) == [4]
    optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls[:1])))


@FEW
@pytest.mark.parametrize("set_to_none", [True, False])
@SCALINGS
def test_rows_go_with_their_gradient(solver: Solver, set_to_none: bool, scaling: str) -> None:
    """A step that was skipped leaves nothing behind, whichever way the gradient is zeroed."""
    layer = wide(solver, scaling=scaling)
    given_up, calls = batches(6), batches(3, 4)[::-1]
    expected = from_s(layer, lambda each: run(each, calls))
    optimizer, _ = attached(layer)
    run(layer, given_up)
    optimizer.zero_grad(set_to_none=set_to_none)
    run(layer, calls)
    optimizer.step()
    assert_same(grads(layer), expected)
    optimizer.zero_grad(set_to_none=set_to_none)
    run(layer, calls)
    optimizer.step()
    assert_same(grads(layer), expected)


@FEW
def test_what_is_in_grad_at_the_step_is_solved_for(solver: Solver) -> None:
    """Scaled, clipped, each parameter by its own factor, or something else altogether."""
    calls = batches(3, 4)
    layer = wide(solver)
    changes: list[Callable[[nn.Module], object]] = [
        lambda each: [p.grad.mul_(1e-4) for p in each.parameters()],
        lambda each: nn.utils.clip_grad_norm_(each.parameters(), 1e-3),
        lambda each: each.bias.grad.mul_(-3.0),
        lambda each: [p.grad.add_(p.detach()) for p in each.parameters()],
        lambda each: [p.grad.copy_(randn(*p.shape, seed=5)) for p in each.parameters()],
    ]
    for change in changes:

        def act(each: nn.Module, change=change) -> None:
            run(each, calls)
            change(each)

        each = copy.deepcopy(layer)
        optimizer, handle = attached(each)
        act(each)
        assert kept(handle) == [3, 4]
        optimizer.step()
        assert_same(grads(each), from_s(layer, act))


@FEW
def test_a_gradient_that_was_changed_between_passes_is_summed_for(solver: Solver) -> None:
    calls = batches(3, 4)

    def act(each: nn.Module) -> None:
        run(each, calls[:1])
        each.weight.grad.mul_(0.5)
        run(each, calls[1:])

    layer = wide(solver)
    optimizer, _ = attached(layer)
    act(layer)
    optimizer.step()
    assert_same(grads(layer), from_s(layer, act))


@FEW
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_counts_once(solver: Solver, use_reentrant: bool) -> None:
    def act(each: nn.Module) -> None:
        for x, G in batches(3, 4):
            checkpoint(each, x.requires_grad_(), use_reentrant=use_reentrant).backward(G)

    layer = wide(solver)
    optimizer, handle = attached(layer)
    act(layer)
    assert kept(handle) == [3, 4]
    optimizer.step()
    assert_same(grads(layer), from_s(layer, act))


def test_a_batch_may_be_overwritten_by_the_next() -> None:
    layer, calls = wide(), batches(4, 4)
    optimizer, _ = attached(layer)
    buffer = torch.empty(4, FEATURES).double()
    for x, G in calls:
        layer(buffer.copy_(x)).backward(G)
    buffer.zero_()
    optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls)))


def test_a_view_is_kept_without_what_it_is_a_view_of() -> None:
    layer = wide()
    _, handle = attached(layer)
    layer(randn(4, 30, FEATURES, seed=1)[:, 0]).sum().backward()
    (rows,) = handle.systems[0]._rows
    assert rows.untyped_storage().nbytes() == 4 * FEATURES * 8


@FEW
def test_settings_may_change_before_the_step(solver: Solver) -> None:
    calls = batches(3, 4)
    layer = wide(solver)
    optimizer, handle = attached(layer)
    run(layer, calls)
    layer.tau_theta, layer.space = 0.1, FEATURE
    assert kept(handle)
    optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls)))


def test_bfloat16_rows_stay_bfloat16() -> None:
    calls = [(x.float(), G) for x, G in batches(3, 4)]

    def act(each: nn.Module) -> None:
        for x, G in calls:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = each(x)
            y.backward(G.to(y.dtype))

    layer = wide(dtype=torch.float32)
    optimizer, handle = attached(layer)
    act(layer)
    assert {rows.dtype for rows in handle.systems[0]._rows} == {torch.bfloat16}
    assert layer.weight.grad.dtype == torch.float32
    optimizer.step()
    assert_same(grads(layer), from_s(layer, act), tolerance=1e-4)


@FEW
@pytest.mark.parametrize("space", [FEATURE, None])
def test_a_step_inside_autocast_is_solved_in_full_precision(solver: Solver, space: str | None) -> None:
    layer, calls = wide(solver, space=space, dtype=torch.float32), batches(3, 4)
    calls = [(x.float(), G.float()) for x, G in calls]
    optimizer, _ = attached(layer)
    run(layer, calls)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls)), tolerance=1e-5)


def test_s_can_be_looked_at() -> None:
    layer, calls = wide(bias=False), batches(3, 4)
    optimizer, handle = attached(layer)
    run(layer, calls)
    A = torch.cat([x for x, _ in calls])
    S = handle.systems[0].S
    assert S is not None
    assert relative_error(S[0], A.mT @ A) < 1e-12
    optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls)))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_a_layer_without_outputs_has_nothing_to_solve(solver) -> None:
    layer = proxprop.nn.Linear(9, 0, solver=solver)
    optimizer, handle = attached(layer)
    layer(torch.ones(2, 9)).sum().backward()
    assert kept(handle)
    optimizer.step()
    assert layer.weight.grad.shape == (0, 9)


def test_where_s_is_needed_it_is_summed() -> None:
    layer = wide()
    _, handle = attached(layer, running=Running())
    run(layer, batches(3))
    assert not kept(handle)
    tied = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 2)).double()
    tied[1].weight = tied[0].weight
    _, handle = attached(proxprop.convert(tied, Exact()))
    tied(randn(3, 40, seed=1)).sum().backward()
    assert not kept(handle)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@FEW
def test_a_compiled_pass_and_an_eager_one_are_summed(solver: Solver) -> None:
    layer, calls = wide(solver, scaling="gradient"), batches(3, 4)
    expected = from_s(layer, lambda each: run(each, calls))
    optimizer, _ = attached(layer)
    run(layer, calls[:1])
    run(torch.compile(layer, backend="aot_eager", fullgraph=True), calls[1:])
    optimizer.step()
    assert_same(grads(layer), expected)


def test_a_direction_is_not_added_to() -> None:
    layer, calls = wide(), batches(3, 4)
    optimizer, _ = attached(layer)
    run(layer, calls[:1])
    optimizer.step()
    run(layer, calls[1:])
    with pytest.raises(RuntimeError, match="still held the direction of the last step"):
        optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@FEW
def test_non_finite_rows_reach_the_direction(solver: Solver, value: float) -> None:
    layer, calls = wide(solver), batches(3, 4)
    optimizer, _ = attached(layer)
    bad = calls[0][0].clone()
    bad[1, 2] = value
    layer(bad).backward(calls[0][1])
    with told_of_failure(solver, value):
        optimizer.step()
    assert not bool(layer.weight.grad.isfinite().any())
    optimizer.zero_grad()
    run(layer, calls)
    optimizer.step()
    assert_same(grads(layer), from_s(layer, lambda each: run(each, calls)))


def test_a_failed_factorisation_warns_and_takes_a_scaled_gradient() -> None:
    layer = wide(bias=False, tau_theta=1e12, dtype=torch.float32)
    optimizer, _ = attached(layer)
    layer(torch.full((4, FEATURES), 1e3)).sum().backward()
    plain = layer.weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="is not positive definite in this precision"):
        optimizer.step()
    assert relative_error(layer.weight.grad, plain / (4 * FEATURES * 1e6)) < 1e-5


EVENTS = st.sampled_from(
    ["backward", "many", "again", "zero to none", "zero in place", "step", "solve", "grad", "clip", "noise"]
)


def act(layer: nn.Module, optimizer: torch.optim.Optimizer, event: str, number: int) -> None:
    size = 45 if event == "many" else 1 + number % 4
    x, G = randn(size, FEATURES, seed=number), randn(size, OUTPUTS, seed=99 + number)
    if event in ("backward", "many", "again"):
        output = layer(x)
        output.backward(G, retain_graph=True)
        if event == "again":
            output.backward(G)
    elif event.startswith("zero"):
        layer.zero_grad(set_to_none=event == "zero to none")
    elif event == "grad":
        torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    elif event in ("step", "solve"):
        optimizer.step() if event == "step" else handle_of(layer).solve()
    elif layer.weight.grad is not None:
        layer.weight.grad.mul_(0.3) if event == "clip" else layer.weight.grad.add_(0.01)


@given(st.lists(EVENTS, min_size=1, max_size=12))
@settings(max_examples=150)
def test_any_order_of_events_gives_the_step_of_s(events: list[str]) -> None:
    """Rows and S go through the same, and end in the same gradients or the same error."""
    found = []
    for space in (None, FEATURE):
        layer = wide(scaling="gradient", space=space)
        optimizer, _ = attached(layer)
        seen: list[object] = []
        try:
            for number, event in enumerate(events):
                act(layer, optimizer, event, number)
                seen.append(grads(layer))
        except RuntimeError as error:
            seen.append(str(error))
        found.append(seen)
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        if isinstance(other, str):
            assert one == other
        else:
            assert_same(one, other)


def rows_of(kind: str, samples: int, features: int) -> Tensor:
    """Rows of different spectra."""
    A = randn(samples, features, seed=1)
    if kind == "activations":
        return (randn(samples, 20, seed=2) @ randn(20, features, seed=3) + 0.3 * A).relu()
    if kind == "repeated":
        return A[: samples // 2].repeat(2, 1)
    if kind == "decaying":
        U, _, V = torch.linalg.svd(A, full_matrices=False)
        return (U * torch.logspace(2, -4, samples).double()) @ V
    return A


@pytest.mark.parametrize("tau_theta", [1e-2, 1.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize("kind", ["gaussian", "activations", "repeated", "decaying"])
@pytest.mark.parametrize("changed", [False, True])
def test_float32_is_as_accurate_as_a_cholesky_factor_of_s(kind: str, tau_theta: float, changed: bool) -> None:
    """Also where B is not in the row space of A, where the factor of S is far less accurate, and where it fails."""
    A = rows_of(kind, 64, 256).float()
    B = randn(256, 32, seed=4).float() if changed else A.mT @ randn(64, 32, seed=5).float()
    exact = torch.linalg.solve(A.double().mT @ A.double() + torch.eye(256).double() / tau_theta, B.double())
    S = Exact().features((A.mT @ A)[None], B[None], 1 / tau_theta)
    transfer = LinearTransfer([A], torch.empty(64, 32), [torch.Size([32, 256]), None])
    found = RowSolve(transfer, Settings(Exact(), tau_theta)).apply(B[None])
    assert bool(found.failed) <= bool(S.failed)
    error = relative_error(found.value[0].double(), exact)
    assert error < 1.2 * relative_error(S.value[0].double(), exact) + 1e-6


@SOLVERS
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_both_ways_a_weight_is_stored(solver: Solver, transposed: bool, bias: bool) -> None:
    A, B = randn(9, 30, seed=1), randn(30 + bias, 7, seed=2)[None]
    shapes = [torch.Size([30, 7] if transposed else [7, 30]), torch.Size([7]) if bias else None]
    transfer = LinearTransfer([A], torch.empty(9, 7), shapes, transposed)
    expected = solver.features(transfer.gram(), B, 2.0).value
    found = RowSolve(transfer, Settings(solver, 0.5)).apply(B.clone()).value
    assert relative_error(found, expected) < 1e-9


PAPER = {"first": (3073, 4000), "second": (4001, 1000), "third": (1001, 4000)}


@pytest.mark.parametrize(
    ("solver", "layer", "samples", "pays"),
    [
        (Exact(), "first", 500, True),
        (Exact(), "second", 500, True),
        (Exact(), "third", 500, False),
        (Exact(), "first", 3000, False),
        (Exact(), "first", 0, False),
        (CG(3), "first", 500, True),
        (CG(3), "second", 500, True),
        (CG(3), "third", 1000, False),
        (CG(3), "second", 5000, False),
    ],
)
def test_which_layers_keep_rows(solver: Solver, layer: str, samples: int, pays: bool) -> None:
    features, outputs = PAPER[layer]
    sizes = Sizes(1, samples, features, outputs)
    assert rows_pay(sizes, Settings(solver)) is pays
    assert not rows_pay(sizes, Settings(solver, space=FEATURE))


def test_a_meta_layer_gives_shapes() -> None:
    layer = wide().to("meta")
    optimizer, handle = attached(layer)
    layer(torch.ones(3, FEATURES, device="meta").double()).sum().backward()
    assert kept(handle) == [3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert layer.weight.grad.is_meta
