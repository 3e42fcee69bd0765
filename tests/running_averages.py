"""A layer on running averages of S, its batches, and the direction that `Running` states."""

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn
from proxprop import CG, Exact, Running
from proxprop.solvers import Solver

SOLVERS = pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of different sizes and scales: inputs and G."""
    return [(randn(5 + 2 * i, 4, seed=i) * (1 + i), randn(5 + 2 * i, 3, seed=50 + i)) for i in range(count)]


def stepped(layer: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, G: Tensor) -> Tensor:
    """The direction of one step, weight above bias, as `[features, outputs]`."""
    optimizer.zero_grad()
    for part in (slice(0, 2), slice(2, None)):
        layer(x[part]).backward(G[part])
    optimizer.step()
    return torch.cat([layer.weight.grad.T, layer.bias.grad[None]])


def attached(solver: Solver, running: Running, **settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(4, 3, solver=solver, dtype=torch.float64, **settings)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    proxprop.attach(optimizer, layer, running=running)
    return layer, optimizer


def rows(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def stated(C: Tensor, B: Tensor, damping: float, solver: Solver, power: float = 1.0) -> Tensor:
    c = C.diagonal().mean()
    eye = torch.eye(len(C), dtype=C.dtype)
    if power != 1:
        values, vectors = torch.linalg.eigh(C)
        return vectors @ (((1 + damping) * c / (damping * c + values)) ** power * vectors).T @ B
    if isinstance(solver, Exact):
        return (1 + damping) * c * torch.linalg.solve(damping * c * eye + C, B)
    return (1 + damping) * c * solver.features(C[None], B[None], float(damping * c)).value[0]
