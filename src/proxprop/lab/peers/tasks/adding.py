"""The adding problem: a recurrent network reads pairs of a value and a mark, and adds the two marked values."""

import torch
from torch import Tensor, nn

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task


class Recurrent(nn.Module):
    """h = tanh(V·x + W·h) at every place of a sequence, and a number from the last h; W begins orthogonal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.state = nn.Linear(2, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.orthogonal_(self.state.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, places, 2] to [samples, 1]."""
        state = x.new_zeros(len(x), self.state.in_features)
        for pair in x.unbind(1):
            state = torch.tanh(self.inputs(pair) + self.state(state))
        found: Tensor = self.out(state)
        return found


def make(name: str, size: Size, places: int, width: int, batch: int, steps: int) -> Task:
    """The task for sequences of so many pairs."""

    def problem(device: torch.device) -> Problem:
        held, seen = (sequences(torch.Generator(device).manual_seed(s), 1024, places) for s in (1, 2))

        def measure(model: nn.Module) -> Measured:
            return {"score": float(loss(model, held)), "train_loss": float(loss(model, seen))}

        return Problem(lambda: Recurrent(width), lambda g: sequences(g, batch, places), loss, measure)

    about = (
        f"sequences of {places} pairs of a value in [0, 1] and a mark, the sum of the two marked values; recurrent "
        f"tanh network of width {width}; squared error; batch {batch}, always fresh"
    )
    return Task(name, about, size, "held-out loss", steps, problem, clip=1.0, held_out=True)


def sequences(generator: torch.Generator, samples: int, places: int) -> Batch:
    """Pairs (value, mark) [samples, places, 2], one mark in each half, and the sum of the two [samples, 1]."""
    device = generator.device
    values = torch.rand(samples, places, generator=generator, device=device)
    marks = torch.zeros_like(values)
    for half in marks.tensor_split(2, dim=1):
        marked = torch.randint(half.shape[1], (samples, 1), generator=generator, device=device)
        half.scatter_(1, marked, 1.0)
    return torch.stack([values, marks], dim=2), (values * marks).sum(1, keepdim=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error."""
    inputs, wanted = batch
    found: Tensor = (model(inputs) - wanted).square().mean()
    return found


TASKS = (make("adding-small", "cpu", places=20, width=48, batch=64, steps=600),)
