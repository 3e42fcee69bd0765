"""`Running(update_every=...)`: S of some steps only, and between them torch's own layers and the operators that are kept."""

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import proxprop
from cases import randn, relative_error
from proxprop import Attached, Exact, Running
from proxprop.deferred import writer
from proxprop.solvers import Solver
from running_averages import SOLVERS, attached, batches, rows, stated, stepped
from training import Tied, assert_same, handle_of

works = pytest.mark.compatibility
FEATURE = "Running averages of S, observed in some steps (`Running(update_every=...)`)"
RUNNING = Running(decay=0.8, update_every=2, invert_every=4, damping=0.3)


class Stated:
    """S̄ and N̄ as `Running` states them, from the S of observed steps."""

    def __init__(self, running: Running, solver: Solver) -> None:
        self.running, self.solver = running, solver
        self.S, self.N, self.step = torch.zeros(5, 5, dtype=torch.float64), 0.0, 0

    def direction(self, x: Tensor, B: Tensor) -> Tensor:
        """D of the next step, with rows x and gradient `B [features, outputs]`."""
        if self.step % self.running.update_every == 0:
            kept = self.running.decay**self.running.update_every
            self.S, self.N = kept * self.S + rows(x).T @ rows(x), kept * self.N + len(x)
        if self.step % self.running.invert_every == 0:
            self.C = self.S / self.N
        self.step += 1
        return stated(self.C, B, self.running.damping, self.solver)


def gradient(x: Tensor, G: Tensor) -> Tensor:
    return rows(x).T @ G


def held(layer: nn.Module) -> Tensor:
    """What is in `.grad`, weight above bias, as `[features, outputs]`."""
    return torch.cat([layer.weight.grad.T, layer.bias.grad[None]])


def after_observed(running: Running = RUNNING, **options) -> tuple[nn.Module, torch.optim.Optimizer, Stated]:
    """A layer that has taken its first step, and is not observed in the one that follows."""
    layer, optimizer = attached(Exact(), running, **options)
    expected = Stated(running, Exact())
    x, G = batches(1)[0]
    assert relative_error(stepped(layer, optimizer, x, G), expected.direction(x, gradient(x, G))) < 1e-12
    optimizer.zero_grad()
    return layer, optimizer, expected


@works(FEATURE, mode="deferred")
@SOLVERS
@pytest.mark.parametrize(("update_every", "invert_every"), [(1, 1), (2, 2), (2, 4), (3, 6)])
def test_the_direction_is_the_stated_one(solver: Solver, update_every: int, invert_every: int) -> None:
    running = Running(decay=0.8, update_every=update_every, invert_every=invert_every, damping=0.3)
    layer, optimizer = attached(solver, running)
    expected = Stated(running, solver)
    for x, G in batches(9):
        assert relative_error(stepped(layer, optimizer, x, G), expected.direction(x, gradient(x, G))) < 1e-12


def test_a_step_between_runs_torchs_own_layer() -> None:
    layer, optimizer, _ = after_observed()
    (system,) = layer._attached.handle.systems
    x, G = batches(2)[1]
    output = layer(x)
    assert type(output.grad_fn).__name__ == "AddmmBackward0"
    output.backward(G)
    assert not system.holds
    assert relative_error(held(layer), gradient(x, G)) < 1e-12
    optimizer.step()
    optimizer.zero_grad()
    assert type(layer(x).grad_fn).__name__ == "TapBackward"


