"""A network that solves Burgers' equation: u_t + u·u_x = ν·u_xx, a wave that steepens and dies away."""

import math

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task
from proxprop.lab.peers.tasks.poisson import network

REACH, NODES = 8.0, 401
"""The integrals of the solution go from -REACH to REACH, beyond which exp(-z²) is below 1e-27, in so many nodes."""


def make(name: str, size: Size, viscosity: float, width: int, layers: int, batch: int, steps: int) -> Task:
    """The task for viscosity ν; x is in [-1, 1], t in [0, 1], the start is -sin(πx)."""

    def problem(device: torch.device) -> Problem:
        ticks = torch.linspace(-1, 1, 65, dtype=torch.float64), torch.linspace(0, 1, 33, dtype=torch.float64)
        exact = torch.cartesian_prod(*ticks)
        grid, wanted = (part.float().to(device) for part in (exact, solution(exact, viscosity)))

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return residual(model, batch, viscosity)

        seen = points(torch.Generator(device).manual_seed(1), 4 * batch)

        def measure(model: nn.Module) -> Measured:
            with torch.no_grad():
                error = (model(grid) - wanted).norm() / wanted.norm()
            with torch.enable_grad():
                return {"score": float(error), "train_loss": float(loss(model, seen).detach())}

        return Problem(lambda: network(width, layers), lambda g: points(g, batch), loss, measure)

    about = (
        f"u_t + u·u_x = {viscosity:g}·u_xx on [-1, 1], u = -sin(πx) at the start and 0 on the walls; tanh network of "
        f"{layers} hidden layers of {width}; squared residual + squared errors at the start and on the walls; "
        f"{batch} points inside and {batch // 4} at each of the two, always fresh"
    )
    return Task(name, about, size, "relative error of u", steps, problem, derivatives=True, held_out=True)


def solution(x: Tensor, viscosity: float) -> Tensor:
    """u at points (x, t) [points, 2] in float64: [points, 1].

    The formula of Cole and Hopf, with y = π·(x - z·√(4νt)) and the weights w = exp(-cos(y) / (2πν) - z²):
    u = -∫ sin(y)·w dz / ∫ w dz. The trapezoidal rule converges exponentially here.
    """
    z = torch.linspace(-REACH, REACH, NODES, dtype=x.dtype, device=x.device)
    y = math.pi * (x[:, :1] - z * (4 * viscosity * x[:, 1:]).sqrt())
    weights = torch.softmax(-y.cos() / (2 * math.pi * viscosity) - z.square(), dim=1)
    return -(weights * y.sin()).sum(1, keepdim=True)


def points(generator: torch.Generator, batch: int) -> Batch:
    """Points (x, t) inside [batch, 2], at the start [batch // 4, 2] and on the walls [batch // 4, 2]."""
    device = generator.device
    inside, start, walls = (
        torch.rand(size, 2, generator=generator, device=device) for size in (batch, batch // 4, batch // 4)
    )
    inside[:, 0] = 2 * inside[:, 0] - 1
    start[:, 0], start[:, 1] = 2 * start[:, 0] - 1, 0
    walls[:, 0] = 2.0 * (torch.arange(len(walls), device=device) % 2) - 1
    return inside, start, walls


def residual(model: nn.Module, batch: Batch, viscosity: float) -> Tensor:
    """Squared residual, and the squared errors at the start and on the walls.

    One call of the model takes all points, so that a layer's rows are those of all of them together.
    """
    inside, start, walls = batch
    x = torch.cat(batch).requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    value, at_start, on_walls = u[:, 0].split([len(inside), len(start), len(walls)])
    u_x, u_t = slope[: len(inside)].unbind(1)
    wrong = u_t + value * u_x - viscosity * second[: len(inside), 0]
    begun = at_start + torch.sin(math.pi * start[:, 0])
    found: Tensor = wrong.square().mean() + begun.square().mean() + on_walls.square().mean()
    return found


TASKS = (make("burgers-small", "cpu", viscosity=0.05, width=48, layers=3, batch=128, steps=800),)
