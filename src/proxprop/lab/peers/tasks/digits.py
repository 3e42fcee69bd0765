"""Digits: the 1,797 images inside scikit-learn, an MLP; 1,000 to train, 400 to choose by, 397 to test."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from proxprop.lab.data import load
from proxprop.lab.models import mlp
from proxprop.lab.peers.task import Batch, Measured, Problem, Task, drawn

TRAIN, VALIDATION = 1000, 400


def make(name: str, widths: tuple[int, ...] = (64, 128, 128, 10), batch: int = 100, steps: int = 600) -> Task:
    """The task with these widths."""

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
        return Problem(lambda: mlp(widths), drawn(*parts[0], size=batch), loss, lambda m: measure(m, parts))

    about = f"scikit-learn's digits, MLP {'-'.join(map(str, widths))}, cross-entropy, batch {batch}"
    return Task(name, about, "cpu", "validation loss", steps, problem)


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


TASKS = (make("digits"),)
