"""The released iteration, against a literal one whose residual and direction share memory."""

import pytest
import torch
from torch import nn

import proxprop
from proxprop.lab import published
from proxprop.lab.published import PublishedCG


def literal(M, B, iterations, dims=0):
    """On one matrix `M` and columns `B [features, outputs]`, with arrays updated in place."""
    X, R = torch.zeros_like(B), B.clone()
    P, squared = R, (R**2).sum(dims)
    first = squared.mean()
    for step in range(1, iterations + 1):
        image = M @ P
        length = squared / ((P * image).sum(dims) + 1e-6)
        X += P * length
        if step == iterations:
            break
        R -= image * length
        now = (R**2).sum(dims)
        if now.max() < 1e-4 * first:
            break
        P = R + P * (now / (squared + 1e-6))
        squared = now
    return X


def problem(samples, features, outputs, scale=1.0):
    torch.manual_seed(samples * features)
    A = torch.randn(samples, features, dtype=torch.float64)
    return A, scale * torch.randn(samples, outputs, dtype=torch.float64)


@pytest.mark.parametrize("iterations", [1, 2, 3, 5, 10])
@pytest.mark.parametrize(("samples", "features"), [(6, 9), (20, 5)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_it_is_the_released_iteration_in_both_spaces(iterations, samples, features, scale):
    A, G = problem(samples, features, 4, scale)
    expected = literal(A.T @ A + 2.0 * torch.eye(features, dtype=A.dtype), A.T @ G, iterations)
    solver = PublishedCG(iterations)
    torch.testing.assert_close(
        solver.features((A.T @ A)[None], (A.T @ G)[None], 2.0).value[0], expected, rtol=1e-8, atol=0
    )
    U = solver.samples((A @ A.T)[None], G[None], 2.0).value[0]
    torch.testing.assert_close(A.T @ U, expected, rtol=1e-6, atol=1e-12 * scale)


def test_it_stops_early():
    A, G = torch.eye(3, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    two, many = (PublishedCG(k).features(A[None], G[None], 1.0).value for k in (2, 50))
    torch.testing.assert_close(many, two)


def test_from_the_second_step_on_it_is_not_conjugate_gradients():
    A, G = problem(8, 5, 3)
    systems = (A.T @ A)[None], (A.T @ G)[None], 1.0
    one, correct = (solver(1).features(*systems).value for solver in (PublishedCG, proxprop.CG))
    torch.testing.assert_close(one, correct, rtol=1e-4, atol=0)
    three, correct = (solver(3).features(*systems).value for solver in (PublishedCG, proxprop.CG))
    assert (three - correct).norm() > 0.1 * correct.norm()


def test_convolutions_have_one_step_length_and_linear_layers_one_an_output():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    published.convert(model, 3, tau_theta=0.5)
    assert model[0].solver == PublishedCG(3, per_output=False)
    assert model[2].solver == PublishedCG(3)
    assert type(model[4]) is nn.Linear
    assert model[0].tau_theta == 0.5
    conv, x, G = model[0].double(), torch.randn(6, 1, 4, 4).double(), torch.randn(6, 2, 2, 2).double()
    conv(x).backward(G)
    rows = nn.functional.unfold(x, 3).mT.reshape(-1, 9)
    A = torch.cat([rows, torch.ones(len(rows), 1, dtype=x.dtype)], 1)
    M, B = A.T @ A + 2.0 * torch.eye(10, dtype=x.dtype), A.T @ G.movedim(1, -1).reshape(-1, 2)
    expected = literal(M, B, 3, dims=(0, 1))
    torch.testing.assert_close(conv.weight.grad.reshape(2, 9), expected[:9].T)
    torch.testing.assert_close(conv.bias.grad, expected[9])
