"""Digits: the 1,797 images inside scikit-learn, an MLP or a ConvNet; 1,000 to train, 400 to choose by, 397 to test."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from proxprop.lab.data import load
from proxprop.lab.models import mlp
from proxprop.lab.peers.task import Batch, Measured, Problem, Task, drawn

TRAIN, VALIDATION = 1000, 400


def make(
    name: str,
    widths: tuple[int, ...] = (64, 128, 128, 10),
    filters: tuple[int, ...] = (),
    batch: int = 100,
    steps: int = 600,
    held_out: bool = False,
) -> Task:
    """The task with an MLP of these widths, after a convolution for each number of filters."""

    def problem(device: torch.device) -> Problem:
        data = load("digits", validation=0)
        inputs = torch.cat([data.train.inputs, data.test.inputs]).flatten(1).to(device)
        labels = torch.cat([data.train.labels, data.test.labels]).to(device)
        parts = [
            (inputs[cut], labels[cut])
            for cut in (
                slice(TRAIN),
                slice(TRAIN, TRAIN + VALIDATION),
                slice(TRAIN + VALIDATION, None),
            )
        ]

        def model() -> nn.Module:
            return convnet(filters, widths) if filters else mlp(widths)

        return Problem(model, drawn(*parts[0], size=batch), loss, lambda m: measure(m, parts))

    network = f"MLP {'-'.join(map(str, widths))}"
    if filters:
        network = (
            f"3×3 convolutions of {' and '.join(map(str, filters))} filters, each with 2×2 pooling, {network}"
        )
    about = f"scikit-learn's digits, {network}, cross-entropy, batch {batch}"
    return Task(name, about, "cpu", "validation loss", steps, problem, held_out=held_out)


def convnet(filters: tuple[int, ...], widths: tuple[int, ...]) -> nn.Sequential:
    """3×3 convolutions with ReLU, each followed by 2×2 pooling, and an MLP of what is left of the 8×8 pixels."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for inputs, outputs in pairwise((1, *filters)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *mlp(widths))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def measure(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Measured:
    """Losses and accuracies of the three parts."""
    scores = [model(inputs) for inputs, _ in parts]
    losses = [float(cross_entropy(s, labels)) for s, (_, labels) in zip(scores, parts, strict=True)]
    right = [float((s.argmax(1) == p[1]).float().mean()) for s, p in zip(scores, parts, strict=True)]
    return {
        "score": losses[1],
        "train_loss": losses[0],
        "accuracy": right[1],
        "test_accuracy": right[2],
    }


TASKS = (
    make("digits"),
    make("convnet-small", (64, 64, 10), filters=(8, 16), steps=400, held_out=True),
)
