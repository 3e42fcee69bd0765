"""Convolutions in one, two and three dimensions: every position of an image is a sample, its patch a row."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.device import precision
from proxprop.solvers import Sizes
from proxprop.solvers.matmul import transposed_product, transposed_square, widened
from proxprop.transfer.affine import Affine
from proxprop.transfer.conv_geometry import ConvGeometry, patch_sums
from proxprop.transfer.conv_gram import choose
from proxprop.transfer.transfer import GramMethod, Parameters, Shapes, nothing


class ConvTransfer(Affine):
    """`Y = conv(X, W) + b`.

    Args:
        inputs: one `[batch, channels, *space]` or unbatched `[channels, *space]`, in the precision to solve in, or in
            bfloat16 if it came so, as in `LinearTransfer`.
        like: a tensor of the output's shape.
        shapes: of the weight, `[groups·outputs, channels/groups, *filter_size]`, and the bias.
        geometry: stride, padding and the rest.
    """

    takes_bfloat16 = capturable = True
    transposed: ClassVar[bool] = False

    def __init__(
        self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes, geometry: ConvGeometry
    ) -> None:
        super().__init__(like, shapes)
        (input,) = inputs
        self.dimensions = len(geometry.filter_size)
        self.coarse = input.dtype == torch.bfloat16
        channels, *positions = like.shape[-self.dimensions - 1 :]
        self.batched = input if input.dim() == self.dimensions + 2 else input[None]
        if not geometry.pads_evenly:  # pad here once, so that torch can do all padding that is left
            self.batched = geometry.pad(self.batched)
            geometry = replace(geometry, padding=((0, 0),) * self.dimensions, mode="constant")
        self.geometry, groups = geometry, geometry.groups
        batch = self.batched.shape[0]
        features = self.batched.shape[1] // groups * prod(geometry.filter_size) + self.ones
        self.sizes = Sizes(groups, batch * prod(positions), features, channels // groups)
        self.batched_shape = torch.Size([batch, channels, *positions])
        self._chosen: GramMethod | None = None

    @classmethod
    def without_samples(cls, shapes: Shapes, geometry: ConvGeometry) -> "ConvTransfer":
        """A transfer that has no images."""
        assert shapes[0] is not None
        g, (channels, outputs) = geometry, cls._channels(shapes[0], geometry.groups)
        space = [sum(p) + e * k for p, e, k in zip(g.padding, g.dilation, g.filter_size, strict=True)]
        image, like = nothing(channels, *space), nothing(outputs, *[1] * len(space))
        return cls([image], like, shapes, geometry)

    @staticmethod
    def _channels(weight: torch.Size, groups: int) -> tuple[int, int]:
        """Channels of the input and of the output."""
        return weight[1] * groups, weight[0]

    @classmethod
    def channel_axis(cls, geometry: ConvGeometry) -> int:
        """The axis of the output that the bias belongs to."""
        return -1 - len(geometry.filter_size)

    def rows(self) -> Tensor:
        """The unfolded patches `[groups, batch·positions, channels/groups·taps]`."""
        return self._channels_first(self._any_rows(), 2)

    def _any_rows(self) -> Tensor:
        """`rows`, with channels last if that is the faster copy."""
        return self._patches(slice(None))

    def gram(self) -> Tensor:
        """`S = AᵀA`, from products of image rows, from autocorrelations, or from patches of some images at a time."""
        form = self.gram_method().gram
        if form is None:
            return self._from_patches()[0]
        x = self.batched.unflatten(1, (self.sizes.groups, -1))
        axes = self.geometry.axes(self.batched.shape[2:])
        S = form(x, axes)
        return self._border(S, patch_sums(x, axes)) if self.bias else S

    def normal_equations(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """S and `AᵀG`; in bfloat16 both come from the same patches, if S comes from patches."""
        if not self._takes_patches() or self.gram_method().gram is not None:
            return super().normal_equations(G)
        G = G.reshape(self.batched_shape)
        S, weight = self._from_patches(G)
        return S, self.to_features((weight.view(self.weight_shape), self._bias_gradient(G)))

    def _from_patches(self, G: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """S, and for one group the weight gradient `[outputs, features]`, from patches of some images at a time.

        Args:
            G: `[batch, outputs, *positions]`; without it there is no gradient.
        """
        groups, _, features, outputs = self.sizes
        inputs, dtype = features - self.ones, precision(self.batched)
        S = self.batched.new_zeros(groups, inputs, inputs, dtype=dtype)
        sums = self.batched.new_zeros(groups, inputs, dtype=dtype)
        weight = self.batched.new_zeros(outputs if G is not None else 0, inputs, dtype=dtype)
        for images in self._images(self.sizes.samples * groups * features, tuning.PATCHES_MOST_NUMBERS):
            A = self._patches(images)
            S += transposed_square(A)
            if self.bias:
                sums += A.sum(-2, dtype=dtype)
            if G is not None:
                weight += transposed_product(_by_position(G[images]), A[0])
        S, sums = self._channels_first(self._channels_first(S, 1), 2), self._channels_first(sums, 1)
        return self._border(S, sums) if self.bias else S, self._channels_first(weight, 1)

    def sampled_rows(self, index: Tensor) -> Tensor:
        """Some of the patches, without unfolding the others."""
        at: tuple[Tensor, ...] = ()
        for size in reversed(self.batched_shape[2:]):  # torch.unravel_index would make a GPU wait
            at, index = (index % size, *at), index // size
        windows = self._windows(self._padded(slice(None))).movedim(1, 1 + self.dimensions)
        patches: Tensor = windows[index, *at].flatten(1).unflatten(1, (self.sizes.groups, -1))
        return patches.transpose(0, 1)

    def output(self, parameters: Parameters) -> Tensor:
        """`conv(X, W) + b`."""
        weight, bias = parameters
        assert weight is not None
        return torch.convolution(widened(self.batched), weight, bias, *self._walk()).view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """The convolution's own weight gradient, and G summed over images and positions."""
        G = G.reshape(self.batched_shape)
        return self._weight_gradient(G), self._bias_gradient(G)

    def normal(self, V: Tensor) -> Tensor:
        """`AᵀAV`; in bfloat16, some images at a time."""
        if not self.coarse:
            return super().normal(V)
        total = torch.zeros_like(V)
        for _, call in self._in_float32():
            total += call.normal(V)
        return total

    def _bias_gradient(self, G: Tensor) -> Tensor | None:
        return G.sum([0, *range(2, G.dim())], dtype=precision(G)) if self.bias else None

    def _weight_gradient(self, G: Tensor) -> Tensor:
        """The gradient by torch's own kernel; in bfloat16 a few images at a time, or from patches if those are few."""
        if not self.coarse:
            return self._own_weight_gradient(G)
        if self._takes_patches() and self.sizes.samples <= self.sizes.features:
            weight = transposed_product(_by_position(G), self._any_rows()[0])
            return self._channels_first(weight, 1).view(self.weight_shape)
        total = G.new_zeros(self.weight_shape, dtype=torch.float32)
        for images, call in self._in_float32():
            total += call._own_weight_gradient(G[images].float())
        return total

    def _own_weight_gradient(self, G: Tensor) -> Tensor:
        weight, wanted = G.new_empty(()).expand(self.weight_shape), [False, True, False]
        gradient: Tensor = torch.ops.aten.convolution_backward(
            G, self.batched, weight, None, *self._walk(), wanted
        )[1]
        return gradient

    def _walk(self) -> tuple[Any, ...]:
        """What torch's convolutions in any number of dimensions take beside tensors."""
        g = self.geometry
        return g.stride, g.widths, g.dilation, self.transposed, self._extra(), g.groups

    def _extra(self) -> list[int]:
        """The output padding, which only transposed convolutions have."""
        return [0] * self.dimensions

    def _in_float32(self) -> Iterator[tuple[slice, "ConvTransfer"]]:
        """Some images at a time, and a call of the same layer with them in float32."""
        for images in self._images(
            max(self.batched.numel(), self.batched_shape.numel()), tuning.FLOAT32_COPY_MOST_NUMBERS
        ):
            input = self.batched[images].float()
            like = input.new_empty(()).expand(len(input), *self.batched_shape[1:])
            bias = self.batched_shape[1:2] if self.bias else None
            yield images, type(self)([input], like, [self.weight_shape, bias], self.geometry)

    def _takes_patches(self) -> bool:
        """Whether gradients may come from patches, which take little memory for few samples.

        Patches are for bfloat16: the convolution's own kernel would round its result to bfloat16, which a solve
        magnifies. In float32 it would need a copy of the input, and may round a solution to TF32.
        """
        return self.coarse and self.sizes.groups == 1 and self.sizes.samples > 0

    def to_samples(self, G: Tensor) -> Tensor:
        """Channels last, one sample for each image and position, split by groups."""
        groups, samples, _, outputs = self.sizes
        split = widened(G).reshape(self.batched_shape[0], groups, outputs, -1)
        return split.permute(1, 0, 3, 2).reshape(groups, samples, outputs)

    def from_samples(self, U: Tensor) -> Tensor:
        """The inverse of `to_samples`."""
        groups, _, _, outputs = self.sizes
        split = U.reshape(groups, self.batched_shape[0], -1, outputs)
        # `reshape` may leave strides that belong to no layout where a size is 1, and torch's convolutions refuse them
        return split.permute(1, 0, 3, 2).flatten().view(self.output_shape)

    def gram_method(self) -> GramMethod:
        """Image rows, autocorrelation or patches, chosen once."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> GramMethod:
        return choose(self.batched, self.geometry, self.sizes)

    def own_price(self) -> float:
        """Price of a FLOP of φ and φ*, which is higher on a GPU."""
        return tuning.OWN_PRICE_ON_A_GPU if self.batched.is_cuda else 1.0

    def _images(self, numbers: int, most: int) -> Iterator[slice]:
        """Slices of the images such that each has at most `most` of all `numbers`, or is one image."""
        at_once = max(1, most * len(self.batched) // max(1, numbers))
        for start in range(0, len(self.batched), at_once):
            yield slice(start, start + at_once)

    def _padded(self, images: slice) -> Tensor:
        """The padded input that patches of some images are cut from."""
        return self.geometry.pad(self.batched[images])

    def _patches(self, images: slice) -> Tensor:
        """Patches `[groups, batch·positions, features]` of some images, by strided views and one copy.

        The features are in the order of a weight. In bfloat16 they are channels last, because a GPU copies adjacent
        numbers faster.
        """
        d, padded = self.dimensions, self._padded(images)
        if self.coarse:
            padded = padded.movedim(1, -1).contiguous().movedim(-1, 1)
        patches: Tensor = self._windows(padded).unflatten(1, (self.sizes.groups, -1))
        positions, taps = range(3, 3 + d), range(3 + d, 3 + 2 * d)
        patches = patches.permute(1, 0, *positions, *((*taps, 2) if self.coarse else (2, *taps)))
        return patches.reshape(self.sizes.groups, -1, self.sizes.features - self.ones)

    def _channels_first(self, array: Tensor, dim: int) -> Tensor:
        """Reorder features from the order of patches to the order of a weight."""
        if not self.coarse:
            return array
        split: Tensor = array.unflatten(dim, (prod(self.geometry.filter_size), -1))
        return split.transpose(dim, dim + 1).flatten(dim, dim + 1)

    def _windows(self, padded: Tensor) -> Tensor:
        """Views `[batch, channels, *positions, *taps]` of a padded input `[batch, channels, *space]`."""
        for axis, step in enumerate(self._steps()):
            taps, dilation = self.geometry.filter_size[axis], self.geometry.dilation[axis]
            padded = padded.unfold(2 + axis, dilation * (taps - 1) + 1, step)[..., ::dilation]
        return padded

    def _steps(self) -> tuple[int, ...]:
        """How far apart patches are in the padded input."""
        return self.geometry.stride


def _by_position(G: Tensor) -> Tensor:
    """`[batch·positions, outputs]` of `[batch, outputs, *positions]`."""
    return G.flatten(2).mT.reshape(-1, G.shape[1])
