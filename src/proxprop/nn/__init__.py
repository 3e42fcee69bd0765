"""Drop-in layers: torch's own forward, a proximal backward. And the one table of which class stands for which.

    torch class -> proxprop class -> transfer

Three sets of classes can be converted: those converted by default, which are matrix products as in the paper;
those converted when asked for; and any other class whose output is linear in its parameters.
"""

from torch import nn

from proxprop.nn.attention import MultiheadAttention
from proxprop.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from proxprop.nn.embedding import Embedding, EmbeddingBag
from proxprop.nn.generic import AnyLinearInParameters
from proxprop.nn.layer import ProximalLayer
from proxprop.nn.linear import Bilinear, Linear, RegisteredLinear
from proxprop.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)

BY_DEFAULT: list[type[ProximalLayer]] = [
    Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, MultiheadAttention,
]  # fmt: skip
"""Linear and convolutional layers, as in the paper. Their Gram matrix couples many features."""

WHEN_ASKED: list[type[ProximalLayer]] = [
    Bilinear, Embedding, EmbeddingBag, LayerNorm, RMSNorm, GroupNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d,
    InstanceNorm1d, InstanceNorm2d, InstanceNorm3d,
]  # fmt: skip
"""Beyond the paper. For most, S is diagonal or two by two, so a proximal step rescales more than it turns."""

TABLE: dict[type[nn.Module], type[ProximalLayer]] = {
    layer.plain: layer for layer in (*BY_DEFAULT, *WHEN_ASKED)
}
"""The one table: torch class -> proxprop class."""


def default_kinds() -> tuple[type[nn.Module], ...]:
    """The classes that `convert` takes unless told otherwise."""
    return tuple(layer.plain for layer in BY_DEFAULT)


def proximal_class(plain: type[nn.Module]) -> type[ProximalLayer]:
    """The proximal class that stands for `plain`: the table's, or one solved matrix-free through autograd."""
    return TABLE.get(plain) or AnyLinearInParameters.mixed(plain)


def register(kind: type[nn.Module], *, transposed: bool = False) -> None:
    """Tell proxprop that a class of another library is a linear layer, so that `convert` takes it by default.

    The class must have a `weight` and a `bias` (which may be None) and compute `x Wᵀ + b`; that it does is
    checked on the first training call. It is then solved in whichever space is cheapest, like `nn.Linear`.

    Args:
        kind: the class.
        transposed: whether it stores its weight as `[features, outputs]` and computes `x W + b`.

    Example:
        >>> import torch
        >>> class Dense(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.bias = nn.Parameter(torch.ones(2, 1)), None
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> register(Dense, transposed=True)
        >>> import proxprop
        >>> proxprop.convert(nn.Sequential(Dense(), nn.Linear(1, 1)))[0]
        ProximalDense(solver=CG(iterations=3, per_output=True), tau_theta=1)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register should be given a module class but was given {kind!r}")
    if kind in TABLE and not issubclass(TABLE[kind], RegisteredLinear):
        raise ValueError(f"{kind.__name__} is built in and can't be registered")
    layer = RegisteredLinear.mixed(kind, transposed=transposed)
    BY_DEFAULT[:] = [other for other in BY_DEFAULT if other.plain is not kind] + [layer]
    TABLE[kind] = layer


__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "ProximalLayer",
    "RMSNorm",
    "register",
]
