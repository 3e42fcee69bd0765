"""The networks and batches that a step is timed on; between them every space is the cheapest somewhere."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.lab.models import ResNet18, convnet, mlp


@dataclass(frozen=True)
class Network:
    """A model with a batch to train it on.

    Attributes:
        name: how commands and records call it, with its batch.
        model: makes it.
        input: makes the batch.
        optimizer: the one its BackProp row uses.
        regression: whether the loss is a mean square, not cross-entropy.
        memory_format: of the model and its batch.
    """

    name: str
    model: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    optimizer: str = "sgd"
    regression: bool = False
    memory_format: torch.memory_format = torch.contiguous_format

    def target(self, output: Tensor) -> Tensor:
        """What is to be learnt, at random."""
        if self.regression:
            return torch.rand(output.shape)
        return torch.randint(output.shape[-1], output.shape[:-1])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""
        if self.regression:
            return functional.mse_loss(output, target)
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Block(nn.Module):
    """A GPT-2 block: attention and a perceptron, each with a normalisation before and the identity around it."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """The smallest GPT-2, read out by its embedding; as usual, the vocabulary is rounded up to a multiple of 64."""

    def __init__(
        self, blocks: int = 12, width: int = 768, tokens: int = 50304, positions: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


class TorchvisionResNet18(ResNet18):
    """ResNet-18 as torchvision has it: a 7×7 stem with stride and pooling, and activations in place."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(3, classes)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        for module in self.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True


def _paper_mlp(batch: int) -> Network:
    widths = [3072, 4000, 1000, 4000, 10]
    return Network(f"mlp-{batch}", lambda: mlp(widths), lambda: torch.randn(batch, 3072))


def _paper_convnet(batch: int) -> Network:
    return Network(
        f"convnet-{batch}", lambda: convnet((3, 32, 32), 10), lambda: torch.randn(batch, 3, 32, 32), "adam"
    )


def _channels_last(name: str, model: Callable[[], nn.Module]) -> Network:
    return Network(name, model, lambda: torch.randn(128, 3, 32, 32), memory_format=torch.channels_last)


AUTOENCODER = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]

NETWORKS = {
    network.name: network
    for network in [
        *(_paper_mlp(batch) for batch in (50, 500, 5000)),
        *(_paper_convnet(batch) for batch in (50, 500, 5000)),
        Network("resnet18-128", lambda: ResNet18(3, 10), lambda: torch.randn(128, 3, 32, 32)),
        _channels_last("resnet18-last-128", lambda: ResNet18(3, 10)),
        _channels_last("resnet18-vision-128", TorchvisionResNet18),
        Network(
            "gpt2-block-8x1024",
            lambda: nn.Sequential(Block(), nn.Linear(768, 128)),
            lambda: torch.randn(8, 1024, 768),
            "adam",
        ),
        Network("gpt2-8x1024", GPT, lambda: torch.randint(50304, (8, 1024)), "adamw"),
        Network(
            "autoencoder-1000",
            lambda: mlp(AUTOENCODER),
            lambda: torch.rand(1000, 784),
            "adam",
            regression=True,
        ),
        Network("digits-100", lambda: mlp([64, 256, 128, 256, 10]), lambda: torch.rand(100, 64)),
        Network("mlp-wide-256", lambda: mlp([8192, 8192, 8192, 10]), lambda: torch.randn(256, 8192)),
        Network("mlp-narrow-2048", lambda: mlp([128, 128, 128, 128, 10]), lambda: torch.randn(2048, 128)),
    ]
}
