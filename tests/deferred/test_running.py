"""Running averages of S: the stated formulas, the stated error of sampled rows, and a state that resumes exactly."""

import copy
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact, Running, tuning
from proxprop.deferred import average, preconditioner
from proxprop.deferred.equation import Term
from proxprop.deferred.preconditioner import Form, relative_form, room
from proxprop.solvers import Solver
from proxprop.solvers.cholesky import TriangularFactorization, factorize_whole
from running_averages import SOLVERS, attached, batches, rows, stated, stepped
from training import Tied, assert_same, grads, handle_of, images, loss_of, plain_model, small_model

works = pytest.mark.compatibility


@works("Running averages of S (`running=Running(...)`)", mode="deferred")
@SOLVERS
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("damping", [0.1, 1.0])
def test_the_direction_is_the_stated_one(solver: Solver, every: int, damping: float) -> None:
    layer, optimizer = attached(
        solver, Running(decay=0.8, update_every=1, invert_every=every, damping=damping)
    )
    S, N = torch.zeros(5, 5, dtype=torch.float64), 0.0
    for step, (x, G) in enumerate(batches(5)):
        found = stepped(layer, optimizer, x, G)
        A = rows(x)
        S, N = 0.8 * S + A.T @ A, 0.8 * N + len(x)
        if step % every == 0:
            C = S / N
        assert relative_error(found, stated(C, A.T @ G, damping, solver)) < 1e-9


@works("The root of running averages (`running=Running(power=0.5)`)", mode="deferred")
@pytest.mark.parametrize("solver", [Exact(), CG(5)], ids=str)
@pytest.mark.parametrize("damping", [1e-3, 0.3, 1e3])
@pytest.mark.parametrize("limit", [0, 2**28])
def test_the_inverse_root_is_accurate_to_a_percent(
    solver: Solver, damping: float, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where memory allows one inverse at a time; five steps of CG are exact for five features."""
    monkeypatch.setattr(tuning, "INVERTED_TOGETHER_MOST_BYTES", limit)
    layer, optimizer = attached(
        solver, Running(decay=0.8, update_every=1, invert_every=1, damping=damping, power=0.5)
    )
    S, N = torch.zeros(5, 5, dtype=torch.float64), 0.0
    for x, G in batches(3):
        found = stepped(layer, optimizer, x, G)
        A = rows(x)
        S, N = 0.8 * S + A.T @ A, 0.8 * N + len(x)
        assert relative_error(found, stated(S / N, A.T @ G, damping, solver, 0.5)) < 0.01


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: 1 + 1e-3 * x,
        lambda x: x + 1e3,
        lambda x: x[:2].repeat(len(x) // 2 + 1, 1)[: len(x)],
        lambda x: x * torch.logspace(-6, 3, 50),
        lambda x: (x - 1).relu() * (torch.arange(50) > 9),
    ],
    ids=["small spread", "large mean", "repeated rows", "scales", "dead inputs"],
)
def test_the_root_of_what_layers_see(inputs: Callable[[Tensor], Tensor], bfloat16: bool) -> None:
    """In batches of changing size, one of a single sample."""
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(50, 8, solver=Exact())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    running = Running(decay=0.9, update_every=1, invert_every=1, damping=0.02, power=0.5)
    proxprop.attach(optimizer, layer, running=running)
    S, N = torch.zeros(51, 51, dtype=torch.float64), 0.0
    for size in (32, 1, 7, 150):
        x = inputs(torch.randn(size, 50))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            layer(x).float().square().mean().backward()
        A = rows((x.bfloat16() if bfloat16 else x).double())
        S, N = 0.9 * S + A.T @ A, 0.9 * N + size
        B = torch.cat([layer.weight.grad.T, layer.bias.grad[None]]).double()
        optimizer.step()
        found = torch.cat([layer.weight.grad.T, layer.bias.grad[None]]).double()
        values, vectors = torch.linalg.eigh(S / N)  # zero ones may come out a little negative
        expected = stated(vectors * values.clamp(min=0) @ vectors.T, B, 0.02, Exact(), 0.5)
        assert relative_error(found, expected) < 0.01


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("kind", ["convolution in groups", "linear", "normalisation"])
def test_the_root_twice_is_the_inverse(kind: str, block: int | None) -> None:
    made: list[nn.Module] = [nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(64, 5), nn.LayerNorm(5)]
    x, steps = randn(9, 4, 5, 5, seed=1), list[list[Tensor]]()
    for running in (Running(block=block), Running(block=block, power=0.5)):
        torch.manual_seed(0)
        model = nn.Sequential(*copy.deepcopy(made)).double()
        layer = {"convolution in groups": 0, "linear": 2, "normalisation": 3}[kind]
        exclude = [str(other) for other in (0, 2, 3) if other != layer]
        proxprop.convert(model, Exact(), exclude=exclude, include_last=True, module_types="all")
        parameters = list(model[layer].parameters())
        attached = proxprop.attach(torch.optim.SGD(parameters, lr=0.0), model, running=running)
        (model(x) ** 3).sum().backward()
        attached.solve()
        if running.power == 0.5:  # once more
            attached.directions.write({c: c.pairs for c in attached.clusters}, set(), False)
        steps.append([parameter.grad for parameter in parameters])
    for once, twice in zip(*steps, strict=True):
        assert relative_error(twice, once) < 0.02


@works("Running averages of S (`running=Running(...)`)", mode="deferred")
@SOLVERS
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
def test_without_memory_and_damping_of_its_own_it_is_plain_deferred_mode(
    solver: Solver, scaling: str
) -> None:
    settings = {"tau_theta": 0.7, "scaling": scaling}
    layer, optimizer = attached(
        solver, Running(decay=0.0, update_every=1, invert_every=1, damping=None), **settings
    )
    plain = proxprop.nn.Linear(4, 3, solver=solver, dtype=torch.float64, **settings)
    for x, G in batches(3):
        found = stepped(layer, optimizer, x, G)
        plain.zero_grad()
        plain(x).backward(G)
        assert relative_error(found[:4].T, plain.weight.grad) < 1e-9
        assert relative_error(found[4], plain.bias.grad) < 1e-9


@pytest.mark.parametrize("apart", ["attention", "tied"])
def test_each_system_of_a_cluster_counts_its_own_samples(apart: str) -> None:
    """Of attention's queries and keys, and of biases beside a weight that is tied and frozen."""
    running = Running(decay=0.0, update_every=1, invert_every=1, damping=None)
    found = []
    for choice in (None, running):
        torch.manual_seed(0)
        plain = Tied("two") if apart == "tied" else nn.MultiheadAttention(4, 2, batch_first=True).double()
        model = proxprop.convert(plain, Exact(), include_last=True)
        if apart == "tied":
            model.first.weight.requires_grad_(False)
        proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, running=choice)
        x, y = randn(2, 3, 4, seed=1), randn(2, 9, 4, seed=2)
        output = model(x) if apart == "tied" else model(x, y, y)[0]
        output.square().sum().backward()
        handle_of(model.first if apart == "tied" else model).solve()
        found.append(grads(model))
    assert_same(found[1], found[0], tolerance=1e-9)


