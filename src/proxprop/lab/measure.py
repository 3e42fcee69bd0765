"""What is measured between epochs; none of it counts as training time and none of it changes the training."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import proxprop
from proxprop.lab.data import Dataset, Split
from proxprop.lab.devices import autocast

CHUNK = 2000


def measure(model: nn.Module, dataset: Dataset, precision: str) -> dict[str, float | None]:
    """Full-batch training loss and the accuracies of the three parts; None where a number is not finite."""
    loss, train = evaluate(model, dataset.train, precision)
    _, validation = evaluate(model, dataset.validation, precision)
    _, test = evaluate(model, dataset.test, precision)
    return {
        "loss": loss,
        "train_accuracy": train,
        "validation_accuracy": validation,
        "test_accuracy": test,
    }


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, precision: str = "fp32") -> tuple[float | None, float | None]:
    """Mean cross-entropy and accuracy over all samples; None for no samples or what is not finite."""
    if len(split) == 0:
        return None, None
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=split.labels.device)
    right = torch.zeros((), dtype=torch.int64, device=split.labels.device)
    for inputs, labels in zip(split.inputs.split(CHUNK), split.labels.split(CHUNK), strict=True):
        with autocast(inputs.device, precision):
            scores = model(inputs)
        loss += cross_entropy(scores.float(), labels, reduction="sum").double()
        right += (scores.argmax(dim=1) == labels).sum()
    model.train()
    mean = loss.item() / len(split)
    return mean if math.isfinite(mean) else None, right.item() / len(split)


def cosines(model: nn.Module, inputs: Tensor, labels: Tensor, precision: str) -> dict[str, float | None]:
    """Per converted layer, the cosine between the direction and the plain gradient on one batch."""
    with _untouched(model), proxprop.diagnostics.observe(model) as reports:
        with autocast(inputs.device, precision):
            loss = cross_entropy(model(inputs).float(), labels)
        loss.backward()
        found = {name: float(seen[-1].cosine) for name, seen in reports.items() if seen}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Within, a backward pass may be run; afterwards buffers (of batch normalisation) are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        model.zero_grad(set_to_none=True)
