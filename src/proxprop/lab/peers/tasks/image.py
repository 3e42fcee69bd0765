"""An implicit image: a network of sines (SIREN) from pixel positions to colours of a photograph."""

import itertools
import math

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task, drawn
from proxprop.lab.refusal import Refused, install

OMEGA = 30.0


class Sine(nn.Module):
    """sin(ω·x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.sin(OMEGA * x)


def make(
    name: str,
    size: Size,
    shrink: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    picture: str = "china.jpg",
    held_out: bool = False,
) -> Task:
    """The task for one of scikit-learn's pictures, shrunk by a factor, and so many hidden layers."""

    def problem(device: torch.device) -> Problem:
        positions, colours = (tensor.to(device) for tensor in pixels(picture, shrink))

        def measure(model: nn.Module) -> Measured:
            found = float(loss(model, (positions, colours)))
            return {"score": found, "train_loss": found}

        return Problem(lambda: siren(width, layers), drawn(positions, colours, size=batch), loss, measure)

    about = (
        f"pixels of scikit-learn's {picture} shrunk {shrink} times; SIREN of {layers} hidden layers "
        f"of {width}; squared error of colours in [-1, 1]; batch {batch}"
    )
    return Task(name, about, size, "loss over all pixels", steps, problem, held_out=held_out)


def pixels(picture: str, shrink: int) -> tuple[Tensor, Tensor]:
    """Positions [pixels, 2] and colours [pixels, 3], both in [-1, 1]; each colour is a mean over shrink² pixels."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise Refused(f"{picture} ships inside scikit-learn: {install('lab')}") from error
    image = torch.from_numpy(load_sample_image(picture).copy()).float().movedim(-1, 0)
    image = nn.functional.avg_pool2d(image, shrink) / 127.5 - 1
    rows, columns = (torch.linspace(-1, 1, size) for size in image.shape[1:])
    return torch.cartesian_prod(rows, columns), image.flatten(1).T.contiguous()


def siren(width: int, layers: int) -> nn.Sequential:
    """Sines with the initialisation of Sitzmann et al. (2020)."""
    sizes = [2, *[width] * layers]
    made: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        bound = 1 / inputs if index == 0 else math.sqrt(6 / inputs) / OMEGA
        made += [_uniform(nn.Linear(inputs, outputs), bound), Sine()]
    return nn.Sequential(*made, _uniform(nn.Linear(width, 3), math.sqrt(6 / width) / OMEGA))


def _uniform(layer: nn.Linear, bound: float) -> nn.Linear:
    nn.init.uniform_(layer.weight, -bound, bound)
    return layer


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the colours."""
    positions, colours = batch
    found: Tensor = (model(positions) - colours).square().mean()
    return found


TASKS = (
    make("image", "gpu", shrink=2, width=256, layers=4, batch=16384, steps=2000),
    make("image-small", "cpu", shrink=6, width=64, layers=3, batch=512, steps=800),
    make(
        "flower-small",
        "cpu",
        shrink=6,
        width=64,
        layers=3,
        batch=512,
        steps=800,
        picture="flower.jpg",
        held_out=True,
    ),
)