class Attention(nn.Module):
    """Cross- and self-attention of one module, so that its packed projection is cut in different ways."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.attention(x, 2 * x, x.tanh(), need_weights=False)[0]


def lookup(sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 4))


MODELS = [
    ("embedding", lambda: lookup(False), (6, 3)),
    ("sparse", lambda: lookup(True), (6, 3)),
    ("attention", Attention, (3, 5, 4)),
    ("attention-no-bias", lambda: Attention(bias=False), (3, 5, 4)),
    ("attention-widths", lambda: nn.Sequential(Attention(kdim=4, vdim=4)), (3, 5, 4)),
    ("convolutions", lambda: nn.Sequential(nn.Conv1d(4, 4, 2, groups=2), nn.Conv1d(4, 4, 2, groups=2), nn.ConvTranspose1d(4, 4, 2)), (3, 4, 6)),
    ("norms", lambda: nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.BatchNorm1d(5)), (3, 5, 4)),
    ("linear", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)), (6, 4)),
    ("tied", lambda: Tied("own"), (6, 4)),
]  # fmt: skip


def data(case: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if case in ("embedding", "sparse"):
        return torch.randint(7, shape, generator=torch.Generator().manual_seed(seed))
    return randn(*shape, seed=seed)


def directions(case: str, make: Callable, shape: tuple[int, ...], running: Running, zero: bool) -> Iterator:
    """What five steps of micro-batches leave in `.grad`."""
    torch.manual_seed(0)
    model = proxprop.convert(make().double(), Exact(), module_types="all", include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    proxprop.attach(optimizer, model, running=running)
    for step in range(5):
        optimizer.zero_grad(set_to_none=not zero)
        for part in data(case, shape, step).split(2):
            model(part).square().sum().backward()
        optimizer.step()
        found = {name: p.grad for name, p in model.named_parameters()}
        yield {name: g.to_dense().clone() for name, g in found.items() if g is not None}


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("case", "make", "shape"), MODELS, ids=[case for case, *_ in MODELS])
def test_without_memory_layers_of_every_kind_do_not_notice(case, make, shape, in_place: bool) -> None:
    """Of an average that forgets at once, only steps in which it is inverted matter: those that are observed."""
    every, some = (Running(decay=0.0, update_every=steps, invert_every=2) for steps in (1, 2))
    pairs = zip(*(directions(case, make, shape, r, in_place) for r in (every, some)), strict=True)
    for expected, found in pairs:
        assert_same(found, expected)


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_is_thrown_away_is_not_a_step(to_none: bool) -> None:
    layer, optimizer, expected = after_observed()
    for x, G in batches(4)[1:]:
        layer(x).backward(1000 * G)
        optimizer.zero_grad(set_to_none=to_none)
        layer(x).backward(G)
        optimizer.step()
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12
        optimizer.zero_grad(set_to_none=to_none)


@works(FEATURE, mode="deferred")
def test_a_scaler_skips_steps() -> None:
    layer, optimizer, expected = after_observed()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i, (x, G) in enumerate(batches(5)[1:]):
        for broken in (True, False) if i % 2 else (False,):
            optimizer.zero_grad()
            scaled = scaler.scale((layer(x) * G).sum())
            (scaled * torch.inf if broken else scaled).backward()
            scaler.step(optimizer)
            scaler.update()
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("to_none", [True, False])
def test_a_direction_that_was_clipped_is_not_solved_again(to_none: bool) -> None:
    layer, optimizer, expected = after_observed()
    for x, G in batches(4)[1:]:
        layer(x).backward(G)
        handle_of(layer).solve()
        D = expected.direction(x, gradient(x, G))
        assert relative_error(held(layer), D) < 1e-12
        nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
        optimizer.step()
        handle_of(layer).solve()
        assert relative_error(held(layer), 0.5 * D / D.norm()) < 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
        optimizer.zero_grad(set_to_none=to_none)


@works(FEATURE, mode="deferred")
def test_a_direction_that_was_solved_for_and_not_stepped_on() -> None:
    """Each solve is a step, as in plain deferred mode."""
    layer, optimizer, expected = after_observed()
    for x, G in batches(4)[1:]:
        layer(x).backward(G)
        handle_of(layer).solve()
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12
        optimizer.zero_grad(set_to_none=False)


@works(FEATURE, mode="deferred")
def test_closures_are_solved_after_each_call() -> None:
    layer, optimizer, expected = after_observed()
    x, G = batches(2)[1]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer(x) * G).sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12


@works(FEATURE, mode="deferred")
def test_several_optimizers_solve_once() -> None:
    layer = proxprop.nn.Linear(4, 3, solver=Exact(), dtype=torch.float64)
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in (layer.weight, layer.bias)]
    proxprop.attach(optimizers, layer, running=RUNNING)
    expected = Stated(RUNNING, Exact())
    for x, G in batches(4):
        layer.zero_grad()
        layer(x).backward(G)
        for optimizer in optimizers:
            optimizer.step()
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("to_none", [True, False])
def test_a_layer_counts_the_steps_it_is_used_in(to_none: bool) -> None:
    model = nn.ModuleList([proxprop.nn.Linear(4, 3, solver=Exact(), dtype=torch.float64) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model, running=RUNNING)
    expected = [Stated(RUNNING, Exact()) for _ in model]
    for step, (x, G) in enumerate(batches(7)):
        used = [0, 1] if step % 3 == 0 else [step % 2]
        optimizer.zero_grad(set_to_none=to_none)
        for i in used:
            model[i](x).backward(G)
        optimizer.step()
        for i in used:
            assert relative_error(held(model[i]), expected[i].direction(x, gradient(x, G))) < 1e-12


@works(FEATURE, mode="deferred")
def test_retained_graphs() -> None:
    """A graph that is gone through twice adds its gradient twice, and S of an observed step's only once."""
    layer, optimizer = attached(Exact(), RUNNING)
    expected = Stated(RUNNING, Exact())
    for x, G in batches(4):
        optimizer.zero_grad()
        output = layer(x)
        output.backward(G, retain_graph=True)
        output.backward(G)
        optimizer.step()
        assert relative_error(held(layer), expected.direction(x, 2 * gradient(x, G))) < 1e-12


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls(reentrant: bool) -> None:
    layer, optimizer = attached(Exact(), RUNNING)
    expected = Stated(RUNNING, Exact())
    for x, G in batches(4):
        optimizer.zero_grad()
        x.requires_grad_()  # a reentrant checkpoint needs one
        first, second = (checkpoint(layer, part, use_reentrant=reentrant) for part in (x[:2], x[2:]))
        torch.cat([first, second]).backward(G)
        optimizer.step()
        assert relative_error(held(layer), expected.direction(x.detach(), gradient(x.detach(), G))) < 1e-12


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["at first", "between", "later"])
def test_a_step_that_is_given_up_leaves_nothing_where_the_next_one_does_not_use_the_layer(steps: int) -> None:
    """Neither its S in the average nor a step in the count."""
    layer, optimizer = attached(Exact(), RUNNING)
    expected = Stated(RUNNING, Exact())
    given = batches(steps + 6)
    spike, spike_G = given.pop(steps)
    for x, G in given[:steps]:
        assert relative_error(stepped(layer, optimizer, x, G), expected.direction(x, gradient(x, G))) < 1e-12
    optimizer.zero_grad()
    layer(1e3 * spike).backward(spike_G)
    optimizer.zero_grad()
    optimizer.step()
    for x, G in given[steps:]:
        assert relative_error(stepped(layer, optimizer, x, G), expected.direction(x, gradient(x, G))) < 1e-12


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["at first", "between", "later"])
@pytest.mark.parametrize("damping", [0.3, None])
def test_what_is_given_up_in_place_is_a_step_without_samples(steps: int, damping: float | None) -> None:
    """Where the next step does not use the layer: its gradient is zero, but there, so that the optimizer steps on it."""
    running = replace(RUNNING, damping=damping)
    found = []
    for scale in (1.0, 1e3):
        layer, optimizer = attached(Exact(), running)
        given = batches(steps + 6)
        spike, spike_G = given.pop(steps)
        for x, G in given[:steps]:
            stepped(layer, optimizer, x, G)
        optimizer.zero_grad()
        layer(scale * spike).backward(scale * spike_G)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert not held(layer).any()
        found.append([stepped(layer, optimizer, x, G) for x, G in given[steps:]])
    for ordinary, spiked in zip(*found, strict=True):
        assert relative_error(spiked, ordinary) < 1e-12


