"""Drop-in layers: torch's own forward, a proximal backward. And the one table of which class stands for which.

    torch class -> proxprop class -> transfer

Three sets of classes can be converted: those converted by default, which are matrix products as in the paper;
those converted when asked for; and any other class whose output is linear in its parameters. A subclass that
changes nothing about a call, such as one with an `__init__` of its own, is treated as its base.
"""

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from proxprop.nn.attention import MultiheadAttention
from proxprop.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from proxprop.nn.embedding import Embedding, EmbeddingBag
from proxprop.nn.generic import AnyLinearInParameters
from proxprop.nn.layer import COMPUTED, ProximalLayer
from proxprop.nn.linear import Bilinear, Linear, RegisteredLinear, RegisteredTransposed
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

BY_DEFAULT: tuple[type[ProximalLayer], ...] = (
    Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, MultiheadAttention,
)  # fmt: skip
"""Linear and convolutional layers, as in the paper. Their Gram matrix couples many features."""

WHEN_ASKED: tuple[type[ProximalLayer], ...] = (
    Bilinear, Embedding, EmbeddingBag, LayerNorm, RMSNorm, GroupNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d,
    InstanceNorm1d, InstanceNorm2d, InstanceNorm3d,
)  # fmt: skip
"""Beyond the paper. For most, S is diagonal or two by two, so a proximal step rescales more than it turns."""

TABLE: dict[type[nn.Module], type[ProximalLayer]] = {
    layer.plain: layer for layer in (*BY_DEFAULT, *WHEN_ASKED)
}
"""The one table: torch class -> proxprop class."""

BY_NAME: dict[str, type[ProximalLayer]] = {"transformers.pytorch_utils.Conv1D": RegisteredTransposed}
"""Linear layers of other libraries, by a class's full name, because nothing is imported for them."""

IN_A_CALL = {
    "forward",
    "__call__",
    "__new__",
    "__getattr__",
    "__getattribute__",
    *COMPUTED,
}
"""Attributes that decide how a layer is called and what it computes, beside torch's own private methods."""


def _row(kind: type[nn.Module]) -> type[ProximalLayer] | None:
    """The proximal class of exactly this class."""
    mixin = BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    return TABLE.get(kind) or (mixin.derived(kind) if mixin else None)


def known_base(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The nearest class of the table that `kind` is or inherits from, whatever it overrides; None if there is none."""
    if kind is NonDynamicallyQuantizableLinear:
        return None  # a MultiheadAttention's, which reads its weight and never calls it
    return next((base for base in kind.__mro__ if _row(base) is not None), None)


def stands_for(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of the table that `kind` computes the same as: itself, or a base whose calls it does not change."""
    base = known_base(kind)
    if base is None or base is kind:
        return base
    if issubclass(kind, LazyModuleMixin | ProximalLayer) or is_quantized(kind):
        return None
    own = {name for between in kind.__mro__[: kind.__mro__.index(base)] for name in vars(between)}
    private = {name for name in dir(base) if name.startswith("_") and not name.startswith("__")}
    return base if own.isdisjoint(IN_A_CALL | private) else None


def is_quantized(kind: type[nn.Module]) -> bool:
    """Whether a class is one of torch's quantisation-aware ones, which round their weights."""
    return kind.__module__.startswith(("torch.ao.", "torchao."))


def known(kind: type[nn.Module]) -> type[ProximalLayer] | None:
    """The proximal class of a class in the table, or of one that stands for such a class; else None."""
    base = stands_for(kind)
    found = _row(base) if base is not None else None
    return found if found is None or base is kind else found.derived(kind)


def by_default(kind: type[nn.Module]) -> bool:
    """Whether `convert` takes layers of this class unless told otherwise."""
    layer = known(kind)
    return layer is not None and issubclass(layer, (*BY_DEFAULT, RegisteredLinear))


def is_product(kind: type[nn.Module]) -> bool:
    """Whether a class is, or inherits from, one that is converted by default: a matrix product, as in the paper."""
    base = known_base(kind)
    return base is not None and by_default(base)


def proximal_class(plain: type[nn.Module]) -> type[ProximalLayer]:
    """The proximal class that stands for `plain`: a known one, or one solved matrix-free through autograd."""
    return known(plain) or AnyLinearInParameters.derived(plain)


def register(kind: type[nn.Module], *, transposed: bool = False) -> None:
    """Tell proxprop that a class of another library is a linear layer, so that `convert` takes it by default.

    The class must have a `weight` and a `bias` (which may be None) and compute `x Wᵀ + b`; the first training call
    checks that it does. It is then solved in whichever space is cheapest, like `nn.Linear`.
    `unregister` undoes it. Hugging Face's `Conv1D` is known without it.

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
        >>> unregister(Dense)
    """
    _check_class(kind, "register")
    if kind in TABLE and not issubclass(TABLE[kind], RegisteredLinear):
        raise ValueError(f"{kind.__name__} is built in and can't be registered")
    TABLE[kind] = (RegisteredTransposed if transposed else RegisteredLinear).derived(kind)


def unregister(kind: type[nn.Module]) -> None:
    """Undo `register`: `convert` leaves layers of this class alone again. Those that are converted stay so.

    Raises:
        ValueError: the class was not registered.
    """
    _check_class(kind, "unregister")
    if kind not in TABLE or not issubclass(TABLE[kind], RegisteredLinear):
        raise ValueError(f"{kind.__name__} was not registered")
    del TABLE[kind]


def _check_class(kind: object, caller: str) -> None:
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"{caller} should be given a module class but was given {kind!r}")


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
    "unregister",
]
