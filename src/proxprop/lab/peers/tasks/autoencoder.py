"""The deep autoencoder on curves: images of random Bézier curves, sigmoid pixels, loss above the images' entropy."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task, drawn, fixed

POINTS, PEN = 64, 0.75


def make(
    name: str, size: Size, side: int, hidden: tuple[int, ...], samples: int, batch: int, steps: int
) -> Task:
    """The task for images of `side`² pixels and an encoder of these widths, mirrored by the decoder."""

    def problem(device: torch.device) -> Problem:
        images = curves(samples, side).to(device)
        train, held = images[: -samples // 8], images[-samples // 8 :]
        parts = train[: len(held)], held
        floors = [float(entropy(part)) for part in parts]

        def measure(model: nn.Module) -> Measured:
            losses = [side**2 * float(loss(model, (part,))) for part in parts]
            seen, unseen = (found - floor for found, floor in zip(losses, floors, strict=True))
            return {"score": unseen, "train_loss": seen}

        return Problem(lambda: autoencoder((side**2, *hidden)), drawn(train, size=batch), loss, measure)

    widths = "-".join(map(str, (side**2, *hidden)))
    about = (
        f"{samples:,} generated curves of {side}×{side} pixels, autoencoder {widths} and back, tanh, cross-entropy "
        f"of the pixels, measured as a sum over an image above its smallest possible value; batch {batch}"
    )
    return Task(name, about, size, "held-out loss", steps, problem)


def curves(samples: int, side: int) -> Tensor:
    """Images [samples, side²] in [0, 1]: cubic Bézier curves of random control points, drawn with a soft pen."""
    control = torch.rand(samples, 4, 2, **fixed()) * (side - 1)
    t = torch.linspace(0, 1, POINTS)
    bernstein = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], dim=1)
    ticks = torch.arange(side).float()
    pixels = torch.cartesian_prod(ticks, ticks)
    drawn_images = [
        torch.cdist(pixels.expand(len(part), -1, -1), bernstein @ part).amin(-1).square()
        for part in control.split(500)
    ]
    return torch.exp(-torch.cat(drawn_images) / (2 * PEN**2))


def autoencoder(widths: tuple[int, ...]) -> nn.Sequential:
    """Encoder and decoder with tanh between layers and Glorot's weights; the code in the middle is linear."""
    sizes = [*widths, *widths[-2::-1]]
    layers: list[nn.Module] = []
    for index, (wide, narrow) in enumerate(itertools.pairwise(sizes), start=1):
        layer = nn.Linear(wide, narrow)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers.append(layer)
        if index not in (len(widths) - 1, len(sizes) - 1):
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a pixel."""
    (images,) = batch
    return binary_cross_entropy_with_logits(model(images), images)


def entropy(images: Tensor) -> Tensor:
    """The smallest that `loss` can be, summed over an image, mean over images."""
    p = images.double().clamp(1e-12, 1 - 1e-12)
    return -(p * p.log() + (1 - p) * (1 - p).log()).sum() / len(images)


TASKS = (
    make("autoencoder", "gpu", 28, (1000, 500, 250, 30), samples=24000, batch=1000, steps=2000),
    make("autoencoder-small", "cpu", 14, (128, 64, 32, 8), samples=4000, batch=100, steps=600),
)
