"""Small float64 models with batches; between them every way a shard meets a system."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import proxprop
from proxprop import CG, Exact


@dataclass(frozen=True)
class Network:
    """A converted model, and an input of `samples` rows for it."""

    model: Callable[[], nn.Module]
    input: Callable[[int], Tensor]


class Attention(nn.Module):
    """Self-attention between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x).tanh()
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Pair(nn.Module):
    """Two layers of one weight, each with its own bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class Embedded(nn.Module):
    """An embedding, one layer or a pair of tied ones, and one more."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table, self.inner, self.last = nn.Embedding(11, 6), inner(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = x[:, 0].abs().mul(5).long() % 11
        return self.last(self.inner(self.table(index) + x))


def perceptron(inputs: int = 6, first: int = 7, second: int = 5) -> nn.Module:
    layers = nn.Linear(inputs, first), nn.Linear(first, second), nn.Linear(second, 3)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 6, 2, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 2),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


def converted(plain: Callable[[], nn.Module], **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return proxprop.convert(plain().double(), **options)

    return build


def rows(*shape: int) -> Callable[[int], Tensor]:
    """Batches of this shape; rows differ in scale, so that ranks have different S."""

    def build(samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        values = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
        return values * torch.linspace(0.5, 2.0, samples).double().view(-1, *[1] * len(shape))

    return build


NETWORKS = {
    "exact": Network(converted(perceptron, solver=Exact(), tau_theta=0.5), rows(6)),
    "even": Network(converted(lambda: perceptron(12, 12, 12), solver=Exact(), tau_theta=0.5), rows(12)),
    "cg": Network(converted(perceptron, solver=CG(3), tau_theta=0.5), rows(6)),
    "cg-flat": Network(converted(perceptron, solver=CG(2, per_output=False), tau_theta=0.5), rows(6)),
    "gradient": Network(converted(perceptron, solver=Exact(), tau_theta=0.5, scaling="gradient"), rows(6)),
    "convnet": Network(converted(convnet, solver=Exact(), tau_theta=0.5, module_types="all"), rows(3, 6, 6)),
    "deep": Network(
        converted(lambda: nn.Sequential(*(nn.Linear(12, 12) for _ in range(13))), solver=Exact()), rows(12)
    ),
    "wide": Network(
        converted(lambda: nn.Sequential(nn.Linear(300, 260), nn.Tanh(), nn.Linear(260, 4), nn.Linear(4, 2))),
        rows(300),
    ),
    "tied": Network(converted(lambda: Embedded(Pair), solver=Exact(), module_types="all"), rows(6)),
    "embedded": Network(
        converted(lambda: Embedded(lambda: nn.Linear(6, 6)), solver=Exact(), module_types="all"), rows(6)
    ),
    "sequence": Network(
        converted(
            lambda: nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 3)),
            solver=Exact(),
            module_types="all",
        ),
        rows(12, 12),
    ),
    "attention": Network(converted(Attention, solver=Exact(), tau_theta=0.5), rows(4, 5)),
}
