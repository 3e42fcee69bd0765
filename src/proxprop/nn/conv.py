"""Convolutions and transposed convolutions in one, two and three dimensions."""

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from proxprop.backward import Shapes
from proxprop.nn.layer import Part, ProximalLayer, as_kernels_see, detached, handles
from proxprop.transfer import ConvGeometry, ConvTransfer, ConvTransposeTransfer
from proxprop.transfer.conv_transpose import CONVOLVE_TRANSPOSED

AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvLayer(ProximalLayer):
    """What the convolutions share; mixed into torch's, whose attributes it reads."""

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        conv = cast(nn.Conv2d, self)
        if not self._trains():
            return cast(Tensor, super().forward(input))
        input, parameters = as_kernels_see(input), handles(conv.weight, conv.bias)
        weight, bias = detached(conv.weight, conv.bias)
        output = conv._conv_forward(input, weight, bias)
        build = functools.partial(_conv_transfer, ConvTransfer, geometry(conv))
        return self._attach(output, build, (input,), parameters, bfloat16=True)

    def _parts(self) -> dict[str, Part]:
        walk = geometry(cast(nn.Conv2d, self))
        return self._part(functools.partial(_conv_layout, ConvTransfer, walk), "weight", "bias")


class Conv1d(ConvLayer, nn.Conv1d):
    """`torch.nn.Conv1d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv1d


class Conv2d(ConvLayer, nn.Conv2d):
    """`torch.nn.Conv2d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv2d


class Conv3d(ConvLayer, nn.Conv3d):
    """`torch.nn.Conv3d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.Conv3d


class ConvTransposeLayer(ProximalLayer):
    """What the transposed convolutions share; mixed into torch's, whose attributes it reads."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """torch's own forward."""
        conv = cast(nn.ConvTranspose2d, self)
        if not self._trains():
            return cast(Tensor, super().forward(input, output_size))
        input, parameters = as_kernels_see(input), handles(conv.weight, conv.bias)
        weight, bias = detached(conv.weight, conv.bias)
        walk = geometry(conv)
        stride, widths, kernel, dilation = map(list, (walk.stride, walk.widths, walk.kernel, walk.dilation))
        extra = conv._output_padding(input, output_size, stride, widths, kernel, len(kernel), dilation)
        output = CONVOLVE_TRANSPOSED[len(kernel)](
            input, weight, bias, stride, widths, extra, walk.groups, dilation
        )
        build = functools.partial(_conv_transfer, ConvTransposeTransfer, walk)
        return self._attach(output, build, (input,), parameters, bfloat16=True)

    def _parts(self) -> dict[str, Part]:
        walk = geometry(cast(nn.ConvTranspose2d, self))
        return self._part(functools.partial(_conv_layout, ConvTransposeTransfer, walk), "weight", "bias")


class ConvTranspose1d(ConvTransposeLayer, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.ConvTranspose1d


class ConvTranspose2d(ConvTransposeLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.ConvTranspose2d


class ConvTranspose3d(ConvTransposeLayer, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` whose `.grad` after backward is the proximal direction; see `Linear`."""

    plain = nn.ConvTranspose3d


def _conv_transfer(
    kind: type[ConvTransfer], walk: ConvGeometry, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes
) -> ConvTransfer:
    (input,), (weight, bias) = inputs, shapes
    return kind(input, like.shape, weight, bias is not None, walk)


def _conv_layout(kind: type[ConvTransfer], walk: ConvGeometry, shapes: Shapes) -> ConvTransfer:
    """The transfer of a convolution without images."""
    weight, bias = shapes
    channels, outputs = walk.groups, bias[0] if bias else 0
    if weight is not None:
        crossing = kind is ConvTransposeTransfer
        channels, outputs = (
            (weight[0], weight[1] * walk.groups) if crossing else (weight[1] * walk.groups, weight[0])
        )
    space = [sum(p) + e * k for p, e, k in zip(walk.padding, walk.dilation, walk.kernel, strict=True)]
    image = torch.empty(0, channels, *space, device="meta")
    output = torch.empty(0, outputs, *[1] * len(space), device="meta")
    return _conv_transfer(kind, walk, (image,), output, shapes)


def geometry(conv: AnyConv | nn.ConvTranspose2d) -> ConvGeometry:
    """How a convolution module walks over its input."""
    return ConvGeometry(
        kernel=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        dilation=tuple(conv.dilation),
        padding=_padding(conv),
        mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode,
        groups=conv.groups,
    )


def _padding(conv: AnyConv | nn.ConvTranspose2d) -> tuple[tuple[int, int], ...]:
    """(before, after) for each spatial dimension; 'same' puts the odd one after."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [e * (k - 1) for e, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((width, width) for width in cast(tuple[int, ...], conv.padding))
