"""Models people really have: they convert, train, and their directions are those of an independent computation."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import proxprop
from cases import relative_error, textbook_cg
from models import MODELS, GraphConv, ModelCase
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


def convert(case: ModelCase, model: nn.Module, solver: Solver = CG(3)) -> nn.Module:
    return proxprop.convert(model, solver, tau_theta=0.5, module_types=case.module_types)


def captured(case: ModelCase, model: nn.Module) -> dict[str, tuple[tuple[Tensor, ...], Tensor]]:
    """What each looked-at layer of a plain model was called with, and the gradient at its output."""
    found: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}

    def look(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen = tuple(input.detach().clone() for input in inputs)
        output.register_hook(lambda G: found.__setitem__(name, (seen, G.clone())))

    for name in case.layers:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: look(name, inputs, output)
        )
    case.loss(model).backward()
    return found


def rows(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The layer's input as `[samples, features]`, without the ones."""
    input = inputs[0]
    if isinstance(layer, GraphConv):
        return inputs[1] @ input
    if isinstance(layer, nn.Conv2d):
        patches = functional.unfold(input, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    if isinstance(layer, nn.ConvTranspose2d):
        return transposed_rows(layer, input)
    return input.flatten(0, -2)


def transposed_rows(layer: nn.ConvTranspose2d, input: Tensor) -> Tensor:
    """A transposed convolution is a convolution, kernel turned round, of the input with zeros between its pixels."""
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    batch, channels, height, width = input.shape
    spread = input.new_zeros(batch, channels, (height - 1) * stride + 1, (width - 1) * stride + 1)
    spread[..., ::stride, ::stride] = input
    return functional.unfold(spread, kernel, padding=kernel - 1).transpose(1, 2).flatten(0, 1)


def columns(layer: nn.Module, G: Tensor) -> Tensor:
    """An output-shaped array as `[samples, outputs]`."""
    return G.movedim(1, -1).flatten(0, -2) if G.dim() == 4 else G.flatten(0, -2)


def weight_of(layer: nn.Module, D: Tensor) -> Tensor:
    """`D [features, outputs]` in the shape of the layer's weight."""
    if isinstance(layer, GraphConv | Conv1D):
        return D
    if isinstance(layer, nn.ConvTranspose2d):
        inputs, outputs, *kernel = layer.weight.shape
        return D.T.view(outputs, inputs, *kernel).transpose(0, 1).flip(2, 3)
    return D.T.reshape(layer.weight.shape)


def expected_direction(
    layer: nn.Module, inputs: tuple[Tensor, ...], G: Tensor, solver: Solver
) -> dict[str, Tensor]:
    """Dense, in float64, without the package."""
    A, G = rows(layer, inputs), columns(layer, G)
    if layer.bias is not None:
        A = torch.cat([A, A.new_ones(len(A), 1)], dim=1)
    M, B = A.T @ A + torch.eye(A.shape[1], dtype=A.dtype) / 0.5, A.T @ G
    if isinstance(solver, Exact):
        D = torch.linalg.solve(M, B)
    elif isinstance(layer, GraphConv):  # any class that is in no table: one step length for all outputs
        stacked = torch.kron(torch.eye(B.shape[1], dtype=M.dtype), M)
        D = textbook_cg(stacked, B.T.flatten(), solver.iterations).view_as(B.T).T
    else:
        D = torch.stack([textbook_cg(M, b, solver.iterations) for b in B.T], dim=1)
    if layer.bias is None:
        return {"weight": weight_of(layer, D)}
    return {"weight": weight_of(layer, D[:-1]), "bias": D[-1]}


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
