"""The networks and batches that a step is timed on; between them every space is the cheapest somewhere."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.lab.models import ResNet18, convnet, mlp


@dataclass(frozen=True)
class Network:
    """A model with a batch to train it on. `optimizer` is the one its BackProp row uses."""

    name: str
    model: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    optimizer: str = "sgd"

    def target(self, output: Tensor) -> Tensor:
        return torch.randint(output.shape[-1], output.shape[:-1])


class Block(nn.Module):
    """A GPT-2 block of width 768: attention and a perceptron around it, then a read-out that stays explicit."""

    def __init__(self, width: int = 768, heads: int = 12, outputs: int = 128) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        x = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return self.head(x)


def _paper_mlp(batch: int) -> Network:
    widths = [3072, 4000, 1000, 4000, 10]
    return Network(f"mlp-{batch}", lambda: mlp(widths), lambda: torch.randn(batch, 3072))


def _paper_convnet(batch: int) -> Network:
    return Network(
        f"convnet-{batch}", lambda: convnet((3, 32, 32), 10), lambda: torch.randn(batch, 3, 32, 32), "adam"
    )


NETWORKS = {
    network.name: network
    for network in [
        *(_paper_mlp(batch) for batch in (50, 500, 5000)),
        *(_paper_convnet(batch) for batch in (50, 500, 5000)),
        Network("resnet18-128", lambda: ResNet18(3, 10), lambda: torch.randn(128, 3, 32, 32)),
        Network("gpt2-block-8x1024", Block, lambda: torch.randn(8, 1024, 768), "adam"),
        Network("mlp-wide-256", lambda: mlp([8192, 8192, 8192, 10]), lambda: torch.randn(256, 8192)),
        Network("mlp-narrow-2048", lambda: mlp([128, 128, 128, 128, 10]), lambda: torch.randn(2048, 128)),
    ]
}
