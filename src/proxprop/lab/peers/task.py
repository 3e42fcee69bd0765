"""What a task is: data, model, loss, measurement and budget, without any optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Size = Literal["cpu", "gpu"]
Measured = dict[str, float]
"""What is measured: `score` (lower is better) and `train_loss`; where they apply `accuracy` and `test_accuracy`."""


@dataclass(frozen=True)
class Problem:
    """A task's data on a device, and what is done with it.

    Args:
        model: makes a fresh model on the CPU from torch's global random numbers.
        batch: draws a mini-batch; the generator is on the data's device.
        loss: the loss of a mini-batch, a mean over its samples.
        measure: what a model has learnt; runs without a graph unless it makes one itself.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    measure: Callable[[nn.Module], Measured]


@dataclass(frozen=True)
class Task:
    """A task and its budget.

    Args:
        name: for the command line.
        about: data, model and loss in a sentence.
        size: what it is sized for: one CPU core, or one GPU.
        score: what is chosen by and aimed at, in words.
        steps: the budget.
        problem: loads or generates the data.
        measures: how often it is measured, evenly over the steps.
        clip: the largest norm of all gradients together, or None.
        precision: fp32, tf32 or bf16.
        derivatives: whether the loss holds derivatives of the model, so that backward runs through backward.
        sequences: whether a sample is a sequence, over whose positions the loss is a mean too.
        dataset: one that has to be there, by the lab's name for it.
        held_out: whether it was written down after all methods and ranges were fixed, and before any run in it but
            those of AdamW that set its size, so that no method and no range was chosen by it.
    """

    name: str
    about: str
    size: Size
    score: str
    steps: int
    problem: Callable[[torch.device], Problem]
    measures: int = 25
    clip: float | None = None
    precision: str = "fp32"
    derivatives: bool = False
    sequences: bool = False
    dataset: str | None = None
    held_out: bool = False

    @property
    def every(self) -> int:
        """Steps between two measurements."""
        return max(self.steps // self.measures, 1)


def drawn(inputs: Tensor, *others: Tensor, size: int) -> Callable[[torch.Generator], Batch]:
    """Mini-batches of so many samples, drawn with replacement."""

    def batch(generator: torch.Generator) -> Batch:
        index = torch.randint(len(inputs), (size,), generator=generator, device=inputs.device)
        return tuple(tensor[index] for tensor in (inputs, *others))

    return batch


def fixed(seed: int = 0) -> dict[str, Any]:
    """Arguments of torch's random functions for data that is the same in every run, made on the CPU.

    >>> torch.rand((), **fixed()) == torch.rand((), **fixed())
    tensor(True)
    """
    return {"generator": torch.Generator().manual_seed(seed)}
