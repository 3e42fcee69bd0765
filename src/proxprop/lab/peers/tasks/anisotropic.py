"""Regression on anisotropic inputs: a power-law spectrum and a mean, a random teacher of the whitened inputs."""

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Problem, Size, Task, fixed


def make(
    name: str,
    size: Size,
    features: int,
    width: int,
    batch: int,
    steps: int,
    power: float = 1.5,
    outputs: int = 4,
) -> Task:
    """The task with so many input features, hidden units and samples in a step."""

    def problem(device: torch.device) -> Problem:
        colour, mean, teacher = inputs_and_teacher(features, width, outputs, power)
        colour, mean, teacher = colour.to(device), mean.to(device), teacher.to(device)

        def sample(generator: torch.Generator, samples: int = batch) -> Batch:
            white = torch.randn(samples, features, generator=generator, device=device)
            with torch.no_grad():
                return white @ colour + mean, teacher(white)

        held = sample(torch.Generator(device).manual_seed(1), 2048)
        seen = sample(torch.Generator(device).manual_seed(2), 2048)

        def measure(model: nn.Module) -> dict[str, float]:
            return {"score": float(loss(model, held)), "train_loss": float(loss(model, seen))}

        return Problem(lambda: student(features, width, outputs), sample, loss, measure)

    about = (
        f"{features} inputs with variances i^-{power:g}, rotated, and a mean; a random teacher of the whitened inputs; "
        f"MLP of two hidden layers of {width}; squared error; batch {batch}, always fresh"
    )
    return Task(name, about, size, "held-out loss", steps, problem)


def inputs_and_teacher(
    features: int, width: int, outputs: int, power: float
) -> tuple[Tensor, Tensor, nn.Module]:
    """How white noise becomes inputs [features, features], their mean [features], and what is to be learnt."""
    random = fixed()
    rotation, _ = torch.linalg.qr(torch.randn(features, features, **random))
    variances = torch.arange(1, features + 1).float() ** -power
    colour = variances.sqrt()[:, None] * rotation
    mean = torch.randn(features, **random)
    teacher = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, outputs, bias=False))
    for parameter in teacher.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1.0
        parameter.data = scale * torch.randn(parameter.shape, **random)
        parameter.requires_grad_(False)
    return colour, mean, teacher


def student(features: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error."""
    inputs, wanted = batch
    found: Tensor = (model(inputs) - wanted).square().mean()
    return found


TASKS = (
    make("anisotropic", "gpu", features=512, width=1024, batch=1024, steps=2000),
    make("anisotropic-small", "cpu", features=64, width=128, batch=128, steps=1000),
)