def test_s_of_a_graph_that_comes_a_step_late_is_dropped() -> None:
    layer, optimizer = attached(Exact(), RUNNING)
    expected = Stated(RUNNING, Exact())
    (x, G), (late, late_G), *later = batches(5)
    output = layer(late)  # in the observed step
    for rows_, forward, B in ((x, None, G), (late, output, late_G), *((y, None, H) for y, H in later)):
        optimizer.zero_grad()
        (layer(rows_) if forward is None else forward).backward(B)
        optimizer.step()
        assert relative_error(held(layer), expected.direction(rows_, gradient(rows_, B))) < 1e-12


def test_a_gradient_that_was_added_to_a_direction_is_refused() -> None:
    layer, optimizer, expected = after_observed()
    x, G = batches(2)[1]
    layer(x).backward(G)
    optimizer.step()
    expected.direction(x, gradient(x, G))
    for _ in range(2):  # the step that follows is observed, the one after it is not
        layer(x).backward(G)
        with pytest.raises(RuntimeError, match=r"still held the direction of the last step"):
            optimizer.step()
        layer(x).backward(G)
        with pytest.raises(RuntimeError, match=r"still held the direction of the last step"):
            handle_of(layer).solve()
        optimizer.zero_grad()
        layer(x).backward(G)
        optimizer.step()
        assert relative_error(held(layer), expected.direction(x, gradient(x, G))) < 1e-12


