"""CIFAR-10: the paper's MLP and ConvNet, and a ResNet-18; the last two with crops and flips."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from proxprop.lab.data import Dataset, load
from proxprop.lab.devices import autocast
from proxprop.lab.measure import evaluate
from proxprop.lab.models import ResNet18, convnet, mlp
from proxprop.lab.peers.task import Batch, Measured, Problem, Task, drawn

SHIFT = 4
"""An augmented image is moved by at most so many pixels."""


def _images() -> Dataset:
    return load("cifar10")


def make(
    name: str,
    about: str,
    model: Callable[[], nn.Module],
    batch: int,
    steps: int,
    augmented: bool,
    precision: str = "fp32",
    data: Callable[[], Dataset] = _images,
) -> Task:
    """The task for a model; `data` says where the images come from."""

    def problem(device: torch.device) -> Problem:
        dataset = data().to(device)
        plain = drawn(dataset.train.inputs, dataset.train.labels, size=batch)

        def sample(generator: torch.Generator) -> Batch:
            images, labels = plain(generator)
            return (augment(images, generator) if augmented else images), labels

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            with autocast(device, precision):
                scores = model(batch[0])
            return cross_entropy(scores.float(), batch[1])

        return Problem(model, sample, loss, lambda m: measure(m, dataset, precision))

    return Task(
        name,
        about,
        "gpu",
        "validation error",
        steps,
        problem,
        measures=20,
        precision=precision,
        dataset="cifar10",
    )


def measure(model: nn.Module, dataset: Dataset, precision: str) -> Measured:
    """Error of the 5,000 images held out, loss of as many to train on, accuracy of the test images."""
    part = len(dataset.validation)
    seen = type(dataset.train)(dataset.train.inputs[:part], dataset.train.labels[:part])
    train, _ = evaluate(model, seen, precision)
    _, held = evaluate(model, dataset.validation, precision)
    _, test = evaluate(model, dataset.test, precision)
    lost = float("nan")
    return {
        "score": lost if held is None else 1 - held,
        "train_loss": lost if train is None else train,
        "accuracy": lost if held is None else held,
        "test_accuracy": lost if test is None else test,
    }


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by up to `SHIFT` pixels over black, every second one mirrored on average."""
    samples, channels, height, width = images.shape
    device = images.device
    down, right = torch.randint(2 * SHIFT + 1, (2, samples, 1, 1), generator=generator, device=device)
    mirrored = torch.rand(samples, 1, 1, generator=generator, device=device) < 0.5
    rows = torch.arange(height, device=device)[:, None] + down
    columns = torch.arange(width, device=device)[None, :]
    columns = torch.where(mirrored, width - 1 - columns, columns) + right
    padded = pad(images, (SHIFT,) * 4).flatten(2)
    index = (rows * (width + 2 * SHIFT) + columns).reshape(samples, 1, -1).expand(-1, channels, -1)
    return padded.gather(2, index).view_as(images)


TASKS = (
    make(
        "cifar10-mlp",
        "CIFAR-10, the paper's MLP 3072-4000-1000-4000-10, cross-entropy, batch 500, no augmentation",
        lambda: mlp((3072, 4000, 1000, 4000, 10)),
        batch=500,
        steps=1800,
        augmented=False,
    ),
    make(
        "cifar10-convnet",
        "CIFAR-10 with crops and flips, the paper's ConvNet, cross-entropy, batch 500",
        lambda: convnet((3, 32, 32), 10),
        batch=500,
        steps=2700,
        augmented=True,
    ),
    make(
        "cifar10-resnet18",
        "CIFAR-10 with crops and flips, ResNet-18, cross-entropy, batch 128, bf16",
        lambda: ResNet18(3, 10),
        batch=128,
        steps=2800,
        augmented=True,
        precision="bf16",
    ),
)
