"""Models people really have: they convert, train, and their directions are those of an independent computation."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import proxprop
from captured import captured, convert, expected_direction
from cases import relative_error
from models import MODELS, ModelCase
from proxprop import Exact
from proxprop.nn import ProximalLayer
from proxprop.solvers import CG, Solver

ROWS = {case.name: pytest.mark.compatibility(case.name, section="Models", note=case.note) for case in MODELS}
CASES = [pytest.param(case, marks=ROWS[case.name], id=case.name) for case in MODELS]
SOLVED = [
    pytest.param(case, solver, marks=ROWS[case.name], id=f"{case.name}-{solver}")
    for case in MODELS
    for solver in ([CG(3), Exact()] if case.module_types is None else [CG(3)])
]


@pytest.mark.parametrize(("case", "solver"), SOLVED)
def test_directions_equal_an_independent_computation(case: ModelCase, solver: Solver) -> None:
    plain = case.model()
    model = convert(case, copy.deepcopy(plain), solver)
    calls = captured(case, plain)
    case.loss(model).backward()
    assert len(calls) >= 3
    for name, (inputs, G) in calls.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, ProximalLayer)
        for parameter, direction in expected_direction(plain.get_submodule(name), inputs, G, solver).items():
            error = relative_error(layer.get_parameter(parameter).grad, direction)
            assert error < 1e-8, f"{name}.{parameter}: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_explicit_parameters_keep_backprops_gradient(case: ModelCase) -> None:
    plain = case.model()
    model = convert(case, copy.deepcopy(plain))
    for each in (plain, model):
        case.loss(each).backward()
    for name in case.explicit:
        for (_, found), (_, expected) in zip(
            model.get_submodule(name).named_parameters(recurse=False),
            plain.get_submodule(name).named_parameters(recurse=False),
            strict=True,
        ):
            assert relative_error(found.grad, expected.grad) < 1e-12


def train(case: ModelCase, model: nn.Module) -> list[float]:
    """The losses of ten Adam steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("case", CASES)
def test_ten_adam_steps_lower_the_loss(case: ModelCase) -> None:
    model = convert(case, case.model())
    losses = train(case, model)
    assert losses[-1] < losses[0]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_layer_converted_lowers_the_loss_too(case: ModelCase) -> None:
    model = proxprop.convert(case.model(), CG(3), tau_theta=0.5, module_types="all")
    converted = {row.name for row in proxprop.summary(model, case.data()).rows if row.status == "converted"}
    assert len(converted) > 1 or case.module_types is not None
    losses = train(case, model)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_state_dict_loads_back_into_the_plain_model(case: ModelCase) -> None:
    plain, model = case.model().eval(), convert(case, case.model())
    assert list(model.state_dict()) == list(plain.state_dict())
    case.loss(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    with torch.no_grad():
        before = case.loss(plain)
        assert plain.load_state_dict(model.state_dict()).missing_keys == []
        assert torch.equal(case.loss(plain), case.loss(model.eval()))
        assert not torch.equal(case.loss(plain), before)


@pytest.mark.parametrize("case", CASES)
def test_summary_speaks_of_every_parameter(case: ModelCase) -> None:
    model = convert(case, case.model())
    found = {row.name: row for row in proxprop.summary(model, case.data()).rows}
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert owners <= found.keys()
    assert {name for name in case.layers if found[name].status == "converted"} == set(case.layers)
    assert all(found[name].plan is not None for name in case.layers)
    for name, words in case.explicit.items():
        assert found[name].status == "explicit"
        assert words in found[name].reason
    assert all(row.reason for row in found.values() if row.status == "explicit")


@pytest.mark.parametrize("case", CASES)
def test_revert_gives_the_plain_model_back(case: ModelCase) -> None:
    plain = case.model()
    model = proxprop.revert(convert(case, copy.deepcopy(plain)))
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for each in (plain, model):
        case.loss(each).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_a_gpt2_converts_without_registering_anything() -> None:
    (case,) = (case for case in MODELS if case.name.startswith("GPT-2"))
    assert Conv1D not in proxprop.nn.TABLE
    model = proxprop.convert(case.model())
    found = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert found
    assert all(isinstance(module, ProximalLayer) for module in found)
    assert type(proxprop.revert(model).get_submodule(case.layers[0])) is Conv1D