@pytest.mark.parametrize("damping", [0.3, None])
def test_a_tied_layer_that_is_used_later(damping: float | None) -> None:
    """Until S of it is there its bias counts as the mean of the other features, which leaves the rest as it is."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3).double(), nn.Linear(4, 3).double()])
    model[1].weight = model[0].weight
    proxprop.convert(model, Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model, running=Running(update_every=2, invert_every=2, damping=damping))
    (x, G), (y, H) = batches(2)
    model[0](x).backward(G)
    optimizer.step()
    optimizer.zero_grad()
    model[1](y).backward(H)
    optimizer.step()
    S, B = rows(x).T @ rows(x), torch.cat([y.T @ H, torch.zeros(1, 3).double()])
    if damping is None:
        D, own = torch.linalg.solve(torch.eye(5) + S, B), H.sum(0) / (1 + S.diagonal().mean())
    else:
        D, own = stated(S, B, damping, Exact()), H.sum(0)
    assert relative_error(model[0].weight.grad.T, D[:4]) < 1e-9
    assert relative_error(model[1].bias.grad, own) < 1e-9


def test_a_step_without_samples_leaves_the_scale_of_the_average() -> None:
    """A gradient that was zeroed in place, in a step that updates, says nothing of the samples to come."""
    layer, optimizer = attached(Exact(), Running(decay=0.5, update_every=2, invert_every=2, damping=None))
    x, G = batches(1)[0]
    for given_up in (False, False, True, False):
        optimizer.zero_grad(set_to_none=False)
        layer(x).backward(G)
        if given_up:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    S = 0.25 * rows(x).T @ rows(x)
    D = torch.linalg.solve(torch.eye(5) + S, rows(x).T @ G)
    assert relative_error(layer.weight.grad.T, D[:4]) < 1e-9


@SOLVERS
def test_what_is_made_anew_stays_in_its_place(solver: Solver) -> None:
    """A CUDA graph of a step goes on reading there."""
    layer, optimizer = attached(solver, Running(update_every=1, invert_every=1))
    (x, G), *others = batches(3)
    stepped(layer, optimizer, x, G)
    (kept,) = (tensor for name, tensor in handle_of(layer).state_dict().items() if name.endswith("kept"))
    before = kept.clone()
    for x, G in others:
        stepped(layer, optimizer, x, G)
    (now,) = (tensor for name, tensor in handle_of(layer).state_dict().items() if name.endswith("kept"))
    assert now.data_ptr() == kept.data_ptr()
    assert relative_error(now, before) > 1e-3


def test_a_copy_from_an_owner_has_the_damping_of_now() -> None:
    """Only the matrix is sent: a rank that receives it knows `tau_theta` itself."""
    M, device = torch.eye(3)[None], torch.device("cpu")
    before = room(Form(M, ((1.0, 1.0),)), CG(3), None, device)
    again = room(Form(M.to("meta"), ((0.5, 2.0),)), CG(3), None, device, before)
    assert again.kept.data_ptr() == before.kept.data_ptr()
    again.kept.copy_(M)
    assert again.apply(torch.ones(1, 3, 1)).value == pytest.approx(2.0 / 1.5)


def test_the_gradients_scale_is_kept() -> None:
    """B itself where C is a multiple of the identity, and in the limit of large damping; scale of inputs drops out."""
    torch.manual_seed(0)
    isotropic = torch.linalg.qr(randn(8, 4, seed=1))[0] * 3
    for solver, damping, x, tolerance in [
        (Exact(), 0.1, isotropic, 1e-12),
        (CG(1), 0.5, isotropic, 1e-12),
        (Exact(), 1e9, randn(8, 4, seed=2), 1e-7),
    ]:
        layer = proxprop.nn.Linear(4, 3, bias=False, solver=solver, dtype=torch.float64)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        proxprop.attach(optimizer, layer, running=Running(update_every=1, damping=damping))
        G = randn(8, 3, seed=3)
        layer(x).backward(G)
        optimizer.step()
        assert relative_error(layer.weight.grad, G.T @ x) < tolerance


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_that_has_seen_nothing_keeps_the_gradient(bias: bool) -> None:
    """An expert without a token in the first step, or with an S that overflowed, is trained in steps between."""
    torch.manual_seed(0)
    layer = proxprop.nn.Conv1d(4, 4, 1, groups=2, bias=bias, solver=Exact(), dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = proxprop.attach(optimizer, layer, running=Running(update_every=2, invert_every=2))
    for x in (randn(0, 4, 3, seed=0), randn(5, 4, 3, seed=1)):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        gradient = grads(layer)
        handle.solve()
        assert_same(grads(layer), gradient)
        optimizer.step()


def test_a_learning_rate_stays_stable() -> None:
    """The largest eigenvalue of the preconditioned quadratic is at most (1 + ρ)·c, no more than BackProp's."""
    A = randn(50, 6, seed=1) @ torch.diag(torch.tensor([10.0, 3, 1, 1, 0.1, 0.01], dtype=torch.float64))
    C = A.T @ A / 50
    for damping in (0.1, 0.3, 1.0):
        c = C.diagonal().mean()
        P = (1 + damping) * c * torch.linalg.inv(damping * c * torch.eye(6).double() + C)
        largest = float(torch.linalg.eigvals(P @ C).real.max())
        assert largest <= float((1 + damping) * c)
        assert largest < float(torch.linalg.eigvalsh(C)[-1])