def test_a_gradient_that_lies_where_the_last_direction_was_is_another_one() -> None:
    """As memory is given out again, and also if it was written to as often: scaled and clipped, say."""
    layer, optimizer, expected = after_observed(Running(update_every=4, invert_every=4))
    (x, G), (y, H) = batches(3)[1:]
    assert relative_error(stepped(layer, optimizer, x, G), expected.direction(x, gradient(x, G))) < 1e-12
    before = [p.grad for p in layer.parameters()]
    optimizer.zero_grad()
    layer(y).backward(H)
    for p, old in zip(layer.parameters(), before, strict=True):
        p.grad = torch.empty_like(old).set_(old).copy_(p.grad)
        while p.grad._version <= old._version:
            p.grad.mul_(1.0)
    optimizer.step()
    assert relative_error(held(layer), expected.direction(y, gradient(y, H))) < 1e-12


def test_a_gradient_that_only_autograd_grad_asked_for_is_not_a_step() -> None:
    layer, optimizer, _ = after_observed()
    x, G = batches(2)[1]
    layer(x).backward(G)
    handle_of(layer).solve()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    before = held(layer)
    torch.autograd.grad((layer(x) * G).sum(), [layer.weight, layer.bias])
    optimizer.step()
    assert torch.equal(held(layer), before)


def test_a_step_between_does_not_warn_and_a_pass_that_skips_an_observed_s_does() -> None:
    layer, optimizer, _ = after_observed()
    x, G = batches(2)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x).backward(G)
        layer.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match="added to the gradient but not to S"):
        layer.weight.square().sum().backward()


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("thawed", [False, True])
def test_a_step_that_trains_other_parameters_is_observed(thawed: bool) -> None:
    layer, optimizer = attached(Exact(), Running(decay=0.8, update_every=4, invert_every=4))
    layer.bias.requires_grad_(not thawed)
    (first, G), (x, H), (y, K) = batches(3)
    layer(first).backward(G)
    optimizer.step()
    optimizer.zero_grad()
    layer.bias.requires_grad_(thawed)
    A, B = (rows(x), rows(y)) if thawed else (x, y)
    for input, output, M in ((x, H, A), (y, K, B)):
        layer(input).backward(output)
        optimizer.step()
        found = held(layer) if thawed else layer.weight.grad.T
        expected = stated(A.T @ A / len(x), M.T @ output, 0.3, Exact())
        assert relative_error(found, expected) < 1e-12
        optimizer.zero_grad()


def test_a_gradient_given_up_before_a_step_that_is_observed_is_not_one_that_came_after_it() -> None:
    layer, optimizer, _ = after_observed(Running(update_every=4, invert_every=4))
    (x, G), (y, H) = batches(3)[1:]
    layer(x).backward(G)  # to a layer that rests
    optimizer.zero_grad()
    layer.bias.requires_grad_(False)
    layer(y).backward(H)
    handle_of(layer).solve()
    D = layer.weight.grad.clone()
    optimizer.step()
    assert torch.equal(layer.weight.grad, D)  # solved once


@pytest.mark.parametrize("late", ["between backward and the step", "in a part of a model"])
def test_a_step_between_that_trains_other_parameters_unnoticed_says_so(late: str) -> None:
    model = nn.Sequential(proxprop.nn.Linear(4, 3, solver=Exact(), dtype=torch.float64))
    layer = model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model, running=Running(update_every=4, invert_every=4))
    (x, G), (y, H), (z, K) = batches(3)
    stepped(layer, optimizer, x, G)
    optimizer.zero_grad()
    if late.startswith("in"):
        layer.bias.requires_grad_(False)
    (layer if late.startswith("in") else model)(y).backward(H)
    layer.bias.requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="0: this step keeps BackProp's gradient"):
        optimizer.step()
    assert relative_error(layer.weight.grad.T, y.T @ H) < 1e-12
    optimizer.zero_grad()
    model(z).backward(K)
    optimizer.step()
    assert relative_error(layer.weight.grad.T, stated(z.T @ z / len(z), z.T @ K, 0.3, Exact())) < 1e-12


