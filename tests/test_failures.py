"""A factorisation that fails warns once, names the layer, and leaves a safe direction."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import proxprop
from cases import relative_error
from proxprop import CG, Exact
from proxprop.failures import FailureWarner
from proxprop.solvers import FEATURE, SAMPLE, Solver

ONE_DIRECTION = 1e3 * torch.arange(1.0, 7.0)[:, None] * torch.linspace(1, 2, 8)
"""Rows that are multiples of one: at an enormous tau_theta `I/τ_θ + AᵀA` and `I/τ_θ + AAᵀ` are singular in float64."""


def ill_conditioned_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    return proxprop.convert(model, Exact(), tau_theta=1e12, space=FEATURE)


def test_one_warning_that_names_the_layer_and_a_descent_direction() -> None:
    model = ill_conditioned_model()
    input = ONE_DIRECTION
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            model(input).square().sum().backward()
    assert [w.category for w in caught] == [RuntimeWarning]
    message = str(caught[0].message)
    assert message.startswith("0: I/τ_θ + AᵀA is not positive definite")
    assert "tau_theta is too large" in message
    direction = model[0].weight.grad.clone()
    proxprop.revert(model).zero_grad()
    model(input).square().sum().backward()
    assert bool(direction.isfinite().all())
    assert float((direction * model[0].weight.grad).sum()) > 0


def test_a_layer_built_by_hand_is_named_by_what_it_is() -> None:
    layer = proxprop.nn.Linear(8, 4, solver=Exact(), tau_theta=1e12, space=FEATURE)
    with pytest.warns(RuntimeWarning, match=r"^Linear\(in_features=8, out_features=4, bias=True\): "):
        layer(ONE_DIRECTION).square().sum().backward()


@pytest.mark.parametrize("outputs", [1, 64])
def test_an_exactly_zero_pivot_does_not_stop_training(outputs: int) -> None:
    """Equal inputs at an enormous tau_theta; with many outputs the factor is inverted rather than solved with."""
    layer = proxprop.nn.Linear(12, outputs, solver=Exact(), tau_theta=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        layer(torch.ones(6, 12)).square().sum().backward()
    assert bool(layer.weight.grad.isfinite().all())


def test_what_rounding_hides_is_solved_again_without_forming_a_matrix() -> None:
    """A CPU can look, so it need not warn: of rows that occur twice, G has little but the difference."""
    torch.manual_seed(0)
    A, G = torch.randn(30, 80).repeat(2, 1), torch.randn(30, 9)
    G = torch.cat([G, -G]) + 1e-2 * torch.randn(60, 9)
    exact = torch.linalg.solve(torch.eye(80) + A.double().T @ A.double(), A.double().T @ G.double())
    hidden = A.T @ CG(30).samples((A @ A.T)[None], G[None], 1.0).value[0]
    assert relative_error(hidden.double(), exact) > 1e-2
    layer = proxprop.nn.Linear(80, 9, bias=False, solver=CG(30), tau_theta=1.0, space=SAMPLE)
    layer(A).backward(G)
    assert relative_error(layer.weight.grad.T.double(), exact) < 1e-3


@pytest.mark.parametrize("rows", ["many", "twice"])
@pytest.mark.parametrize("tau_theta", [1.0, 30.0])
def test_an_exact_direction_that_is_the_small_rest_of_what_cancels(rows: str, tau_theta: float) -> None:
    """Nearly all of G, and so of U, is orthogonal to A's columns; pivots tell nothing of it."""
    torch.manual_seed(0)
    A = torch.randn(200, 30) if rows == "many" else torch.randn(30, 80).repeat(2, 1)
    G = torch.randn(len(A), 5, dtype=torch.float64)
    G = (G - 0.999 * A.double() @ torch.linalg.pinv(A.double()) @ G).float()
    layer = proxprop.nn.Linear(A.shape[1], 5, bias=False, solver=Exact(), tau_theta=tau_theta, space=SAMPLE)
    layer(A).backward(G)
    M = torch.eye(A.shape[1]) / tau_theta + A.double().mT @ A.double()
    exact = torch.linalg.solve(M, A.double().mT @ G.double())
    assert relative_error(layer.weight.grad.T.double(), exact) < 1e-2


