"""The paper's Propositions 1 to 5, each by name, against its algorithms written in explicit z and a."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import proxprop
from cases import SOLVER_SPACES, by_name, randn, relative_error
from proxprop import CG, Exact
from proxprop.reference import Network, algorithm1, algorithm2, proximal_step

TAU, TAU_THETA = 0.3, 0.7


def mlp() -> tuple[nn.Sequential, Network, Tensor, Tensor]:
    """A model, the same network in the paper's variables, inputs and targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    y = torch.tensor([0, 2, 1, 1])

    def phi(outputs: int):
        return lambda theta, a: a @ theta.view(outputs, -1)[:, :-1].T + theta.view(outputs, -1)[:, -1]

    network = Network([phi(7), phi(6), phi(3)], torch.tanh, lambda z: functional.cross_entropy(z, y))
    return model, network, randn(4, 5, seed=1), y


def convnet() -> tuple[nn.Sequential, Network, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Softplus(), nn.Conv2d(2, 2, 2, stride=2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3)
    ).double()  # fmt: skip
    y = torch.tensor([0, 2])

    def conv(outputs: int, weight_shape: tuple[int, ...], **how):
        def phi(theta: Tensor, a: Tensor) -> Tensor:
            theta = theta.view(outputs, -1)
            return functional.conv2d(a, theta[:, :-1].reshape(weight_shape), theta[:, -1], **how)

        return phi

    def linear(theta: Tensor, a: Tensor) -> Tensor:
        theta = theta.view(3, -1)
        return a.flatten(1) @ theta[:, :-1].T + theta[:, -1]

    transfers = [conv(2, (2, 1, 3, 3), padding=1), conv(2, (2, 2, 2, 2), stride=2), linear]
    network = Network(transfers, functional.softplus, lambda z: functional.cross_entropy(z, y))
    return model, network, randn(2, 1, 4, 4, seed=1), y


NETWORKS = pytest.mark.parametrize("make", [mlp, convnet])


def layers(model: nn.Sequential) -> list[nn.Module]:
    return [module for module in model if hasattr(module, "weight")]


def stacked(model: nn.Sequential, of: str = "data") -> list[Tensor]:
    """θ of every layer as the reference holds it: each output's weights, then its bias."""
    return [
        torch.cat([getattr(m.weight, of).flatten(1), getattr(m.bias, of)[:, None]], dim=1).flatten()
        for m in layers(model)
    ]


