"""Reports measure what a solve did; nobody pays who does not ask."""

import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact
from proxprop.diagnostics import observe, scalars, spectrum


def model(solver, **settings) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 2)
    )
    return proxprop.convert(layers.double(), solver, **settings)


def run(model: nn.Module) -> None:
    model(randn(7, 2, 4, 4, seed=1)).square().sum().backward()


@pytest.mark.parametrize("scaling", ["paper", "gradient"])
@pytest.mark.parametrize("space", ["sample", "feature"])
def test_exact_leaves_no_residual_and_cg_less_with_every_step(scaling, space) -> None:
    with observe(exact := model(Exact(), scaling=scaling, space=space)) as reports:
        run(exact)
    assert all(float(report.residual.max()) < 1e-9 for found in reports.values() for report in found)
    worst = []
    for k in (1, 3, 12):
        with observe(inexact := model(CG(k), scaling=scaling, space=space)) as reports:
            run(inexact)
        worst.append(float(reports["3"][0].residual.max()))
        assert reports["3"][0].iterations == k
    assert worst[0] > worst[1] > worst[2]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_are_measured_by_the_entries_they_looked_up(kind, padding, sparse: bool) -> None:
    torch.manual_seed(0)
    table = proxprop.convert(
        nn.Sequential(kind(6, 3, padding_idx=padding, sparse=sparse)).double(),
        Exact(),
        module_types=[kind],
        include_last=True,
    )
    with observe(table) as reports:
        table(torch.tensor([[0, 2, 2], [4, 2, 0]])).square().sum().backward()
    (report,) = reports["0"]
    assert float(report.residual.max()) < 1e-12
    assert 0 < float(report.cosine) < 1


def test_report_tells_space_shape_and_angle() -> None:
    with observe(net := model(CG(2), space="feature")) as reports:
        run(net)
        run(net)
    assert {name: len(found) for name, found in reports.items()} == {"0": 2, "3": 2}
    report = reports["0"][0]
    assert (report.space, tuple(report.residual.shape), report.failed) == ("feature", (2, 2), False)
    direction = net[0].weight.grad / 2, net[0].bias.grad / 2
    proxprop.revert(net).zero_grad()
    run(net)
    gradient = net[0].weight.grad, net[0].bias.grad
    D, B = (torch.cat([part.flatten() for part in pair]) for pair in (direction, gradient))
    cosine = (D @ B) / (D.norm() * B.norm())
    assert relative_error(report.cosine, cosine) < 1e-12
    assert 0 < cosine < 1


def test_observing_ends_with_the_block_and_changes_no_direction() -> None:
    watched, alone = model(Exact()), model(Exact())
    with observe(watched) as reports:
        run(watched)
    run(alone)
    assert torch.equal(watched[0].weight.grad, alone[0].weight.grad)
    run(watched)
    assert len(reports["0"]) == 1
    assert watched[0]._observer is None


def test_observing_ends_after_an_error_too() -> None:
    net = model(Exact())
    with pytest.raises(ZeroDivisionError), observe(net):
        raise ZeroDivisionError
    assert net[0]._observer is None


def test_zero_gradient_has_no_residual_and_no_angle() -> None:
    with observe(net := model(Exact())) as reports:
        (0.0 * net(randn(7, 2, 4, 4, seed=1))).sum().backward()
    assert float(reports["0"][0].residual.abs().max()) == 0.0
    assert math.isnan(float(reports["0"][0].cosine))


@pytest.mark.parametrize("shape", [(30, 6), (4, 6)])
def test_spectrum_is_that_of_the_gram_matrix(shape) -> None:
    A = randn(*shape, seed=1)
    expected = torch.linalg.svdvals(A).flip(0).square()
    found = spectrum(A)
    assert len(found.eigenvalues) == 6
    assert relative_error(found.eigenvalues[-len(expected) :], expected) < 1e-12
    assert found.largest == pytest.approx(float(expected[-1]))
    if shape[0] > shape[1]:
        assert found.condition_number == pytest.approx(float(expected[-1] / expected[0]))
    else:
        assert found.eigenvalues[:2].tolist() == [0.0, 0.0]
        assert found.condition_number == math.inf


