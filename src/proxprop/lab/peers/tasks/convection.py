"""A network that solves a convection equation: u_t + β·u_x = 0 on a circle, which is hard for large β."""

import math

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task
from proxprop.lab.peers.tasks.poisson import network


def make(name: str, size: Size, beta: float, width: int, layers: int, batch: int, steps: int) -> Task:
    """The task for speed β; x and t are in [0, 1], the start is sin(2πx)."""

    def problem(device: torch.device) -> Problem:
        ticks = torch.linspace(0, 1, 65, device=device)
        grid = torch.cartesian_prod(ticks, ticks)
        wanted = solution(grid, beta)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            return residual(model, batch, beta)

        seen = points(torch.Generator(device).manual_seed(1), 4 * batch)

        def measure(model: nn.Module) -> Measured:
            with torch.no_grad():
                error = (model(on_circle(grid)) - wanted).norm() / wanted.norm()
            with torch.enable_grad():
                return {"score": float(error), "train_loss": float(loss(model, seen).detach())}

        return Problem(lambda: network(width, layers, inputs=3), lambda g: points(g, batch), loss, measure)

    about = (
        f"u_t + {beta:g}·u_x = 0 on a circle, u = sin x at the start; tanh network of {layers} hidden layers of "
        f"{width}; squared residual, divided by β², + squared error at the start; {batch} points, always fresh"
    )
    return Task(name, about, size, "relative error of u", steps, problem, derivatives=True)


def solution(x: Tensor, beta: float) -> Tensor:
    """u at points (x, t) [points, 2]: the start, carried along."""
    return torch.sin(2 * math.pi * x[:, :1] - beta * x[:, 1:])


def on_circle(x: Tensor) -> Tensor:
    """What the network is given: cos and sin of the place, so that it is periodic, and the time."""
    angle = 2 * math.pi * x[:, :1]
    return torch.cat([angle.cos(), angle.sin(), x[:, 1:]], dim=1)


def points(generator: torch.Generator, batch: int) -> Batch:
    """Points (x, t) [batch, 2] and points at the start [batch // 4, 2]."""
    inside = torch.rand(batch, 2, generator=generator, device=generator.device)
    start = torch.rand(batch // 4, 2, generator=generator, device=generator.device)
    start[:, 1] = 0
    return inside, start


def residual(model: nn.Module, batch: Batch, beta: float) -> Tensor:
    """Squared residual, and the squared error at the start; one call of the model takes all points."""
    inside, start = batch
    x = torch.cat([inside, start]).requires_grad_()
    u = model(on_circle(x))
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    carried = slope[: len(inside), 1] + beta / (2 * math.pi) * slope[: len(inside), 0]
    wrong = u[len(inside) :] - solution(start, beta)
    found: Tensor = carried.square().mean() / beta**2 + wrong.square().mean()
    return found


TASKS = (
    make("convection", "gpu", beta=30.0, width=128, layers=4, batch=2048, steps=4000),
    make("convection-small", "cpu", beta=5.0, width=48, layers=3, batch=128, steps=800),
)