def backward(model: nn.Sequential, X: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    functional.cross_entropy(model(X), y).backward()
    return stacked(model, of="grad")


def gradients_of(network: Network, theta: list[Tensor], X: Tensor) -> tuple[Tensor, ...]:
    theta = [value.detach().requires_grad_() for value in theta]
    return torch.autograd.grad(network.objective(theta, X), theta)


def matrix_of(network: Network, theta: list[Tensor], X: Tensor, layer: int) -> Tensor:
    """φ_l(·, a_{l−1}) written out."""
    _, a = network.forward(theta, X)
    before, phi = a[layer - 1] if layer else X, network.transfers[layer]
    return torch.autograd.functional.jacobian(lambda t: phi(t, before).flatten(), theta[layer])


def largest_eigenvalue(network: Network, theta: list[Tensor], X: Tensor, layer: int) -> float:
    A = matrix_of(network, theta, X, layer)
    return float(torch.linalg.eigvalsh(A.T @ A)[-1])


@NETWORKS
def test_proposition_1_algorithm_1_is_gradient_descent(make) -> None:
    model, network, X, y = make()
    gradients = backward(model, X, y)
    theta = stacked(model)
    for before, after, gradient in zip(theta, algorithm1(network, theta, X, TAU), gradients, strict=True):
        assert relative_error(after, before - TAU * gradient) < 1e-12


@NETWORKS
@pytest.mark.parametrize(
    ("solver", "space"), [pair for pair in SOLVER_SPACES if pair[0] == Exact()], **by_name
)
def test_proposition_2_direction_is_the_update_of_algorithm_2(make, solver, space) -> None:
    """One SGD step at lr = τ on a converted model is one iteration of Algorithm 2."""
    model, network, X, y = make()
    theta = stacked(model)
    expected = algorithm2(network, theta, X, TAU, TAU_THETA)
    proxprop.convert(model, solver, tau_theta=TAU_THETA, space=space)
    optimizer = torch.optim.SGD(model.parameters(), lr=TAU)
    backward(model, X, y)
    optimizer.step()
    for before, after, reference in zip(theta, stacked(model), expected, strict=True):
        assert relative_error(after - before, reference - before) < 1e-9


@NETWORKS
def test_proposition_2_closed_form(make) -> None:
    """θ^{k+1} − θ^k = −τ(I/τ_θ + ∇φ∇φ*)⁻¹∇J for every layer but the last."""
    model, network, X, y = make()
    theta = stacked(model)
    gradients = backward(model, X, y)
    after = algorithm2(network, theta, X, TAU, TAU_THETA)
    for layer in range(len(theta) - 1):
        A = matrix_of(network, theta, X, layer)
        M = torch.eye(A.shape[1], dtype=A.dtype) / TAU_THETA + A.T @ A
        assert (
            relative_error(after[layer] - theta[layer], -TAU * torch.linalg.solve(M, gradients[layer])) < 1e-9
        )
    assert relative_error(after[-1], theta[-1] - TAU * gradients[-1]) < 1e-12


@NETWORKS
def test_proposition_3_fixed_points_are_stationary_points(make) -> None:
    """‖∇J‖ ≤ (1/τ_θ + c)·‖θ^{k+1} − θ^k‖/τ along a whole run: where ProxProp stands still, the gradient is zero."""
    model, network, X, _ = make()
    theta = stacked(model)
    moves = []
    for _ in range(30):
        after = algorithm2(network, theta, X, TAU, TAU_THETA)
        for layer, gradient in enumerate(gradients_of(network, theta, X)):
            move = (after[layer] - theta[layer]).norm() / TAU
            hidden = layer < len(theta) - 1
            factor = 1 / TAU_THETA + largest_eigenvalue(network, theta, X, layer) if hidden else 1.0
            assert gradient.norm() <= factor * move * (1 + 1e-9)
            moves.append(move)
        theta = after
    assert min(moves) < max(moves) / 2, "the run should come closer to a fixed point"


def test_proposition_3_stationary_points_are_fixed_points() -> None:
    """At a point with gradient zero, reached by a plain optimizer, ProxProp does not move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    X, target = randn(3, 2, seed=1), randn(3, 1, seed=2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1000, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X) - target).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()
    assert max(p.grad.norm() for p in model.parameters()) < 1e-12
    proxprop.convert(model, Exact(), tau_theta=1.0)
    closure()
    assert max(p.grad.norm() for p in model.parameters()) < 1e-12


@NETWORKS
@pytest.mark.parametrize("tau_theta", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_proposition_4_descent_with_the_stated_cosine_bound(make, tau_theta) -> None:
    """cos(α) ≥ λ_min(M⁻¹)/λ_max(M⁻¹) ≥ (1/τ_θ + c)⁻¹/τ_θ with c the largest eigenvalue of ∇φ∇φ*."""
    model, network, X, y = make()
    theta = stacked(model)
    gradients = backward(model, X, y)
    directions = backward(proxprop.convert(model, Exact(), tau_theta=tau_theta), X, y)
    for layer in range(len(theta) - 1):
        bound = 1 / (1 + tau_theta * largest_eigenvalue(network, theta, X, layer))
        cosine = functional.cosine_similarity(directions[layer], gradients[layer], dim=0)
        assert cosine >= bound * (1 - 1e-9)
        assert cosine > 0


@NETWORKS
@pytest.mark.parametrize("per_output", [True, False])
@pytest.mark.parametrize("iterations", range(1, 11))
def test_proposition_5_descent_for_any_number_of_cg_iterations(make, iterations, per_output) -> None:
    model, _, X, y = make()
    gradients = backward(model, X, y)
    directions = backward(proxprop.convert(model, CG(iterations, per_output), tau_theta=10.0), X, y)
    for direction, gradient in zip(directions, gradients, strict=True):
        assert float(direction @ gradient) > 0


@NETWORKS
@pytest.mark.parametrize("tau_theta", [1e-3, 1.0, 1e3])
def test_proximal_step_decreases_the_penalty_energy_for_any_step_size(make, tau_theta) -> None:
    """Section 4.1: unconditional stability, where an explicit step of the same size would overshoot."""
    _, network, X, _ = make()
    theta = stacked(make()[0])
    z, a = network.forward(theta, X)
    z = [value + randn(*value.shape, seed=5 + layer) for layer, value in enumerate(z)]
    for layer, phi in enumerate(network.transfers[:-1]):
        before = a[layer - 1] if layer else X
        moved = list(theta)
        moved[layer] = proximal_step(phi, theta[layer], before, z[layer], tau_theta)
        assert network.energy(moved, a, z, X, TAU) < network.energy(theta, a, z, X, TAU)