def test_spectrum_of_a_half_precision_input_is_float64_and_other_shapes_are_refused() -> None:
    assert spectrum(torch.ones(3, 2, dtype=torch.bfloat16)).eigenvalues.dtype == torch.float64
    with pytest.raises(ValueError, match=r"A should be \[samples, features\] but has shape \[2, 3, 4\]"):
        spectrum(torch.zeros(2, 3, 4))


def test_scalars_of_reports_are_those_of_the_solves() -> None:
    with observe(net := model(CG(2))) as reports:
        run(net)
        run(net)
    found = scalars(reports)
    assert set(found) == {f"proxprop/{layer}/{n}" for layer in "03" for n in ("angle", "residual", "failed")}
    assert all(isinstance(value, float) for value in found.values())
    cosine = float(reports["3"][0].cosine)
    assert found["proxprop/3/angle"] == pytest.approx(math.degrees(math.acos(cosine)))
    assert found["proxprop/3/residual"] == pytest.approx(float(reports["3"][1].residual.max()))
    assert found["proxprop/3/failed"] == 0.0


def test_layers_that_were_not_reached_are_left_out() -> None:
    with observe(net := model(CG(2))) as reports:
        net[3](randn(4, 16, seed=1)).sum().backward()
    assert set(scalars(reports, prefix="p")) == {"p/3/angle", "p/3/residual", "p/3/failed"}
    assert scalars({}) == {}


def attached(running: proxprop.Running, **options) -> tuple[nn.Module, proxprop.Attached]:
    net = model(Exact(), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    handle = proxprop.attach(optimizer, net, running=running)
    assert scalars(handle) == {}
    run(net)
    optimizer.step()
    return net, handle


@pytest.mark.parametrize("block", [None, 6])
def test_scalars_of_a_handle_are_the_moments_of_the_inputs(block: int | None) -> None:
    net, handle = attached(proxprop.Running(damping=0.3, block=block))
    found = scalars(handle)
    x = net[:3](randn(7, 2, 4, 4, seed=1)).detach()
    A = torch.cat([x, torch.ones(7, 1, dtype=x.dtype)], dim=1)
    C = A.T @ A / 7
    if block is not None:
        C = torch.block_diag(*(C[i : i + block, i : i + block] for i in range(0, 17, block)))
    values = torch.linalg.eigvalsh(C)
    assert found["proxprop/3/mean_square"] == pytest.approx(float(values.mean()))
    assert found["proxprop/3/damping"] == pytest.approx(0.3 * float(values.mean()))
    spread = float(values.square().mean().sqrt() / values.mean())
    assert found["proxprop/3/spread"] == pytest.approx(spread)
    assert 1 < spread < 17**0.5


def test_a_layers_own_damping_is_not_told() -> None:
    _, handle = attached(proxprop.Running(damping=None))
    assert {name.rsplit("/", 1)[1] for name in scalars(handle)} == {"mean_square", "spread"}


def test_scalars_of_counts() -> None:
    embedding = proxprop.convert(nn.Embedding(4, 2), module_types="all", include_last=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.0)
    handle = proxprop.attach(optimizer, embedding, running=proxprop.Running())
    embedding(torch.tensor([0, 0, 0, 1])).sum().backward()
    optimizer.step()
    found = scalars(handle)
    assert found["proxprop/Embedding/mean_square"] == pytest.approx(0.25)
    assert found["proxprop/Embedding/spread"] == pytest.approx(math.sqrt((0.75**2 + 0.25**2) / 4) / 0.25)


def test_without_waiting_there_is_no_number_on_the_host() -> None:
    _, handle = attached(proxprop.Running())
    found = scalars(handle, wait=False)
    assert all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in found.values())
    assert {name: float(value) for name, value in found.items()} == pytest.approx(scalars(handle))


def test_a_source_without_anything_to_tell_is_refused() -> None:
    net = model(Exact())
    handle = proxprop.attach(torch.optim.SGD(net.parameters(), lr=0.0), net)
    with pytest.raises(ValueError, match="keeps no running averages to tell of: attach with running="):
        scalars(handle)
    with pytest.raises(
        TypeError, match="reports of observe or what attach returned but was given Sequential"
    ):
        scalars(net)


def test_tensorboard_takes_them(tmp_path) -> None:
    _, handle = attached(proxprop.Running())
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in scalars(handle).items():
            writer.add_scalar(name, value, 1)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(scalars(handle))
    (event,) = events.Scalars("proxprop/3/spread")
    assert event.value == pytest.approx(scalars(handle)["proxprop/3/spread"])