@pytest.mark.parametrize("features", [4, 200])
def test_a_small_matrix_of_features_of_several_scales(features: int) -> None:
    """Each pivot is within reason, and all of them together are not."""
    torch.manual_seed(0)
    A = torch.tensor([[396.0, 396.0, 109.0, 1.0], [109.0, -372.0, 588.0, 1.0], [588.0, 380.0, 380.0, 1.0]])
    A = A.repeat(1, features // 4)
    G = torch.tensor([[0.0], [1.0], [0.0]])
    layer = proxprop.nn.Linear(features, 1, bias=False, solver=Exact(), tau_theta=2271.0, space=FEATURE)
    layer(A).backward(G)
    K = torch.eye(3) / 2271.0 + A.double() @ A.double().mT
    exact = A.double().mT @ torch.linalg.solve(K, G.double())
    assert relative_error(layer.weight.grad.T.double(), exact) < 1e-2


@pytest.mark.parametrize(("samples", "space"), [(24, SAMPLE), (3, FEATURE)])
def test_what_fails_in_a_pinned_space_is_solved_again_with_the_smaller_matrix(
    samples: int, space: str
) -> None:
    """The larger matrix is singular but for λ, which is beyond the rounding of float64 here."""
    torch.manual_seed(0)
    A, G = 1e8 * torch.randn(samples, 8), torch.randn(samples, 5)
    layer = proxprop.nn.Linear(8, 5, bias=False, solver=Exact(), tau_theta=1.0, space=space)
    layer(A).backward(G)
    exact = torch.linalg.lstsq(A.double(), G.double(), driver="gelsd").solution
    assert relative_error(layer.weight.grad.T.double(), exact) < 1e-5


@pytest.mark.parametrize("iterations", [1, 3, 30])
def test_a_gradient_that_rounding_hides_from_the_first_step_on(iterations: int) -> None:
    """All but a trace of G cancels in `AᵀG`."""
    torch.manual_seed(0)
    A, G = torch.randn(30, 4), torch.randn(30, 5)
    G = (G.double() - A.double() @ torch.linalg.lstsq(A.double(), G.double()).solution + 1e-4 * G).float()
    layer = proxprop.nn.Linear(4, 5, bias=False, solver=CG(iterations), tau_theta=1.0, space=SAMPLE)
    layer(A).backward(G)
    B = A.double().T @ G.double()
    expected = CG(iterations).features((A.double().T @ A.double())[None], B[None], damping=1.0).value[0]
    assert relative_error(layer.weight.grad.T.double(), expected) < 1e-2


class Failing(CG):
    """Says that it failed; what it is told to do again is up to it."""

    spaces = (FEATURE,)

    def features(self, S, B, damping):
        return super().features(S, B, damping)._replace(failed=torch.tensor([True]))


def test_what_cannot_be_solved_again_is_said() -> None:
    layer = proxprop.nn.Linear(12, 3, solver=Failing(), space=FEATURE)
    with pytest.warns(RuntimeWarning, match="rounding of AᵀA or AAᵀ hides part of the direction"):
        layer(torch.randn(5, 12)).sum().backward()


@pytest.mark.parametrize("solver", [CG(10), Exact()], ids=str)
def test_stand_in_tensors_are_not_asked_whether_they_failed(solver: Solver) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = proxprop.nn.Linear(8, 9, solver=solver)
        layer(torch.ones(6, 8)).sum().backward()
    assert layer.weight.grad.shape == (9, 8)


def test_a_warner_warns_once() -> None:
    warner = FailureWarner()
    warner.note("layer", None, "because")
    warner.note("layer", torch.tensor([False, False]), "because")
    with pytest.warns(RuntimeWarning, match=r"^layer: because\. This layer will not warn again\.$"):
        warner.note("layer", torch.tensor([False, True]), "because")
    warner.note("layer", torch.tensor([True]), "because")
