"""The models: mlp, with and without batch normalisation, the paper's convnet (both versions), resnet18."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from proxprop.lab.config import Config
from proxprop.lab.refusal import Refused, one_of


def least_batch(model: str, shape: tuple[int, ...]) -> int:
    """How many samples a batch of these inputs needs: a batch normalisation takes no mean over a single number.

    >>> least_batch("mlp-bn", (64,)), least_batch("resnet18", (3, 32, 32))
    (2, 1)
    """
    small = max(shape[1:], default=1) <= 8  # a residual network's last images have one pixel
    return 2 if model == "mlp-bn" or (model == "resnet18" and small) else 1


def build(config: Config, shape: Sequence[int], classes: int) -> nn.Module:
    """The model a Config names, for inputs of `shape` (without the samples) and `classes` outputs."""
    hidden = config.settled().hidden or ()
    makers = {
        "mlp": lambda: mlp([prod(shape), *hidden, classes]),
        "mlp-bn": lambda: mlp([prod(shape), *hidden, classes], batch_norm=True),
        "convnet": lambda: convnet(_image(shape), classes, third_pooling=True),
        "convnet-2pool": lambda: convnet(_image(shape), classes, third_pooling=False),
        "resnet18": lambda: ResNet18(_image(shape)[0], classes),
    }
    return makers[one_of("model", config.model, makers)]()


def mlp(widths: Sequence[int], batch_norm: bool = False) -> nn.Sequential:
    """Fully connected layers with ReLU, or batch normalisation and ReLU, between them.

    Args:
        widths: from input to output.
        batch_norm: whether to normalise the output of every hidden layer.

    >>> mlp([4, 3, 2])(torch.zeros(5, 2, 2)).shape
    torch.Size([5, 2])
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(widths[:-1]):
        layers += [nn.Linear(wide, narrow), *([nn.BatchNorm1d(narrow)] if batch_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def convnet(shape: tuple[int, int, int], classes: int, third_pooling: bool = True) -> nn.Sequential:
    """Three 5×5 convolutions of 16, 20, 20 filters with ReLU, and 2×2 max pooling after the first two.

    The paper's text has a third pooling after the third convolution; its released code has none.

    >>> [convnet((3, 32, 32), 10, third_pooling=third)[-1].in_features for third in (True, False)]
    [320, 1280]
    """
    channels, height, width = shape
    shrink = 8 if third_pooling else 4
    if height < shrink or width < shrink:
        raise Refused(f"convnet should get images of at least {shrink}×{shrink} but came {height}×{width}")
    layers: list[nn.Module] = []
    for index, filters in enumerate((16, 20, 20)):
        layers += [nn.Conv2d(channels, filters, 5, padding=2), nn.ReLU()]
        if index < 2 or third_pooling:
            layers.append(nn.MaxPool2d(2))
        channels = filters
    for _ in range(3 if third_pooling else 2):
        height, width = height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))


class Block(nn.Module):
    """Two 3×3 convolutions with batch normalisation, and the identity (or a 1×1 convolution) around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """relu(residual(x) + x)."""
        return torch.relu(self.residual(x) + self.around(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3×3 stem without pooling, then eight blocks of 64 to 512 channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.Sequential(
            *(block for i, o, stride in sizes for block in (Block(i, o, stride), Block(o, o, 1)))
        )
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [samples, classes]."""
        features: Tensor = self.blocks(self.stem(x)).mean(dim=(2, 3))
        scores: Tensor = self.head(features)
        return scores


def _image(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise Refused(f"a convolutional model should get [channels, height, width] but came {list(shape)}")
    return shape[0], shape[1], shape[2]
