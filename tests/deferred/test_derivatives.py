"""`create_graph=True` in deferred mode: penalties on derivatives, networks that solve differential equations, Hessians."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from deferred_claims import works
from proxprop import CG, Exact, Running
from training import assert_same, attached, grads

DOUBLE = works(
    "Double backward (`create_graph=True`)",
    note="in deferred mode; rows of S are those of the forward pass, not those of its derivatives",
)
EVERY_SECOND = Running(decay=0.5, update_every=2, invert_every=2)
MODES = pytest.mark.parametrize("running", [None, EVERY_SECOND], ids=["deferred", "running"])

Loss = Callable[[nn.Module, int], Tensor]


def network(activation: Callable[[], nn.Module], inputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, 1)]
    return nn.Sequential(*layers).double()


def derivative(output: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return found


def poisson(model: nn.Module, step: int) -> Tensor:
    """Minus the Laplacian of the network is 2π²·sin(πx)·sin(πy) inside the unit square, and it vanishes outside."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(40, 2, generator=generator).double().requires_grad_()
    first = derivative(model(x), x)
    laplacian = sum(derivative(first[:, i], x)[:, i] for i in range(2))
    wave = torch.sin(torch.pi * x.detach()).prod(1)
    inside = (laplacian + 2 * torch.pi**2 * wave).square().mean()
    edge = x.detach().clone()
    edge[:, step % 2] = (edge[:, step % 2] > 0.5).double()
    return inside / 100 + model(edge).square().mean()


def critic(model: nn.Module, step: int) -> Tensor:
    """A Wasserstein critic's loss with its penalty on the slope between two samples."""
    real, fake = randn(16, 2, seed=step) + 2, randn(16, 2, seed=step + 100)
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    slope = derivative(model(between), between).norm(dim=1)
    return model(fake).mean() - model(real).mean() + 10 * (slope - 1).square().mean()


LOSSES = pytest.mark.parametrize(
    ("loss", "activation"), [(poisson, nn.Tanh), (critic, nn.Softplus), (critic, nn.ReLU)],
    ids=["poisson", "critic", "critic-relu"],
)  # fmt: skip


@DOUBLE
@LOSSES
@MODES
def test_the_gradient_is_the_plain_models(loss: Loss, activation, running: Running | None) -> None:
    plain = network(activation)
    model = proxprop.convert(copy.deepcopy(plain), Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    proxprop.attach(optimizer, model, running=running)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            loss(each, step).backward()
        assert_same(grads(model), grads(plain))
        optimizer.step()


@DOUBLE
@LOSSES
@MODES
def test_they_train(loss: Loss, activation, running: Running | None) -> None:
    model = proxprop.convert(network(activation), Exact(), tau_theta=0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    proxprop.attach(optimizer, model, running=running)
    losses = []
    for step in range(60):
        optimizer.zero_grad()
        found = loss(model, step)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert (
        sum(losses[-10:]) < 0.5 * sum(losses[:10]) if losses[0] > 0 else sum(losses[-10:]) < sum(losses[:10])
    )


@DOUBLE
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_rows_of_a_penalty_alone_are_those_of_its_forward_pass(activation, solver) -> None:
    """Counted once, also where a derivative is the only way from the loss to a layer, as through ReLU."""
    plain = network(activation)
    model = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7)
    optimizer = attached(model)
    x = randn(30, 2, seed=1).requires_grad_()
    for each in (plain, model):
        derivative(each(x), x).square().sum().backward()
    hidden = plain[:2](x.detach()).detach()
    optimizer.step()
    for i, rows in ((0, x.detach()), (2, hidden)):
        A = torch.cat([rows, torch.ones(30, 1).double()], 1)
        bias = plain[i].bias.grad  # none reaches a bias through ReLU
        B = torch.cat([plain[i].weight.grad.T, torch.zeros(1, 12).double() if bias is None else bias[None]])
        D = solver.features((A.T @ A)[None], B[None], 1 / 0.7).value[0]
        assert relative_error(model[i].weight.grad, D[:-1].T) < 1e-9


@DOUBLE
def test_hessian_vector_products_leave_nothing_behind() -> None:
    plain = network(nn.Tanh)
    model = proxprop.convert(copy.deepcopy(plain), Exact())
    optimizer = attached(model)
    products = []
    for each in (plain, model):
        parameters = list(each.parameters())
        gradient = torch.autograd.grad(
            each(randn(9, 2, seed=1)).square().sum(), parameters, create_graph=True
        )
        products.append(torch.autograd.grad(sum(g.sum() for g in gradient), parameters))
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(*products, strict=True))
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
