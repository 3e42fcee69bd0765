"""A factorisation that fails warns once, names the layer, and leaves a safe direction."""

import warnings

import pytest
import torch
from torch import nn

import proxprop
from proxprop import Exact
from proxprop.solvers import SAMPLE
from proxprop.solvers.cholesky import factorize
from proxprop.solvers.exact import by_factor


def indefinite(groups: int = 1) -> torch.Tensor:
    """Not positive semidefinite, as rounding can leave a Gram matrix that is nearly singular."""
    return torch.tensor([[1.0, 2.0], [2.0, 1.0]]).repeat(groups, 1, 1)


def test_substitute_is_the_gradient_over_an_upper_bound_of_the_spectrum() -> None:
    B = torch.tensor([[[3.0], [1.0]]])
    solution = by_factor(factorize(indefinite(), damping=0.5), B.shape[-1])(B)
    assert solution.failed.tolist() == [True]
    assert torch.allclose(solution.value, B / 2.5)


def test_only_the_failed_group_is_replaced() -> None:
    M = torch.stack([indefinite()[0], torch.eye(2)])
    B = torch.ones(2, 2, 1)
    solution = by_factor(factorize(M, damping=0.5), B.shape[-1])(B)
    assert solution.failed.tolist() == [True, False]
    assert torch.allclose(solution.value[1], B[1] / 1.5)


def ill_conditioned_model() -> nn.Sequential:
    """Repeated large inputs at an enormous tau_theta: K + I/τ_θ is singular in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    return proxprop.convert(model, Exact(), tau_theta=1e12, space=SAMPLE)


def test_one_warning_that_names_the_layer_and_a_descent_direction() -> None:
    model = ill_conditioned_model()
    input = torch.linspace(1, 2, 8).expand(6, 8) * 1e3
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
    layer = proxprop.nn.Linear(8, 4, solver=Exact(), tau_theta=1e12, space=SAMPLE)
    with pytest.warns(RuntimeWarning, match=r"^Linear\(in_features=8, out_features=4, bias=True\): "):
        layer(torch.linspace(1, 2, 8).expand(6, 8) * 1e3).square().sum().backward()


@pytest.mark.parametrize("outputs", [1, 64])
def test_an_exactly_zero_pivot_does_not_stop_training(outputs: int) -> None:
    """Equal inputs at an enormous tau_theta; with many outputs the factor is inverted rather than solved with."""
    layer = proxprop.nn.Linear(12, outputs, solver=Exact(), tau_theta=1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        layer(torch.ones(6, 12)).square().sum().backward()
    assert bool(layer.weight.grad.isfinite().all())


def test_a_singular_matrix_is_replaced_whatever_the_number_of_outputs() -> None:
    for outputs in (1, 5):
        B = torch.ones(1, 2, outputs)
        solution = by_factor(factorize(-torch.eye(2)[None], damping=1.0), B.shape[-1])(B)
        assert solution.failed.tolist() == [True]
        assert torch.allclose(solution.value, B / -1.0)
