"""`.grad` of a proximal layer is the paper's direction; everything else about the layer is torch's own."""

import copy

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import (
    CROSSED_SOLVER_SPACES,
    LAYERS,
    SOLVER_SPACES,
    LayerCase,
    assert_directions,
    by_name,
    oracle,
    randn,
    relative_error,
)
from proxprop import CG, Exact
from proxprop.solvers import Solver
from quiet import quiet_same_padding


def backward(layer: nn.Module, input: Tensor, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Run a layer under the loss ⟨G, output⟩; return the output and G."""
    output = layer(input)
    G = randn(*output.shape, seed=seed).to(output.dtype)
    output.backward(G)
    return output, G


@quiet_same_padding
@pytest.mark.parametrize("case", LAYERS, **by_name)
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
def test_direction_equals_dense_oracle(case: LayerCase, solver: Solver, space: str) -> None:
    plain, input = case.layer(), case.input()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space=space, include_last=True)
    _, G = backward(layer, input)
    assert_directions(layer, oracle(plain, input, G, solver, tau_theta=0.7))


@quiet_same_padding
@pytest.mark.parametrize("case", LAYERS, **by_name)
@pytest.mark.parametrize("solver", [Exact(), CG(2)], **by_name)
def test_planned_space_and_gradient_scaling_equal_dense_oracle(case: LayerCase, solver: Solver) -> None:
    plain, input = case.layer(), case.input()
    settings = {"tau_theta": 2.0, "scaling": "gradient", "include_last": True}
    layer = proxprop.convert(copy.deepcopy(plain), solver, **settings)
    _, G = backward(layer, input)
    assert_directions(layer, oracle(plain, input, G, solver, tau_theta=2.0, scaling="gradient"))


@quiet_same_padding
@pytest.mark.parametrize("case", LAYERS, **by_name)
def test_forward_and_input_gradient_are_torchs_to_the_bit(case: LayerCase) -> None:
    plain = case.layer()
    layer = proxprop.convert(copy.deepcopy(plain), include_last=True)
    inputs = [case.input().requires_grad_() for _ in range(2)]
    outputs = [backward(module, input)[0] for module, input in zip([plain, layer], inputs, strict=True)]
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@pytest.mark.parametrize("case", [c for c in LAYERS if c.layer().bias is not None], **by_name)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
@quiet_same_padding
def test_only_what_is_trained_is_solved_for(case: LayerCase, frozen: str, solver: Solver, space: str) -> None:
    plain, input = case.layer(), case.input()
    plain.get_parameter(frozen).requires_grad_(False)
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space=space, include_last=True)
    _, G = backward(layer, input)
    assert_directions(layer, oracle(plain, input, G, solver, tau_theta=0.7))


def test_constructor_takes_torchs_arguments_and_ours() -> None:
    layer = proxprop.nn.Conv2d(
        2,
        4,
        3,
        stride=2,
        padding="valid",
        groups=2,
        bias=False,
        dtype=torch.float64,
        solver=Exact(),
        tau_theta=0.1,
    )
    assert isinstance(layer, nn.Conv2d)
    assert (layer.solver, layer.tau_theta, layer.stride, layer.bias) == (Exact(), 0.1, (2, 2), None)
    assert layer.weight.dtype == torch.float64
    assert "solver=Exact(), tau_theta=0.1)" in repr(layer)
    layer.scaling, layer.space = "gradient", "feature"
    assert "tau_theta=0.1, scaling='gradient', space='feature')" in repr(layer)


def test_settings_of_a_layer_can_be_changed_and_are_checked() -> None:
    layer = proxprop.nn.Linear(3, 2)
    layer.tau_theta = 0.5
    layer.solver = Exact()
    assert (layer.tau_theta, layer.solver) == (0.5, Exact())
    with pytest.raises(ValueError, match=r"tau_theta should be > 0 and finite but is -1"):
        layer.tau_theta = -1.0
    assert layer.tau_theta == 0.5


@pytest.mark.parametrize(
    "make", [lambda x: x.transpose(0, 1), lambda x: x[:, :1].expand(6, 6), lambda x: x[::2]]
)
@pytest.mark.parametrize(("solver", "space"), SOLVER_SPACES, **by_name)
def test_strided_and_expanded_inputs(make, solver: Solver, space: str) -> None:
    input = make(randn(6, 6, seed=3))
    plain = nn.Linear(input.shape[1], 3).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space=space, include_last=True)
    _, G = backward(layer, input)
    assert_directions(layer, oracle(plain, input.contiguous(), G, solver, tau_theta=0.7))


def test_expanded_output_gradient_and_channels_last() -> None:
    plain = nn.Conv2d(2, 3, 3, padding=1).double()
    layer = proxprop.convert(copy.deepcopy(plain), Exact(), include_last=True)
    input = randn(2, 2, 4, 4, seed=4)
    layer.to(memory_format=torch.channels_last)(input.to(memory_format=torch.channels_last)).sum().backward()
    G = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    assert_directions(layer, oracle(plain, input, G, Exact(), tau_theta=1.0))


@pytest.mark.parametrize("make", [lambda: nn.Linear(5, 4), lambda: nn.Conv1d(5, 4, 1)])
def test_in_place_activation_after_the_layer(make) -> None:
    plain = make().double()
    layer = proxprop.convert(copy.deepcopy(plain), CG(3), include_last=True)
    input, C = randn(6, 5, seed=5), randn(6, 4, seed=6)
    input, C = (input, C) if isinstance(plain, nn.Linear) else (input[..., None], C[..., None])
    (C * nn.ReLU(inplace=True)(layer(input))).sum().backward()
    G = C * (plain(input) > 0)
    assert_directions(layer, oracle(plain, input, G, CG(3), tau_theta=1.0))


def test_input_changed_in_place_before_backward_is_an_error() -> None:
    layer = proxprop.nn.Linear(3, 2)
    input = torch.ones(4, 3)
    output = layer(input)
    input.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_layer_used_twice_sums_the_directions_of_its_calls() -> None:
    """The documented meaning in immediate mode: every call solves its own system."""
    plain = nn.Linear(4, 4).double()
    layer = proxprop.convert(copy.deepcopy(plain), Exact(), include_last=True)
    first, second = randn(3, 4, seed=7), randn(5, 4, seed=8)
    G_first, G_second = randn(3, 4, seed=9), randn(5, 4, seed=10)
    ((layer(first) * G_first).sum() + (layer(second) * G_second).sum()).backward()
    parts = [oracle(plain, x, G, Exact(), 1.0) for x, G in [(first, G_first), (second, G_second)]]
    assert_directions(layer, {name: parts[0][name] + parts[1][name] for name in parts[0]})


def test_gradients_accumulate_as_torchs_do() -> None:
    layer, input = proxprop.nn.Linear(4, 3, dtype=torch.float64), randn(5, 4, seed=11)
    backward(layer, input)
    once = layer.weight.grad.clone()
    backward(layer, input)
    assert relative_error(layer.weight.grad, 2 * once) < 1e-14


def test_empty_batch_gives_zero_as_torchs_does() -> None:
    for layer, shape in [(proxprop.nn.Linear(3, 2), (0, 3)), (proxprop.nn.Conv2d(1, 2, 2), (0, 1, 3, 3))]:
        layer(torch.zeros(shape)).sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


def test_no_graph_and_nothing_saved_without_gradients() -> None:
    layer = proxprop.nn.Linear(3, 2)
    with torch.no_grad():
        assert layer(torch.ones(1, 3)).grad_fn is None
    with torch.inference_mode():
        assert layer(torch.ones(1, 3)).is_inference()
    layer.requires_grad_(False)
    assert layer(torch.ones(1, 3)).grad_fn is None


def test_differentiating_a_direction_is_refused() -> None:
    layer, input = proxprop.nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"can't be differentiated again.*revert"):
        torch.autograd.grad(layer(input).square().sum(), input, create_graph=True)


def test_large_convolution_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """S must not depend on how many images are unfolded at a time."""
    plain, input = nn.Conv2d(2, 3, 3, stride=2).double(), randn(5, 2, 5, 5, seed=12)
    monkeypatch.setattr("proxprop.tuning.PATCHES_MOST_NUMBERS", 1)
    layer = proxprop.convert(copy.deepcopy(plain), Exact(), space="feature", include_last=True)
    _, G = backward(layer, input)
    assert_directions(layer, oracle(plain, input, G, Exact(), tau_theta=1.0))
