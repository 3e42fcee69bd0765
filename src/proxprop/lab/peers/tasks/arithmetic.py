"""A causal transformer completes sums such as "47+85=132"; only the answer's three digits count."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from proxprop.lab.peers.task import Batch, Measured, Problem, Size, Task, drawn, fixed
from proxprop.lab.peers.tasks.gpt import GPT

TOKENS = "0123456789+="
ANSWER, LENGTH = 3, 9
HELD_OUT = 0.05
"""The part of the pairs of numbers that is held out, in both orders."""


def make(name: str, size: Size, layers: int, width: int, batch: int, steps: int) -> Task:
    """The task for a transformer of this depth and width."""

    def problem(device: torch.device) -> Problem:
        train, held = (part.to(device) for part in sums())
        seen = train[torch.randperm(len(train), **fixed(1))[: len(held)].to(device)]

        def measure(model: nn.Module) -> Measured:
            return {"score": float(loss(model, (held,))), "train_loss": float(loss(model, (seen,)))}

        def model() -> nn.Module:
            return GPT(layers, width, heads=max(width // 16, 1), positions=LENGTH - 1, tokens=len(TOKENS))

        return Problem(model, drawn(train, size=batch), loss, measure)

    about = (
        f"sums of two numbers below 100, digit by digit; GPT of {layers} layers, {width} wide; cross-entropy of the "
        f"answer's digits; batch {batch}; a twentieth of the pairs of numbers is held out"
    )
    return Task(name, about, size, "held-out loss", steps, problem, clip=1.0, sequences=True, held_out=True)


def sums() -> tuple[Tensor, Tensor]:
    """Tokens of the sums to train on and of those held out, [sums, LENGTH] each; a + b goes where b + a does."""
    a, b = torch.cartesian_prod(torch.arange(100), torch.arange(100)).T
    chosen = torch.rand(100, 100, **fixed())[torch.minimum(a, b), torch.maximum(a, b)] < HELD_OUT
    found = tokens(a, b)
    return found[~chosen], found[chosen]


def tokens(a: Tensor, b: Tensor) -> Tensor:
    """The places in `TOKENS` of "aa+bb=ccc" [sums, LENGTH].

    >>> "".join(TOKENS[place] for place in tokens(torch.tensor([47]), torch.tensor([5]))[0])
    '47+05=052'
    """
    plus, equals = (torch.full_like(a, TOKENS.index(sign)) for sign in "+=")
    c = a + b
    return torch.stack(
        [a // 10, a % 10, plus, b // 10, b % 10, equals, c // 100, c // 10 % 10, c % 10], dim=1
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the answer's digits, each from all that stands before it."""
    (texts,) = batch
    scores = model(texts[:, :-1])[:, -ANSWER:]
    return cross_entropy(scores.flatten(0, 1), texts[:, -ANSWER:].flatten())


TASKS = (make("arithmetic-small", "cpu", layers=2, width=48, batch=64, steps=400),)