@works("Running averages of S (`running=Running(...)`)", mode="deferred")
@pytest.mark.parametrize("rows", [None, 4])
def test_layers_of_every_kind_train_on_running_averages(rows: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.LayerNorm(4), nn.Conv1d(3, 4, 2, groups=1), nn.Flatten(), nn.Linear(12, 2)
    )
    model = proxprop.convert(model.double(), Exact(), module_types="all", include_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    proxprop.attach(optimizer, model, running=Running(update_every=1, invert_every=3, rows=rows))
    input = torch.randint(7, (10, 3), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(input) - randn(10, 2, seed=1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@works("Tied weights", mode="deferred")
def test_tied_layers_average_their_sum() -> None:
    model = proxprop.convert(Tied("own"), Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = proxprop.attach(
        optimizer, model, running=Running(decay=0.0, update_every=1, invert_every=1, damping=None)
    )
    immediate = proxprop.convert(Tied("own"), Exact())
    again = torch.optim.SGD(immediate.parameters(), lr=0.0)
    proxprop.attach(again, immediate)
    for each in (optimizer, again):
        (model if each is optimizer else immediate)(randn(6, 4, seed=1)).sum().backward()
        each.step()
    assert_same(
        {n: p.grad for n, p in model.named_parameters()},
        {n: p.grad for n, p in immediate.named_parameters()},
        tolerance=1e-9,
    )
    assert {"first.S", "second.S", "first.steps"} <= handle.state_dict().keys()


@works("Tied weights", mode="deferred")
@pytest.mark.parametrize("biases", ["own", "none"])
def test_what_a_layer_saw_ages_in_steps_that_use_only_layers_tied_to_it(biases: str) -> None:
    """Without memory, the second step is that of plain deferred mode, whatever the other layer saw in the first."""
    running = Running(decay=0.0, update_every=1, invert_every=1, damping=None)
    found = []
    for options in ({"running": running}, {}):
        model = proxprop.convert(Tied(biases), Exact())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        proxprop.attach(optimizer, model, **options)
        for call in (model, lambda x, model=model: model.head(model.first(x))):
            optimizer.zero_grad()
            call(randn(6, 4, seed=1)).sum().backward()
            optimizer.step()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_same(*found, tolerance=1e-9)


@pytest.fixture
def large_from_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TURNS_LEAST_FEATURES", 5)


@pytest.mark.usefixtures("large_from_five")
def test_large_layers_take_turns_and_each_has_the_stated_direction() -> None:
    """Of the last update before its turn; before the first turn, of the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 4), nn.Linear(4, 4))
    model = proxprop.convert(model.double(), Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    running = Running(decay=0.7, update_every=2, invert_every=4)
    handle = proxprop.attach(optimizer, model, running=running)
    turns = [cluster.turn for cluster in handle.clusters]
    assert sorted(turns) == [0, 0, 1, 3, 3]
    assert turns[2:4] == [1, 0]  # the largest, not in a step that forms S, and the small one
    inputs: dict[int, Tensor] = {}
    for i, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args[0].detach()))
    S = [torch.zeros(layer.in_features + 1, layer.in_features + 1).double() for layer in model]
    N, C = 0.0, [None] * 5
    for step in range(9):
        optimizer.zero_grad()
        model(randn(9, 4, seed=step)).square().sum().backward()
        B = [torch.cat([layer.weight.grad.T, layer.bias.grad[None]]) for layer in model]
        optimizer.step()
        if step % 2 == 0:
            S = [0.49 * S[i] + rows(inputs[i]).T @ rows(inputs[i]) for i in range(5)]
            N = 0.49 * N + 9
        for i, layer in enumerate(model):
            if step == 0 or step % 4 == turns[i]:
                C[i] = S[i] / N
            found = torch.cat([layer.weight.grad.T, layer.bias.grad[None]])
            assert relative_error(found, stated(C[i], B[i], 0.3, Exact())) < 1e-9, (step, i)


@SOLVERS
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
def test_alike_layers_of_other_settings_and_samples_each_have_their_own_damping(
    solver: Solver, scaling: str
) -> None:
    def trained(together: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = [
            proxprop.nn.Linear(4, 4, solver=solver, tau_theta=tau_theta, scaling=scaling, dtype=torch.float64)
            for tau_theta in (0.7, 0.7, 0.2, 0.7)
        ]
        model = nn.Sequential(*layers)
        optimizers = []
        for part in [model] if together else layers:
            optimizers.append(torch.optim.SGD(part.parameters(), lr=0.1))
            running = Running(decay=0.5, update_every=1, invert_every=1, damping=None)
            proxprop.attach(optimizers[-1], part, running=running)
        for step in range(2):
            model.zero_grad()
            for calls, layer in enumerate(layers):
                for call in range(calls + 1):
                    layer(randn(3 + 5 * step * calls, 4, seed=10 * calls + call)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return grads(model)

    assert_same(trained(together=True), trained(together=False), tolerance=1e-9)


@pytest.mark.parametrize(("limit", "groups"), [(2**28, [3, 3]), (2 * 25 * 8, [2, 1, 1, 1, 1]), (0, [1] * 6)])
def test_alike_averages_are_inverted_together_and_few_copies_are_held(
    limit: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[Tensor]] = []
    made: list[int] = []

    def form(*given: Any) -> Form:
        assert not any(copy() is not None for copy in copies)
        found = relative_form(*given)
        copies.append(weakref.ref(found.M))
        return found

    def factorize(M: Tensor, damping: float) -> TriangularFactorization:
        made.append(len(M))
        return factorize_whole(M, damping)

    monkeypatch.setattr(average, "relative_form", form)
    monkeypatch.setattr(preconditioner, "factorize_whole", factorize)
    monkeypatch.setattr(tuning, "INVERTED_TOGETHER_MOST_BYTES", limit)
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in [(4, 6), (6, 4)] * 3]
    model = proxprop.convert(nn.Sequential(*layers), Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = proxprop.attach(optimizer, model, running=Running())
    model(randn(9, 4, seed=0)).square().sum().backward()
    optimizer.step()
    assert made == groups
    for name, tensor in attached.state_dict().items():
        if name.endswith("kept"):
            S = attached.state_dict()[name.replace("kept", "S")][0]
            assert relative_error(tensor[0], stated(S, torch.eye(len(S), dtype=S.dtype), 0.3, Exact())) < 1e-9


@pytest.mark.parametrize("layers", [[300] * 7, [3000, 1000, 1000, 1000, 300], [2000] + [500] * 40])
def test_turns_have_about_as_much_to_invert(layers: list[int]) -> None:
    model = nn.ModuleList(nn.Linear(n, 2, device="meta") for n in layers)
    proxprop.convert(model, Exact(), include_last=True)
    running = Running(update_every=10, invert_every=10)
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, running=running)
    load = [sum(c.cost for c in handle.clusters if c.turn == turn) for turn in range(10)]
    costs = [cluster.cost for cluster in handle.clusters]
    assert max(load) <= max(2 * sum(costs) / 10, max(costs))
    assert load[0] <= min(load[1:])  # that step forms S


@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_inverses_are_kept_where_they_were(solver: Solver) -> None:
    """A CUDA graph of a step goes on reading there."""
    model, optimizer, handle = training(Running(decay=0.9, update_every=1, invert_every=2), solver)
    steps(model, optimizer, range(1))
    before = {name: t.data_ptr() for name, t in handle.state_dict().items() if name.endswith(("S", "kept"))}
    first = handle.state_dict()["3.kept"].clone()
    steps(model, optimizer, range(1, 4))
    state = handle.state_dict()
    assert not torch.equal(state["3.kept"], first)
    if solver == Exact():
        assert before == {name: state[name].data_ptr() for name in before}


def test_a_loaded_inverse_lies_in_memory_as_one_that_was_made() -> None:
    """On a GPU, products with rows that begin elsewhere are rounded otherwise."""
    model, optimizer, handle = training(Running())
    steps(model, optimizer, range(1))
    _, _, resumed = training(Running())
    resumed.load_state_dict(handle.state_dict())
    made, loaded = handle.state_dict(), resumed.state_dict()
    kept = [name for name in made if name.endswith(".kept")]
    assert kept
    assert {name: loaded[name].stride() for name in kept} == {name: made[name].stride() for name in kept}


def test_inverses_of_tied_layers_are_kept_where_they_were() -> None:
    """Their equation is joined anew for each inversion, but nothing of the one before is held."""
    model = proxprop.convert(Tied("own"), Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = proxprop.attach(optimizer, model, running=Running(update_every=1, invert_every=1))
    places = set()
    for seed in range(4):
        optimizer.zero_grad()
        model(randn(6, 4, seed=seed)).sum().backward()
        optimizer.step()
        (kept,) = (t for name, t in handle.state_dict().items() if name.endswith("].kept"))
        places.add(kept.data_ptr())
    assert len(places) == 1
    assert len(handle.directions._plans) == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows_drawn", [None, 100])
def test_features_in_blocks_have_the_stated_direction(bias: bool, rows_drawn: int | None) -> None:
    """S between blocks is zero, the bias is in the last, and one c serves all."""
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(10, 3, bias=bias, solver=Exact(), dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    running = Running(decay=0.8, update_every=1, invert_every=1, block=4, rows=rows_drawn)
    handle = proxprop.attach(optimizer, layer, running=running)
    width = 4  # 10 or 11 features are three blocks of four
    S, N = 0.0, 0.0
    for step in range(3):
        x, G = randn(20, 10, seed=step), randn(20, 3, seed=9 + step)
        optimizer.zero_grad()
        layer(x).backward(G)
        optimizer.step()
        A = rows(x) if bias else x
        S, N = 0.8 * S + A.T @ A, 0.8 * N + 20
        block = torch.arange(A.shape[1]) // width
        C = torch.where(block[:, None] == block, S / N, 0.0)
        found = torch.cat([layer.weight.grad.T, *([layer.bias.grad[None]] if bias else [])])
        assert relative_error(found, stated(C, A.T @ G, 0.3, Exact())) < 1e-9
    assert handle.state_dict()["Linear.S"].shape == (3, 4, 4)
    assert handle.bytes == 3 * 4 * 4 * 8


@pytest.mark.parametrize("invert_every", [1, 3])
def test_blocks_start_anew_where_other_parameters_are_trained(invert_every: int) -> None:
    """Also where their S is as large: the bias would take the place of what pads the last block."""
    running = Running(decay=0.8, update_every=1, invert_every=invert_every, block=3)
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(5, 3, solver=Exact(), dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    proxprop.attach(optimizer, layer, running=running)
    x, G = randn(9, 5, seed=1), randn(9, 3, seed=2)
    for trained in (True, False, True):
        layer.bias.requires_grad_(trained)
        optimizer.zero_grad()
        layer(x).backward(G)
        optimizer.step()
        A = rows(x) if trained else x
        block = torch.arange(A.shape[1]) // 3
        C = torch.where(block[:, None] == block, A.T @ A / len(x), 0.0)
        found = torch.cat([layer.weight.grad.T, *([layer.bias.grad[None]] if trained else [])])
        assert relative_error(found, stated(C, A.T @ G, 0.3, Exact())) < 1e-9


@pytest.mark.parametrize("space", ["feature", "sample"])  # S is summed, or rows are kept
@pytest.mark.parametrize("running", [None, Running(), Running(block=3)], ids=["plain", "running", "blocks"])
def test_parameters_frozen_between_backward_and_the_step_are_refused(
    running: Running | None, space: str
) -> None:
    """S is not theirs, though in blocks it may be as large."""
    layer = proxprop.nn.Linear(5, 3, solver=Exact(), space=space)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    proxprop.attach(optimizer, layer, running=running)
    layer(randn(4, 5, seed=1).float()).square().sum().backward()
    layer.bias.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match="which parameters are trained changed between backward and the step"
    ):
        optimizer.step()


def test_blocks_that_divide_the_features_of_a_grouped_convolution() -> None:
    """Each group is a convolution by itself."""
    torch.manual_seed(0)
    grouped = nn.Conv2d(2, 4, 3, groups=2).double()  # ten features a group with the bias
    alone = [nn.Conv2d(1, 2, 3).double() for _ in range(2)]
    for conv, weight, bias in zip(alone, grouped.weight.chunk(2), grouped.bias.chunk(2), strict=True):
        conv.load_state_dict({"weight": weight, "bias": bias})
    x = randn(6, 2, 4, 4, seed=1)
    for layer, input in [(grouped, x), *zip(alone, x.split(1, dim=1), strict=True)]:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        proxprop.wrap(optimizer, layer, include_last=True, running=Running(block=5))
        layer(input).square().sum().backward()
        optimizer.step()
    expected = torch.cat([conv.weight.grad for conv in alone])
    assert relative_error(grouped.weight.grad, expected) < 1e-12


def test_blocks_of_every_kind_of_layer() -> None:
    """A layer whose features fit in one block does not notice; attention's packed projections stay whole."""

    def train(block: int | None) -> tuple[dict[str, Tensor], dict[str, torch.Size]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1, padding=1), nn.Flatten(), nn.LayerNorm(64),
                              nn.Linear(64, 8), nn.Linear(8, 2)).double()  # fmt: skip
        model = proxprop.convert(model, Exact(), module_types="all", include_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = proxprop.attach(
            optimizer, model, running=Running(update_every=2, invert_every=2, block=block)
        )
        for step in range(3):
            optimizer.zero_grad()
            model(randn(9, 3, 4, 4, seed=step)).square().sum().backward()
            optimizer.step()
        shapes = {name: t.shape for name, t in handle.state_dict().items() if name.endswith(".S")}
        return {name: p.grad.clone() for name, p in model.named_parameters()}, shapes

    (whole, _), (wide, same), (blocks, shapes) = train(None), train(1000), train(16)
    assert_same(wide, whole)
    assert same["0.S"] == (1, 28, 28)
    assert shapes == {"0.S": (2, 14, 14), "2.S": (64, 2, 2), "3.S": (5, 13, 13), "4.S": (1, 9, 9)}
    assert all(value.isfinite().all() for value in blocks.values())
    assert not torch.equal(blocks["3.weight"], whole["3.weight"])


def test_tied_layers_are_refused_in_blocks() -> None:
    model = proxprop.convert(Tied("own"), Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match=r"share a parameter, but their features are in blocks"):
        proxprop.attach(optimizer, model, running=Running(block=3))


def test_inverses_can_be_kept_in_bfloat16() -> None:
    found = {}
    for dtype in (None, torch.bfloat16):
        model, optimizer, handle = training(Running(update_every=1, invert_every=2, inverse_dtype=dtype))
        steps(model, optimizer, range(3))
        found[dtype] = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert handle.state_dict()["3.kept"].dtype == (dtype or torch.float32)
        assert handle.state_dict()["3.S"].dtype == torch.float32
    for name, expected in found[None].items():
        assert relative_error(found[torch.bfloat16][name], expected) < 0.05
    assert not torch.equal(found[torch.bfloat16]["3.weight"], found[None]["3.weight"])


def test_a_step_that_overflowed_does_not_stay_in_the_average() -> None:
    layer, optimizer = attached(Exact(), Running(decay=0.8, update_every=1, invert_every=1))
    clean, clean_optimizer = attached(Exact(), Running(decay=0.8, update_every=1, invert_every=1))
    for i, (x, G) in enumerate(batches(3)):
        if i == 1:
            broken = x.clone()
            broken[0, 0] = float("inf")
            optimizer.zero_grad()
            layer(broken).backward(G)
            handle_of(layer).solve()
            continue
        found, expected = stepped(layer, optimizer, x, G), stepped(clean, clean_optimizer, x, G)
        assert relative_error(found, expected) < 1e-12


def test_a_layer_that_overflowed_is_left_out_alone() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).double()
    model = proxprop.convert(layers, Exact(), include_last=True)
    handle = proxprop.attach(
        torch.optim.SGD(model.parameters(), lr=0.0), model, running=Running(update_every=1, decay=0.8)
    )
    model(randn(6, 4, seed=1)).sum().backward()
    handle_of(model).solve()
    before = {name: value.clone() for name, value in handle.state_dict().items()}
    model.zero_grad()
    model[0](torch.full((5, 4), 1e200, dtype=torch.float64)).sum().backward()
    x = randn(7, 3, seed=2)
    model[1](x).sum().backward()
    handle_of(model).solve()
    after = handle.state_dict()
    assert torch.equal(after["0.S"], before["0.S"])
    assert float(after["0.samples"]) == 6
    assert relative_error(after["1.S"][0], 0.8 * before["1.S"][0] + x.T @ x) < 1e-12
    assert float(after["1.samples"]) == pytest.approx(0.8 * 6 + 7)


SAMPLED = [
    ("linear", lambda: nn.Linear(4, 2), (60, 4)),
    ("linear-no-bias", lambda: nn.Linear(4, 2, bias=False), (5, 12, 4)),
    ("conv", lambda: nn.Conv2d(2, 2, 2, stride=(1, 2), padding=1, dilation=1), (3, 2, 4, 5)),
    ("conv-groups", lambda: nn.Conv1d(4, 2, 3, groups=2, padding=1, padding_mode="reflect"), (4, 4, 9)),
    ("conv-transposed", lambda: nn.ConvTranspose1d(2, 2, 3, stride=2), (4, 2, 5)),
    ("bilinear", lambda: nn.Bilinear(2, 3, 2), (40, 2)),
]


def grams(case: str, handle, layer: nn.Module, input: Tensor) -> Tensor:
    """What one backward pass adds to S."""
    layer.zero_grad()
    inputs = (input, input.repeat(1, 2)[:, :3]) if case == "bilinear" else (input,)
    layer(*inputs).sum().backward()
    return handle.systems[0].S.clone()


def counted(handle) -> float:
    """The number of samples that S was summed over."""
    system = handle.systems[0]
    return float(Term(system, *(leaf.grad for leaf in system.leaves)).samples)


@works("Sampled rows (`Running(rows=...)`)", status="approximate", mode="deferred",
       note="an unbiased estimate of S with mean square error `N²/rows·(1 − rows/N)·s²`, s² the variance of `aaᵀ` over rows")  # fmt: skip
@pytest.mark.parametrize(("case", "make", "shape"), SAMPLED, ids=[case for case, *_ in SAMPLED])
def test_sampled_rows_estimate_s_without_bias_and_with_the_stated_error(case, make, shape) -> None:
    torch.manual_seed(0)
    plain = make().double()
    input = randn(*shape, seed=1)
    layers = [
        proxprop.convert(copy.deepcopy(plain), Exact(), include_last=True, module_types="all")
        for _ in range(2)
    ]
    handles = [
        proxprop.attach(
            torch.optim.SGD(layer.parameters(), lr=0.0), layer, running=Running(update_every=1, rows=count)
        )
        for layer, count in zip(layers, (None, 7), strict=True)
    ]
    S = grams(case, handles[0], layers[0], input)
    samples = counted(handles[0])
    estimates = torch.stack([grams(case, handles[1], layers[1], input) for _ in range(1500)])
    single = single_rows(case, plain, input)
    spread = ((single - S / samples) ** 2).sum() / (samples - 1)
    error = samples**2 / 7 * (1 - 7 / samples) * float(spread)
    measured = float(((estimates - S) ** 2).sum((1, 2, 3)).mean())
    assert measured == pytest.approx(error, rel=0.15)
    assert float((estimates.mean(0) - S).norm()) < 4 * (error / 1500) ** 0.5
    assert counted(handles[1]) == samples


def single_rows(case: str, plain: nn.Module, input: Tensor) -> Tensor:
    """`aaᵀ` of every sample of a call, `[samples, groups, features, features]`."""
    seen = []
    layer = proxprop.convert(copy.deepcopy(plain), Exact(), include_last=True, module_types="all")
    inputs = (input, input.repeat(1, 2)[:, :3]) if case == "bilinear" else (input,)
    with layer._watched(lambda transfer, *_: seen.append(transfer)):
        layer(*inputs).sum().backward()
    A = seen[0].rows()
    if seen[0].bias:
        A = torch.cat([A, torch.ones_like(A[..., :1])], -1)
    return (A[..., :, None] * A[..., None, :]).transpose(0, 1)


def test_sampling_is_repeatable_and_leaves_torchs_random_state_alone() -> None:
    found = []
    for _ in range(2):
        layer, optimizer = attached(Exact(), Running(update_every=1, rows=3))
        torch.manual_seed(5)
        found.append(torch.stack([stepped(layer, optimizer, x, G) for x, G in batches(3)]))
        drawn = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(()))
    assert torch.equal(*found)


def training(running: Running, solver: Solver | None = None):
    model = small_model(solver or Exact(), torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, proxprop.attach(optimizer, model, running=running)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        for part in images(dtype=torch.float32, seed=seed).split(4):
            loss_of(model, part).backward()
        optimizer.step()


@works("Checkpoints of running averages, also through `torch.distributed.checkpoint`", mode="deferred")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("through", ["torch.save", "distributed checkpoint"])
@SOLVERS
def test_a_resumed_run_equals_one_that_went_on(through: str, solver: Solver, tmp_path: Path) -> None:
    running = Running(decay=0.9, update_every=1, invert_every=3, rows=5)
    model, optimizer, handle = training(running, solver)
    steps(model, optimizer, range(4))  # one step after a refresh
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "proxprop": handle.state_dict(),
    }
    buffer = io.BytesIO()
    if through == "torch.save":
        torch.save(state, buffer)
    else:
        dcp.save(
            {"model": state["model"], "proxprop": state["proxprop"]}, checkpoint_id=tmp_path, no_dist=True
        )
        torch.save({"optimizer": state["optimizer"]}, buffer)
    steps(model, optimizer, range(4, 9))
    resumed, resumed_optimizer, resumed_handle = training(running, solver)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    if through != "torch.save":
        loaded |= {"model": resumed.state_dict(), "proxprop": resumed_handle.state_dict()}
        held = {"model": loaded["model"], "proxprop": loaded["proxprop"]}
        dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
        loaded |= held
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    resumed_handle.load_state_dict(loaded["proxprop"])
    steps(resumed, resumed_optimizer, range(4, 9))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    ours, theirs = handle.state_dict(), resumed_handle.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


class CrossAttention(nn.Module):
    """Keys and values of another input than the queries, so that the packed weight is never one system."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, :2], x, x, need_weights=False)[0]


@pytest.mark.parametrize("asked", [False, True], ids=["", "state asked for before"])
def test_a_resumed_run_of_cross_attention_equals_one_that_went_on(asked: bool) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, proxprop.Attached]:
        torch.manual_seed(0)
        model = proxprop.convert(CrossAttention().double(), Exact(), include_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        running = Running(update_every=1, invert_every=2)
        return model, optimizer, proxprop.attach(optimizer, model, running=running)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            model(randn(3, 5, 4, seed=seed)).square().sum().backward()
            optimizer.step()

    runs = first, second, untouched = fresh(), fresh(), fresh()
    train(*first[:2], range(3))
    train(*untouched[:2], range(3))
    if asked:
        second[2].state_dict()
    for one, other in zip(second, first, strict=True):
        one.load_state_dict(other.state_dict())
    for run in runs:
        train(*run[:2], range(3, 7))
    for values in zip(*(model.parameters() for model, *_ in runs), strict=True):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])  # looking at the state changes nothing


def test_a_detached_handle_holds_no_averages() -> None:
    model, optimizer, handle = training(Running())
    steps(model, optimizer, range(1))
    assert handle.bytes_held > 0
    handle.detach()
    assert handle.bytes_held == 0
    assert handle.state_dict() == {}


def test_the_state_is_a_plain_dict_of_tensors_by_layer_names() -> None:
    model, optimizer, handle = training(Running())
    names = {f"{layer}.{key}" for layer in ("0", "3") for key in ("S", "samples", "steps", "trained", "kept")}
    assert handle.state_dict().keys() == names  # zeros before the first step, for loaders that fill in place
    steps(model, optimizer, range(1))
    assert handle.state_dict().keys() == names
    assert all(isinstance(value, Tensor) for value in handle.state_dict().values())
    assert int(handle.state_dict()["0.steps"]) == 1


@pytest.mark.usefixtures("large_from_five")
@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_a_state_that_is_asked_for_before_the_first_step_changes_nothing(solver: Solver) -> None:
    """Every layer is inverted in its first step, whatever its turn and even if it comes late."""
    found = []
    for asked in (False, True):
        torch.manual_seed(0)
        model = proxprop.convert(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double(), solver)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        handle = proxprop.attach(optimizer, model, running=Running(update_every=1, invert_every=4))
        assert len({cluster.turn for cluster in handle.clusters}) > 1
        for step, used in enumerate([2, 2, 4]):
            if asked:
                handle.load_state_dict({name: value.clone() for name, value in handle.state_dict().items()})
            optimizer.zero_grad()
            model[:used](randn(9, 6, seed=step).double()).square().sum().backward()
            optimizer.step()
        found.append(grads(model))
    assert_same(found[1], found[0], tolerance=1e-12)


def test_frozen_layers_have_a_state_once_they_are_trained() -> None:
    model = small_model(Exact())
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = proxprop.attach(optimizer, model, running=Running())
    steps(model.float(), optimizer, range(1))
    trained = {"3.S", "3.samples", "3.steps", "3.trained", "3.kept"} | {"0.steps", "0.trained"}
    assert handle.state_dict().keys() == trained
    handle.load_state_dict(handle.state_dict())
    model[0].requires_grad_(True)
    assert handle.state_dict().keys() == trained | {"0.S", "0.samples", "0.kept"}
    steps(model, optimizer, range(1))
    assert int(handle.state_dict()["0.steps"]) == 1


def test_a_state_fits_what_is_trained_now() -> None:
    running, (x, G) = Running(update_every=1, invert_every=5), batches(1)[0]
    layer, optimizer = attached(Exact(), running)
    other, _ = attached(Exact(), running)
    layer.bias.requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).backward(G)
        optimizer.step()
    state = handle_of(layer).state_dict()
    other.bias.requires_grad_(False)
    handle_of(other).load_state_dict(state)  # whether frozen before or after it was attached
    other(x).backward(G)
    handle_of(other).solve()
    assert torch.equal(other.weight.grad, layer.weight.grad)


@pytest.mark.parametrize("block", [None, 2], ids=["whole", "blocks"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_state_of_other_trained_parameters_starts_anew(block: int | None, trained: bool) -> None:
    """As the run that it was saved from would have gone on; in blocks, S is as large with the bias as without it."""
    running = Running(update_every=5, invert_every=5, block=block)
    x, G = randn(9, 3, seed=1), randn(9, 2, seed=2)
    torch.manual_seed(0)
    layers = [proxprop.nn.Linear(3, 2, solver=Exact(), dtype=torch.float64) for _ in range(2)]
    for layer in layers:
        layer.bias.requires_grad_(not trained)
        proxprop.attach(torch.optim.SGD(layer.parameters(), lr=0.0), layer, running=running)
    layers[0](3 * x).backward(G)
    handle_of(layers[0]).solve()
    state = {name: value.clone() for name, value in handle_of(layers[0]).state_dict().items()}
    for layer in layers:
        layer.zero_grad()
        layer.bias.requires_grad_(trained)
    handle_of(layers[1]).load_state_dict(state)
    assert layers[1].bias.requires_grad == trained
    for layer in layers:
        layer(x).backward(G)
        handle_of(layer).solve()
    assert torch.equal(layers[1].weight.grad, layers[0].weight.grad)


def test_a_state_that_was_saved_while_a_layer_was_frozen_goes_on_once_it_is_trained() -> None:
    running, (x, G) = Running(update_every=2, invert_every=2), batches(1)[0]
    (layer, optimizer), (other, _) = (attached(Exact(), running) for _ in range(2))
    stepped(layer, optimizer, 3 * x, G)
    for each in (layer, other):
        each.requires_grad_(False)
    handle_of(other).load_state_dict(handle_of(layer).state_dict())
    for each in (layer, other):
        each.zero_grad()
        each.requires_grad_(True)
        each(x).backward(G)
        handle_of(each).solve()
    assert torch.equal(other.weight.grad, layer.weight.grad)


def test_a_state_of_another_model_is_refused() -> None:
    _, _, handle = training(Running())
    state = handle.state_dict()
    with pytest.raises(ValueError, match=r"the state has no '3\.S'"):
        handle.load_state_dict({key: value for key, value in state.items() if key != "3.S"})
    with pytest.raises(ValueError, match=r"the state has '9\.S', which this model has no use for"):
        handle.load_state_dict({**state, "9.S": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'0\.S' should have shape \[1, 10, 10\] but has \[1, 2, 2\]"):
        handle.load_state_dict({**state, "0.S": torch.zeros(1, 2, 2)})


def test_a_handle_without_running_averages_has_no_state() -> None:
    model = small_model()
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model)
    assert handle.state_dict() == {}
    handle.load_state_dict({})
    with pytest.raises(ValueError, match=r"keeps no running averages: attach with running="):
        handle.load_state_dict({"0.S": torch.zeros(1)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "decay should be at least 0 and less than 1 but is 1.0"),
        ({"decay": -0.1}, "decay should be"),
        ({"invert_every": 0}, "invert_every should be a whole number of at least 1 but is 0"),
        ({"invert_every": 2.5}, "invert_every should be a whole number"),
        ({"rows": 0}, "rows should be a whole number of at least 1 but is 0"),
        ({"block": 0}, "block should be a whole number of at least 1 but is 0"),
        ({"damping": 0.0}, r"damping should be > 0 and at most 1e\+30, or None, but is 0.0"),
        ({"damping": 1e31}, "damping should be"),
        ({"damping": float("nan")}, "damping should be"),
        ({"power": 0.7}, "power should be 1 or 0.5 but is 0.7"),
        ({"power": 0.5, "damping": None}, "power=0.5 should come with a damping, but that is None"),
        (
            {"inverse_dtype": torch.float16},
            "inverse_dtype should be torch.bfloat16 or None but is torch.float16",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Running(**options)


def test_the_first_layer_of_a_model_on_meta_has_a_state_too() -> None:
    with torch.device("meta"):
        model = proxprop.convert(plain_model(torch.float32), Exact())
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, running=Running())
    assert handle.state_dict()["0.S"].is_meta


def test_a_model_that_is_moved_keeps_its_averages_and_one_that_is_frozen_starts_anew() -> None:
    running = Running(decay=0.5, update_every=1, invert_every=5)
    layer, optimizer = attached(Exact(), running)
    same, same_optimizer = attached(Exact(), running)
    (x, G), (x2, G2) = batches(2)
    stepped(layer, optimizer, x, G)
    stepped(same, same_optimizer, x, G)
    layer.float()
    found = stepped(
        layer, optimizer, x2.float(), G2.float()
    )  # with the S of both steps: its operator is made anew
    optimizer.zero_grad()
    assert found.dtype == torch.float32
    S = 0.5 * rows(x).T @ rows(x) + rows(x2).T @ rows(x2)
    C = S / (0.5 * len(x) + len(x2))
    assert relative_error(found.double(), stated(C, rows(x2).T @ G2, 0.3, Exact())) < 1e-4
    same.bias.requires_grad_(False)
    same_optimizer.zero_grad()
    same(x2).backward(G2)
    same_optimizer.step()
    assert relative_error(same.weight.grad.T, stated(x2.T @ x2 / len(x2), x2.T @ G2, 0.3, Exact())) < 1e-9
