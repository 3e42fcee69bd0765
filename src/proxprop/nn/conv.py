"""Convolutions and transposed convolutions in one, two and three dimensions."""

from functools import partial
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.affine import AffineLayer
from proxprop.torch_internals import convolve, output_padding
from proxprop.transfer import ConvGeometry, ConvTransfer, ConvTransposeTransfer, LayerCall

CONVOLVE_TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvLayer(AffineLayer):
    """Mixed into torch's convolutions, whose attributes it reads."""

    transfer: ClassVar[type[ConvTransfer]] = ConvTransfer

    def forward(self, input: Tensor) -> Tensor:
        """torch's own forward."""
        return self._affine(partial(convolve, cast(nn.Conv2d, self)), input)

    def _call(self) -> LayerCall:
        return LayerCall(self.transfer, (geometry(cast(nn.Conv2d, self)),))


class Conv1d(ConvLayer, nn.Conv1d):
    """`torch.nn.Conv1d` whose `.grad` after backward is the proximal direction; see `Linear`."""


class Conv2d(ConvLayer, nn.Conv2d):
    """`torch.nn.Conv2d` whose `.grad` after backward is the proximal direction; see `Linear`."""


class Conv3d(ConvLayer, nn.Conv3d):
    """`torch.nn.Conv3d` whose `.grad` after backward is the proximal direction; see `Linear`."""


class ConvTransposeLayer(ConvLayer):
    """Mixed into torch's transposed convolutions, whose attributes it reads."""

    transfer = ConvTransposeTransfer

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """torch's own forward."""
        conv = cast(nn.ConvTranspose2d, self)

        def convolve_transposed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            extra = output_padding(conv, input, output_size)
            options = conv.stride, cast(tuple[int, ...], conv.padding), extra, conv.groups, conv.dilation
            return CONVOLVE_TRANSPOSED[len(extra)](input, weight, bias, *options)

        return self._affine(convolve_transposed, input, options=(output_size,))


class ConvTranspose1d(ConvTransposeLayer, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` whose `.grad` after backward is the proximal direction; see `Linear`."""


class ConvTranspose2d(ConvTransposeLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` whose `.grad` after backward is the proximal direction; see `Linear`."""


class ConvTranspose3d(ConvTransposeLayer, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` whose `.grad` after backward is the proximal direction; see `Linear`."""


def geometry(conv: AnyConv | nn.ConvTranspose2d) -> ConvGeometry:
    """How a convolution module walks over its input."""
    return ConvGeometry(
        filter_size=tuple(conv.kernel_size),
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
