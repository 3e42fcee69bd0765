"""Any module that is linear in its parameters is solved matrix-free; one that is not is refused."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error, textbook_cg
from proxprop import CG, Exact
from proxprop.transfer import check_linear


class Graph(nn.Module):
    """A graph convolution `P X W + b` with a keyword argument and a scale per node."""

    def __init__(self, nodes: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, X: Tensor, unused: None = None, *, adjacency: Tensor) -> Tensor:
        self.calls += 1
        return adjacency @ X @ self.weight + self.bias


def graph_model() -> tuple[Graph, Tensor, Tensor]:
    torch.manual_seed(0)
    return Graph(5, 4, 3).double(), randn(5, 4, seed=1), randn(5, 5, seed=2)


def stacked_oracle(module: Graph, X: Tensor, P: Tensor, G: Tensor, k: int, tau: float) -> dict[str, Tensor]:
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    columns = []
    for name in names:
        for index in range(module.get_parameter(name).numel()):
            units = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
            units[name].view(-1)[index] = 1.0
            columns.append((P @ X @ units["weight"] + units["bias"]).flatten())
    A = torch.stack(columns, 1)
    D = textbook_cg(torch.eye(A.shape[1], dtype=A.dtype) / tau + A.T @ A, A.T @ G.flatten(), k)
    parts = D.split([module.get_parameter(name).numel() for name in names])
    return {name: part.view_as(module.get_parameter(name)) for name, part in zip(names, parts, strict=True)}


@pytest.mark.compatibility(
    "Any class that is linear in its parameters (`module_types=[...]`)", section="Layers"
)
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("frozen", [[], ["bias"], ["weight"]])
def test_direction_is_textbook_cg_on_all_parameters_stacked(k: int, frozen: list[str]) -> None:
    module, X, P = graph_model()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    G = randn(5, 3, seed=3)
    expected = stacked_oracle(module, X, P, G, k, tau=0.6)
    proxprop.convert(module, CG(k), tau_theta=0.6, module_types=[Graph], include_last=True)
    module(X, None, adjacency=P).backward(G)
    for name, parameter in module.named_parameters():
        if name in expected:
            assert relative_error(parameter.grad, expected[name]) < 1e-9
        else:
            assert parameter.grad is None


def test_forward_and_input_gradients_are_the_modules_own() -> None:
    module, X, P = graph_model()
    plain = copy.deepcopy(module)
    proxprop.convert(module, module_types=[Graph], include_last=True)
    results = []
    for each in (plain, module):
        inputs = X.clone().requires_grad_(), P.clone().requires_grad_()
        output = each(inputs[0], adjacency=inputs[1])
        output.square().sum().backward()
        results.append((output, inputs[0].grad, inputs[1].grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_buffers_and_random_state_move_as_in_the_plain_module() -> None:
    module, X, P = graph_model()
    proxprop.convert(module, module_types=[Graph], include_last=True)
    state = torch.get_rng_state()
    module(X, adjacency=P).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert float(module.calls) == 1.0


def test_agrees_with_the_structured_layer_under_one_step_length() -> None:
    torch.manual_seed(0)
    structured = proxprop.nn.Conv2d(2, 3, 3, solver=CG(4, per_output=False), dtype=torch.float64)

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input: Tensor) -> Tensor:
            return self.inner(input)

    wrapped = Wrapped(proxprop.revert(copy.deepcopy(structured)))
    proxprop.convert(wrapped, CG(4), module_types=[Wrapped], include_last=True)
    assert isinstance(wrapped, proxprop.nn.ProximalLayer)
    X = randn(2, 2, 5, 5, seed=4)
    for layer in (structured, wrapped):
        layer(X).square().sum().backward()
    assert relative_error(wrapped.inner.weight.grad, structured.weight.grad) < 1e-9


def test_pickles_and_reverts() -> None:
    module, X, P = graph_model()
    proxprop.convert(module, CG(2), tau_theta=0.3, module_types=[Graph], include_last=True)
    clone = pickle.loads(pickle.dumps(module))
    assert (type(clone), clone.tau_theta) == (type(module), 0.3)
    assert torch.equal(clone(X, adjacency=P), module(X, adjacency=P))
    assert type(proxprop.revert(module)) is Graph


class Factored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


@pytest.mark.parametrize(("make", "error", "message"), [
    (Factored, ValueError, r"Factored is not linear in its parameters: φ\(θ₁ \+ 2θ₂\) differs.*product of parameters"),
    (lambda: Residual(3, 3), ValueError, r"Residual is not linear.*residual connection"),
    (lambda: Noisy(3, 3), ValueError, r"Noisy gives another output each time it is called"),
    (lambda: Pair(3, 3), TypeError, r"Pair should return one tensor but returned tuple"),
])  # fmt: skip
def test_modules_that_are_not_linear_are_refused(make, error, message) -> None:
    module = make()
    with pytest.raises(error, match=message):
        check_linear(module, torch.ones(2, 3))
    proxprop.convert(module, module_types=[type(module)], include_last=True)
    with pytest.raises(error, match=message):
        module(torch.ones(2, 3))


def test_exact_has_no_space_for_an_unknown_module() -> None:
    module, _, _ = graph_model()
    with pytest.raises(
        ValueError, match=r"Graph: Exact\(\) cannot solve this layer in any space.*the layer has matrix_free"
    ):
        proxprop.convert(module, Exact(), module_types=[Graph], include_last=True)
    with pytest.raises(ValueError, match=r"Graph: CG.*cannot solve this layer in space 'feature'"):
        proxprop.convert(module, CG(2), space="feature", module_types=[Graph], include_last=True)


class Wrap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def wrapped_direction(model: nn.Module, X: Tensor) -> Tensor:
    model(X).square().sum().backward()
    return model.inner.weight.grad


def test_layers_inside_a_module_solved_as_a_whole_stay_plain() -> None:
    torch.manual_seed(0)
    model, X = Wrap().double(), randn(5, 3, seed=1)
    alone = wrapped_direction(
        proxprop.convert(copy.deepcopy(model), CG(9), module_types=[Wrap], include_last=True), X
    )
    both = copy.deepcopy(model)
    proxprop.convert(both, CG(9), module_types=[nn.Linear, Wrap], include_last=True)
    assert type(both.inner) is nn.Linear
    earlier = proxprop.convert(copy.deepcopy(model), CG(9), include_last=True)
    proxprop.convert(earlier, CG(9), module_types=[Wrap], include_last=True)
    for other in (both, earlier):
        assert relative_error(wrapped_direction(other, X), alone) < 1e-12


def test_a_last_module_solved_as_a_whole_stays_explicit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Wrap())
    proxprop.convert(model, module_types=[nn.Linear, Wrap])
    assert [isinstance(m, proxprop.nn.ProximalLayer) for m in (*model, model[1].inner)] == [
        True,
        False,
        False,
    ]


def test_buffers_are_those_of_the_forward_pass_and_inner_hooks_run() -> None:
    torch.manual_seed(0)
    model, X = (
        proxprop.convert(Wrap().double(), CG(9), module_types=[Wrap], include_last=True),
        randn(5, 3, seed=1),
    )
    expected = wrapped_direction(model, X).clone()
    calls = []
    model.inner.register_forward_hook(lambda *_: calls.append(1))
    model.zero_grad()
    buffer, output = model.scale, model(X)
    assert model.scale is buffer
    model.scale.mul_(7.0)
    output.square().sum().backward()
    assert relative_error(model.inner.weight.grad, expected) < 1e-12
    assert calls


def test_half_precision_with_a_floating_buffer() -> None:
    model = proxprop.convert(Wrap().bfloat16(), CG(2), module_types=[Wrap], include_last=True)
    model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.inner.weight.grad.dtype == torch.bfloat16


class Lookup(nn.Module):
    """Its output is a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, rows: int) -> Tensor:
        return self.table[:rows]


def test_in_place_operations_do_not_reach_a_parameter_through_its_view() -> None:
    model = proxprop.convert(Lookup(), CG(2), module_types=[Lookup], include_last=True)
    output = model(3)
    output += 5.0
    output.sum().backward()
    assert torch.equal(model.table.detach(), torch.ones(4, 2))
    assert float(model.table.grad[0, 0]) == pytest.approx(0.5)


def test_a_linear_module_is_one_under_autocast_too() -> None:
    """Its product is rounded to bfloat16 although its output is in float32; an activation is still noticed."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    torch.manual_seed(0)
    module, x = Scaled(50, 40), torch.randn(30, 50)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.float32
        check_linear(module, x)
        with pytest.raises(ValueError, match="not linear in its parameters"):
            check_linear(nn.Sequential(module, nn.Tanh()), x)
