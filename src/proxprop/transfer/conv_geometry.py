"""How a convolution walks over its input, in all dimensions and along each of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from proxprop.device import precision

MODES = ("constant", "reflect", "replicate", "circular")
"""Ways to fill a border, in the words of `torch.nn.functional.pad`."""


@dataclass(frozen=True)
class ConvGeometry:
    """How a convolution walks over its input; one entry a spatial dimension.

    `padding` holds (before, after) pairs, so that 'same' with an even filter size fits in; `mode` is one of
    `MODES`.
    """

    filter_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str
    groups: int

    def numbers(self) -> list[int]:
        """The geometry as whole numbers: five for each dimension, the mode, the groups."""
        walks = zip(self.filter_size, self.stride, self.dilation, self.padding, strict=True)
        by_dimension = [number for *walk, padding in walks for number in (*walk, *padding)]
        return [*by_dimension, MODES.index(self.mode), self.groups]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "ConvGeometry":
        """The inverse of `numbers`."""
        *by_dimension, mode, groups = numbers
        size, stride, dilation, before, after = (tuple(by_dimension[start::5]) for start in range(5))
        padding = tuple(zip(before, after, strict=True))
        return cls(size, stride, dilation, padding, MODES[mode], groups)

    def pad(self, input: Tensor) -> Tensor:
        """The input with its border filled."""
        if not any(before or after for before, after in self.padding):
            return input
        last_dimension_first = [width for pair in reversed(self.padding) for width in pair]
        return functional.pad(input, last_dimension_first, self.mode)

    @property
    def widths(self) -> tuple[int, ...]:
        """The padding before each dimension, which is the padding after it where `pads_evenly`."""
        return tuple(before for before, _ in self.padding)

    @property
    def pads_evenly(self) -> bool:
        """Whether torch's convolution can pad by itself: zeros, as many before as after."""
        return self.mode == "constant" and all(before == after for before, after in self.padding)

    def axes(self, space: torch.Size) -> list["Axis"]:
        """The walk along each dimension of an input of this size, where `pads_evenly`."""
        walks = zip(space, self.filter_size, self.stride, self.dilation, self.widths, strict=True)
        return [Axis(*walk) for walk in walks]


Constant = TypeVar("Constant", bound=Callable[..., Any])


def kept(constant: Constant) -> Constant:
    """Cache a constant by its arguments; the last argument is its device.

    A separate thread makes it: while a compiled step is being turned into CUDA graphs, memory that its thread allocates
    on a GPU belongs to those graphs, and torch refuses to share it.
    """

    @cache
    def made(*args: Any) -> Any:
        if args[-1].type != "cuda":
            return constant(*args)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(constant, *args).result()

    return cast(Constant, made)


@dataclass(frozen=True)
class Axis:
    """How a convolution walks along one dimension, with zeros beyond the border."""

    size: int
    taps: int
    stride: int
    dilation: int
    padding: int

    @property
    def outputs(self) -> int:
        """How many output positions there are."""
        return (self.size + 2 * self.padding - self.dilation * (self.taps - 1) - 1) // self.stride + 1

    def positions(self) -> Tensor:
        """The output position from which a tap sees an entry, times the stride, `[entries, taps]`."""
        return torch.arange(self.size)[:, None] + self.padding - self.dilation * torch.arange(self.taps)

    def seen(self) -> Tensor:
        """Whether a tap sees an entry, from any output position, `[entries, taps]`."""
        at = self.positions()
        return (at % self.stride == 0) & (at >= 0) & (at < self.stride * self.outputs)


@kept
def seen(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`axis.seen()`, copied to a device once: a copy in every backward could not be captured in a CUDA graph."""
    return axis.seen().to(device, dtype)


def patch_sums(x: Tensor, axes: list[Axis]) -> Tensor:
    """Column sums of the patches `[groups, channels·taps]` of an input `[batch, groups, channels, *space]`."""
    total = x.sum(0, dtype=precision(x))
    groups, following = total.shape[0], total.shape[2:].numel()
    for axis in axes:
        following //= axis.size
        total = seen(axis, total.dtype, x.device).mT @ total.reshape(-1, axis.size, following)
    return total.view(groups, -1)


def taps(axes: list[Axis]) -> int:
    """How many entries a filter has in each channel."""
    return prod(axis.taps for axis in axes)
