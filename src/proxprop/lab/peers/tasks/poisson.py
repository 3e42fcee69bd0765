"""A network that solves Poisson's equation: −Δu = f on the unit square, u = 0 on its edge."""

import itertools
import math

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task

MODES = ((1, 1, 1.0), (3, 2, 0.5))
"""The solution is a sum of a·sin(jπx)·sin(kπy) over these (j, k, a)."""

FORCE = sum((a * (j**2 + k**2) * math.pi**2) ** 2 / 4 for j, k, a in MODES)
"""The mean square of f, which the squared residual is divided by, so that the loss begins near one."""


def make(name: str, size: Size, width: int, layers: int, batch: int, steps: int) -> Task:
    """The task for a tanh network, `batch` points inside and a quarter as many on the edge."""

    def problem(device: torch.device) -> Problem:
        ticks = torch.linspace(0, 1, 33, device=device)
        grid = torch.cartesian_prod(ticks, ticks)
        wanted = solution(grid)
        seen = points(torch.Generator(device).manual_seed(1), 4 * batch)

        def measure(model: nn.Module) -> Measured:
            with torch.no_grad():
                error = (model(grid) - wanted).norm() / wanted.norm()
            with torch.enable_grad():
                residual = loss(model, seen).detach()
            return {"score": float(error), "train_loss": float(residual)}

        return Problem(lambda: network(width, layers), lambda g: points(g, batch), loss, measure)

    about = (
        f"−Δu = f on the unit square, u = 0 on its edge; tanh network of {layers} hidden layers of {width}; squared "
        f"residual, relative to f's, + squared error on the edge; {batch} points inside and {batch // 4} on it, "
        "always fresh"
    )
    return Task(name, about, size, "relative error of u", steps, problem, derivatives=True)


def solution(x: Tensor) -> Tensor:
    """u at points x [points, 2]: [points, 1]."""
    parts = [a * torch.sin(j * math.pi * x[:, :1]) * torch.sin(k * math.pi * x[:, 1:]) for j, k, a in MODES]
    return torch.stack(parts).sum(0)


def force(x: Tensor) -> Tensor:
    """f = −Δu."""
    parts = [
        a * (j**2 + k**2) * math.pi**2 * torch.sin(j * math.pi * x[:, :1]) * torch.sin(k * math.pi * x[:, 1:])
        for j, k, a in MODES
    ]
    return torch.stack(parts).sum(0)


def points(generator: torch.Generator, batch: int) -> Batch:
    """Points inside [batch, 2] and on the edge [batch // 4, 2]."""
    device = generator.device
    inside = torch.rand(batch, 2, generator=generator, device=device)
    edge = torch.rand(batch // 4, 2, generator=generator, device=device)
    side = torch.arange(len(edge), device=device) % 4
    edge[:, 0] = torch.where(side < 2, side.float(), edge[:, 0])
    edge[:, 1] = torch.where(side >= 2, side.float() - 2, edge[:, 1])
    return inside, edge


def network(width: int, layers: int, inputs: int = 2) -> nn.Sequential:
    """A tanh network with one output."""
    sizes = [inputs, *[width] * layers]
    made: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        made += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*made, nn.Linear(width, 1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Squared residual inside, and the squared error on the edge.

    One call of the model takes all points, so that a layer's rows are those of inside and edge together.
    """
    inside, edge = batch
    x = torch.cat([inside, edge]).requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][: len(inside), i] for i in (0, 1)
    ]
    residual = (second[0] + second[1])[:, None] + force(inside)
    found: Tensor = residual.square().mean() / FORCE + u[len(inside) :].square().mean()
    return found


TASKS = (
    make("poisson", "gpu", width=256, layers=4, batch=2048, steps=3000),
    make("poisson-small", "cpu", width=48, layers=3, batch=128, steps=600),
)
