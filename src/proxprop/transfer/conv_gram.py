"""How a convolution's Gram matrix S is formed: one function chooses, and says why.

A method's `gram` takes an input `[batch, groups, channels, *space]`, not padded, and the walks along its dimensions.
It returns S `[groups, features, features]` without the ones column. Patches have none: the layer cuts them out.
"""

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.solvers import Sizes
from proxprop.transfer import gram_autocorrelation, gram_image_rows
from proxprop.transfer.conv_geometry import Axis, ConvGeometry, taps
from proxprop.transfer.transfer import GramMethod


def choose(x: Tensor, geometry: ConvGeometry, sizes: Sizes) -> GramMethod:
    """Choose how S of a convolution is formed.

    Args:
        x: the input `[batch, channels, *space]`, not padded.
        geometry: which pads evenly.
        sizes: of the system.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta:
        return from_patches("a trace or a tensor without numbers; torch.compile has no complex numbers")
    axes = geometry.axes(x.shape[2:])
    if taps(axes) == 1:
        return from_patches("a filter of one entry: a patch is an entry of the input")
    by_rows = from_image_rows(x, geometry, axes) if x.is_cuda else None  # a transform takes a CPU fewer FLOPs
    return by_rows or _from_autocorrelation(x, axes, sizes)


def from_patches(reason: str) -> GramMethod:
    """The product of unfolded patches, which is always possible."""
    return GramMethod("patches", reason)


def from_image_rows(x: Tensor, geometry: ConvGeometry, axes: list[Axis]) -> GramMethod | None:
    """Products of image rows, for rows so short that launches count; None where rows are long or not enough."""
    if len(axes) != 2 or geometry.groups != 1 or geometry.dilation != (1, 1):
        return None
    if x.shape[1] * x.shape[3] > tuning.IMAGE_ROWS_MOST_NUMBERS:
        return None
    flops = gram_image_rows.flops(axes, len(x), x.shape[1])
    return GramMethod("image rows", "image rows so short that launches count", gram_image_rows.gram, flops)


def _from_autocorrelation(x: Tensor, axes: list[Axis], sizes: Sizes) -> GramMethod:
    """Autocorrelations, where the formula holds and a transform is faster than patches."""
    groups, samples, features, _ = sizes
    if any(axis.stride != 1 for axis in axes):
        return from_patches("a stride above 1: products of patches depend on more than their distance")
    if x.device.type == "cpu" and groups * samples * features <= tuning.CPU_PATCHES_MOST_NUMBERS:
        return from_patches("so few patches that the calls of a transform would take longer")
    if not gram_autocorrelation.applies(axes):
        return from_patches("a border wider than the image")
    flops = gram_autocorrelation.flops(axes, len(x), groups, x.shape[1] // groups)
    coarse = x.dtype == torch.bfloat16
    price = tuning.TRANSFORM_PRICE_IN_BFLOAT16 if coarse else tuning.TRANSFORM_PRICE_ON_A_GPU
    if coarse and 2.0 * groups * samples * features**2 < price * flops:
        return from_patches("products of bfloat16 patches are faster than a transform in float32")
    reason, gram = "about one product an entry of the input", gram_autocorrelation.gram
    return GramMethod("autocorrelation", reason, gram, flops, price if x.is_cuda else 1.0)