@pytest.mark.parametrize("used", [1, 0])
def test_a_bias_beside_a_tied_weight_may_be_frozen(used: int) -> None:
    """Whether or not its own layer is used in the step that follows."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3).double(), nn.Linear(4, 3).double()])
    model[1].weight = model[0].weight
    proxprop.convert(model, Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = proxprop.attach(optimizer, model, running=Running(decay=0.5, update_every=1, invert_every=4))
    (x, G), (y, H), (z, K) = batches(3)
    model[0](x).backward(G)
    model[1](y).backward(H)
    optimizer.step()
    optimizer.zero_grad()
    model[1].bias.requires_grad_(False)
    model[used](z).backward(K)
    assert handle.state_dict().keys()
    optimizer.step()
    if used:  # its average, without the bias, begins anew
        old, new = 0.5 * rows(x).T @ rows(x), functional.pad(z.T @ z, (0, 1, 0, 1))
        N, B = 0.5 * len(x) + len(z), functional.pad(z.T @ K, (0, 0, 0, 1))
    else:
        old, new = 0.5 * rows(x).T @ rows(x), rows(z).T @ rows(z)
        N, B = 0.5 * len(x) + len(z), rows(z).T @ K
    D = stated((old + new) / N, B, 0.3, Exact())
    assert relative_error(model[0].weight.grad.T, D[:4]) < 1e-12


def test_a_layer_that_is_trained_later_is_followed() -> None:
    layer = proxprop.nn.Linear(4, 3, solver=Exact(), dtype=torch.float64).requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    proxprop.attach(optimizer, layer, running=RUNNING)
    layer.requires_grad_(True)
    expected = Stated(RUNNING, Exact())
    for x, G in batches(4):
        found = stepped(layer, optimizer, x, G)
        assert relative_error(found, expected.direction(x, gradient(x, G))) < 1e-12


def test_parameters_that_were_replaced_are_refused_between_observed_steps_too() -> None:
    layer, _, _ = after_observed()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="its parameters are not the ones it was attached with"):
        layer(batches(1)[0][0])
    with torch.no_grad():
        layer(batches(1)[0][0])


def test_a_model_that_is_moved_between_observed_steps_keeps_its_operators() -> None:
    layer, optimizer, expected = after_observed()
    x, G = batches(2)[1]
    layer.float()
    found = stepped(layer, optimizer, x.float(), G.float())
    assert found.dtype == torch.float32
    assert relative_error(found.double(), expected.direction(x, gradient(x, G))) < 1e-5


@works(FEATURE, mode="deferred")
@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_a_resumed_run_equals_one_that_went_on(taken: int) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Attached]:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        model = proxprop.convert(plain, Exact(), include_last=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        running = Running(decay=0.9, update_every=2, invert_every=4, rows=5)
        return model, optimizer, proxprop.attach(optimizer, model, running=running)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            for part in randn(8, 6, seed=step).float().split(4):
                model(part).square().sum().backward()
            optimizer.step()

    model, optimizer, handle = fresh()
    train(model, optimizer, range(taken))
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], buffer)
    train(model, optimizer, range(taken, 10))
    resumed = fresh()
    buffer.seek(0)
    for each, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
        each.load_state_dict(state)
    train(*resumed[:2], range(taken, 10))
    for one, other in zip(model.parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)
    ours, theirs = handle.state_dict(), resumed[2].state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)


@works(FEATURE, mode="deferred")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_compiled_model_has_one_variant_for_observed_steps_and_one_for_others() -> None:
    torch.compiler.reset()
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def train(compiled: bool) -> Iterator[dict[str, Tensor]]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model = proxprop.convert(plain, Exact(), include_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        proxprop.attach(optimizer, model, running=Running(decay=0.8, update_every=3, invert_every=6))
        call = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        for step in range(10):
            optimizer.zero_grad()
            for part in randn(6, 4, seed=step).split(3):
                call(part).square().sum().backward()
            optimizer.step()
            yield {name: p.grad.clone() for name, p in model.named_parameters()}

    for found, expected in zip(train(True), train(False), strict=True):
        assert_same(found, expected)
    assert graphs == 2
    torch.compiler.reset()


def alike_layers() -> nn.Module:
    """Linear layers with and without a bias, of two shapes, a convolution in groups, and a frozen bias."""
    wide = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    folded = [
        nn.Unflatten(-1, (4, 1)),
        nn.Conv1d(4, 4, 1, groups=2),
        nn.Conv1d(4, 4, 1, groups=2),
        nn.Flatten(),
    ]
    model = nn.Sequential(*wide, nn.Linear(4, 4), *folded, nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 2))
    model[4].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("limit", [0, 300, None])
def test_layers_that_are_turned_together_have_the_directions_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, dtype: torch.dtype
) -> None:
    def train() -> Iterator[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = proxprop.convert(alike_layers().to(dtype), Exact(), module_types="all", include_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = proxprop.attach(optimizer, model, running=Running(update_every=1, invert_every=2))
        for step in range(4):
            optimizer.zero_grad()
            model(randn(9, 4, seed=step).to(dtype)).square().sum().backward()
            if step == 2:
                model[0].weight.grad = None  # nothing reached it
            optimizer.step()
            yield {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        (plan,) = handle.directions._plans.values()
        sizes.append(sorted(len(stack.pairs) for stack in plan.stacks))

    sizes: list[list[int]] = []
    if limit is not None:
        monkeypatch.setattr(writer, "TOGETHER_BYTES", limit)
    found = list(train())
    monkeypatch.setattr(writer, "_stackable", lambda equation: False)
    for one, other in zip(found, list(train()), strict=True):
        assert_same(one, other, tolerance=1e-12 if dtype == torch.float64 else 1e-2)
    assert sizes[1] == []
    if (limit, dtype) != (300, torch.bfloat16):
        assert sizes[0] == {0: [1] * 10, 300: [1, 1, 2, 2, 2, 2], None: [1, 2, 2, 2, 3]}[limit]


def test_layers_that_are_turned_together_take_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = proxprop.convert(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model, running=Running(update_every=2, invert_every=2))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        with torch.profiler.profile() as profile:
            handle_of(model).solve()
    called = [e.key for e in profile.key_averages() for _ in range(e.count) if e.key.startswith("aten::")]
    products = [key for key in called if re.search(r"::(bmm|mm|matmul|baddbmm_?)$", key)]
    assert sorted(products) == ["aten::baddbmm_", "aten::bmm", "aten::bmm"]
    assert called.count("aten::_foreach_copy_") == 1


def test_optimizers_that_step_in_turn_each_keep_their_layers_together() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
    alone = copy.deepcopy(model)
    for each in (model, alone):
        proxprop.convert(each, Exact(), include_last=True)
    optimizers = [torch.optim.SGD(model[i : i + 2].parameters(), lr=0.0) for i in (0, 2)]
    handle = proxprop.attach(optimizers, model, running=RUNNING)
    singles = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in alone]
    for optimizer, layer in zip(singles, alone, strict=True):
        proxprop.attach(optimizer, layer, running=RUNNING)
    plans = []
    for step in range(8):
        half = slice(0, 2) if step % 2 == 0 else slice(2, 4)
        for layer in (*model[half], *alone[half]):
            layer.zero_grad()
            functional.mse_loss(layer(randn(5, 4, seed=step)), randn(5, 4, seed=-1 - step)).backward()
        optimizers[step % 2].step()
        for optimizer in singles[half]:
            optimizer.step()
        plans.append(set(map(id, handle.directions._plans.values())))
        assert_same(*({n: p.grad for n, p in m[half].named_parameters()} for m in (model, alone)))
    assert len(plans[1]) == 2
    assert all(later == plans[1] for later in plans[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_every": 0}, "update_every should be a whole number of at least 1 but is 0"),
        ({"update_every": True}, "update_every should be a whole number"),
        ({"update_every": 2.0}, "update_every should be a whole number"),
        ({"update_every": 3}, "invert_every should be a multiple of update_every.* but they are 10 and 3"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Running(**options)
