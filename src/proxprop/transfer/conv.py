"""Convolutions in one, two and three dimensions: every position of an image is a sample, its patch a row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional, grad

from proxprop import tuning
from proxprop.solvers import Sizes
from proxprop.solvers.matmul import transposed_product, transposed_square, wide
from proxprop.transfer.affine import Affine
from proxprop.transfer.conv_geometry import ConvGeometry, patch_sums
from proxprop.transfer.conv_gram import GramMethod, choose
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes

CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
WEIGHT_GRADIENT = {1: grad.conv1d_weight, 2: grad.conv2d_weight, 3: grad.conv3d_weight}


class ConvTransfer(Affine):
    """`Y = conv(X, W) + b`.

    Args:
        input: `[batch, channels, *space]` or unbatched `[channels, *space]`, in the precision to solve in, or in
            bfloat16 where that is what it came in, as in `LinearTransfer`.
        output_shape: shape of the layer's output.
        weight_shape: `[groups·outputs, channels/groups, *filter_size]`, or None where the weight is not trained.
        bias: whether there is a bias to train.
        geometry: stride, padding and the rest.
    """

    def __init__(
        self,
        input: Tensor,
        output_shape: torch.Size,
        weight_shape: torch.Size | None,
        bias: bool,
        geometry: ConvGeometry,
    ) -> None:
        super().__init__(weight_shape, bias)
        self.dimensions = len(geometry.filter_size)
        self.output_shape = output_shape
        self.coarse = input.dtype == torch.bfloat16
        channels, *positions = output_shape[-self.dimensions - 1 :]
        self.batched = input if input.dim() == self.dimensions + 2 else input[None]
        if not geometry.pads_evenly:  # done once, so that all that follows may leave padding to torch
            self.batched = geometry.pad(self.batched)
            geometry = replace(geometry, padding=((0, 0),) * self.dimensions, mode="constant")
        self.geometry = geometry
        batch = self.batched.shape[0]
        inputs = self.batched.shape[1] // geometry.groups * prod(geometry.filter_size) if weight_shape else 0
        self.sizes = Sizes(
            geometry.groups, batch * prod(positions), inputs + self.ones, channels // geometry.groups
        )
        self.batched_shape = torch.Size([batch, channels, *positions])
        self._chosen: GramMethod | None = None

    def rows(self) -> Tensor:
        """The unfolded patches `[groups, batch·positions, channels/groups·taps]`."""
        if self.weight_shape is None:
            return self.batched.new_empty(self.sizes.groups, self.sizes.samples, 0)
        return self._channels_first(self._unfold(self._padded()), 2)

    def _any_rows(self) -> Tensor:
        """`rows`, with channels last where that is the faster copy."""
        return self._unfold(self._padded()) if self.weight_shape else self.rows()

    def gram(self) -> Tensor:
        """`S = AᵀA`, from products of image rows, from autocorrelations, or from patches of some images at a time."""
        groups, samples, _, _ = self.sizes
        if self.weight_shape is None:
            return self.batched.new_full((groups, 1, 1), float(samples), dtype=wide(self.batched))
        form = self._method().gram
        if form is not None:
            x, axes = self.batched.unflatten(1, (groups, -1)), self.geometry.axes(self.batched.shape[2:])
            S = form(x, axes)
            return self._border(S, patch_sums(x, axes)) if self.bias else S
        return self._from_patches()[0]

    def normal_equations(self, G: Tensor) -> tuple[Tensor, Parameters]:
        """S and the gradient, from the same patches where those are what S comes from, in bfloat16."""
        if self.weight_shape is None or not self._takes_patches() or self._method().gram is not None:
            return super().normal_equations(G)
        G = G.reshape(self.batched_shape)
        S, weight = self._from_patches(G)
        return S, (weight.view(self.weight_shape), self._bias_gradient(G))

    def _from_patches(self, G: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """S, and for one group the weight gradient `[outputs, features]`, from patches of some images at a time.

        Args:
            G: `[batch, outputs, *positions]`; without it there is no gradient.
        """
        groups, _, features, outputs = self.sizes
        inputs, dtype = features - self.ones, wide(self.batched)
        S = self.batched.new_zeros(groups, inputs, inputs, dtype=dtype)
        sums = self.batched.new_zeros(groups, inputs, dtype=dtype)
        weight = self.batched.new_zeros(outputs if G is not None else 0, inputs, dtype=dtype)
        for images, A in self._blocks():
            S += transposed_square(A)
            if self.bias:
                sums += A.sum(-2, dtype=dtype)
            if G is not None:
                weight += transposed_product(_by_position(G[images]), A[0])
        S, sums = self._channels_first(self._channels_first(S, 1), 2), self._channels_first(sums, 1)
        return self._border(S, sums) if self.bias else S, self._channels_first(weight, 1)

    def sampled_rows(self, index: Tensor) -> Tensor:
        """Some of the patches, cut out without unfolding the others."""
        if self.weight_shape is None:
            return self.rows()[:, index]
        at: tuple[Tensor, ...] = ()
        for size in reversed(self.batched_shape[2:]):  # torch.unravel_index would make a GPU wait
            at, index = (index % size, *at), index // size
        windows = self._windows(self._padded(), self.geometry.stride).movedim(1, 1 + self.dimensions)
        patches: Tensor = windows[index, *at].flatten(1).unflatten(1, (self.sizes.groups, -1))
        return patches.transpose(0, 1)

    def output(self, parameters: Parameters) -> Tensor:
        """`conv(X, W) + b`."""
        weight, bias = parameters
        if weight is None:
            assert bias is not None
            return bias.view(-1, *[1] * self.dimensions).expand(self.output_shape)
        g = self.geometry
        Y = CONVOLVE[self.dimensions](self._widened(), weight, bias, g.stride, g.widths, g.dilation, g.groups)
        return Y.view(self.output_shape)

    def gradient(self, G: Tensor) -> Parameters:
        """The convolution's own weight gradient, and G summed over images and positions."""
        G = G.reshape(self.batched_shape)
        weight = self._weight_gradient(G, self.weight_shape) if self.weight_shape is not None else None
        return weight, self._bias_gradient(G)

    def normal(self, V: Tensor) -> Tensor:
        """`AᵀAV`; in bfloat16, some images at a time."""
        if not self.coarse:
            return super().normal(V)
        total = torch.zeros_like(V)
        for _, call in self._in_float32():
            total += call.normal(V)
        return total

    def _bias_gradient(self, G: Tensor) -> Tensor | None:
        return G.sum([0, *range(2, G.dim())], dtype=wide(G)) if self.bias else None

    def _weight_gradient(self, G: Tensor, shape: torch.Size) -> Tensor:
        """That of torch's own kernel, of some images at a time where they came in bfloat16; of few, from patches."""
        if not self.coarse:
            return self._own_weight_gradient(G, shape)
        if self._takes_patches() and self.sizes.samples <= self.sizes.features:
            weight = transposed_product(_by_position(G), self._unfold(self._padded())[0])
            return self._channels_first(weight, 1).view(shape)
        total = G.new_zeros(shape, dtype=torch.float32)
        for images, call in self._in_float32():
            total += call._own_weight_gradient(G[images].float(), shape)
        return total

    def _own_weight_gradient(self, G: Tensor, shape: torch.Size) -> Tensor:
        g = self.geometry
        gradient: Tensor = WEIGHT_GRADIENT[self.dimensions](
            self.batched, shape, G, g.stride, g.widths, g.dilation, g.groups
        )
        return gradient

    def _in_float32(self) -> Iterator[tuple[slice, "ConvTransfer"]]:
        """Some images at a time, and a call of the same layer with them in float32."""
        for images in self._images(
            max(self.batched.numel(), self.batched_shape.numel()), tuning.FLOAT32_COPY_MOST_NUMBERS
        ):
            input = self.batched[images].float()
            shape = torch.Size([len(input), *self.batched_shape[1:]])
            yield images, type(self)(input, shape, self.weight_shape, self.bias, self.geometry)

    def _takes_patches(self) -> bool:
        """Whether gradients may come from patches, for which few samples need little memory.

        They are in bfloat16, and the convolution's own kernel takes those only if it may round what it returns to
        bfloat16, which a solve magnifies. In float32 it needs a copy, and may round a solution to TF32.
        """
        return self.coarse and self.sizes.groups == 1 and self.sizes.samples > 0

    def _widened(self) -> Tensor:
        """The input in the precision to solve in."""
        return self.batched.to(wide(self.batched))

    def to_samples(self, G: Tensor) -> Tensor:
        """Channels last, one sample for each image and position, split by groups."""
        groups, samples, _, outputs = self.sizes
        split = G.to(wide(G)).reshape(self.batched_shape[0], groups, outputs, -1)
        return split.permute(1, 0, 3, 2).reshape(groups, samples, outputs)

    def from_samples(self, U: Tensor) -> Tensor:
        """The inverse of `to_samples`."""
        groups, _, _, outputs = self.sizes
        split = U.reshape(groups, self.batched_shape[0], -1, outputs)
        return split.permute(1, 0, 3, 2).reshape(self.output_shape)

    def gram_flops(self) -> float | None:
        """FLOPs of S where it does not come from patches."""
        return self._method().flops if self.weight_shape else None

    def gram_price(self) -> float:
        """High for transforms on a GPU."""
        return self._method().price if self.weight_shape else 1.0

    def gram_method(self) -> str:
        """Image rows, autocorrelation or patches."""
        return self._method().name if self.weight_shape else super().gram_method()

    def _method(self) -> GramMethod:
        """How S is formed, chosen once."""
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> GramMethod:
        return choose(self.batched, self.geometry, self.sizes)

    def own_price(self) -> float:
        """Higher on a GPU."""
        return tuning.OWN_PRICE_ON_A_GPU if self.batched.is_cuda else 1.0

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Some images at a time, and their patches."""
        groups, samples, features, _ = self.sizes
        for images in self._images(groups * samples * features, tuning.PATCHES_MOST_NUMBERS):
            yield images, self._unfold(self._padded(images))

    def _images(self, numbers: int, most: int) -> Iterator[slice]:
        """So many images at a time that of all their numbers there are at most so many, or one."""
        at_once = max(1, most * len(self.batched) // max(1, numbers))
        for start in range(0, len(self.batched), at_once):
            yield slice(start, start + at_once)

    def _padded(self, images: slice = slice(None)) -> Tensor:
        """What patches are cut from."""
        return self.geometry.pad(self.batched[images])

    def _unfold(self, padded: Tensor) -> Tensor:
        """Patches of a padded input at the convolution's stride."""
        return self._patches(padded, self.geometry.stride)

    def _patches(self, padded: Tensor, stride: tuple[int, ...], reverse: bool = False) -> Tensor:
        """Patches `[groups, batch·positions, features]` of a padded input, by strided views and one copy.

        The features are in the order of a weight, or channels last where numbers are so short that a GPU takes longer
        to find than to copy them: then those that are copied together lie together.
        """
        g, d = self.geometry, self.dimensions
        if self.coarse:
            padded = padded.movedim(1, -1).contiguous().movedim(-1, 1)
        windows = self._windows(padded, stride)
        if reverse:
            windows = windows.flip(list(range(2 + d, 2 + 2 * d)))
        patches: Tensor = windows.unflatten(1, (g.groups, -1))
        positions, taps = range(3, 3 + d), range(3 + d, 3 + 2 * d)
        patches = patches.permute(1, 0, *positions, *((*taps, 2) if self.coarse else (2, *taps)))
        return patches.reshape(g.groups, -1, self.sizes.features - self.ones)

    def _channels_first(self, array: Tensor, dim: int) -> Tensor:
        """Features in the order of a weight, from that of patches."""
        if not self.coarse:
            return array
        split: Tensor = array.unflatten(dim, (prod(self.geometry.filter_size), -1))
        return split.transpose(dim, dim + 1).flatten(dim, dim + 1)

    def _windows(self, padded: Tensor, stride: tuple[int, ...]) -> Tensor:
        """Views `[batch, channels, *positions, *taps]` of a padded input `[batch, channels, *space]`."""
        g = self.geometry
        for axis in range(self.dimensions):
            reach = g.dilation[axis] * (g.filter_size[axis] - 1) + 1
            padded = padded.unfold(2 + axis, reach, stride[axis])[..., :: g.dilation[axis]]
        return padded


def _by_position(G: Tensor) -> Tensor:
    """`[batch·positions, outputs]` of `[batch, outputs, *positions]`."""
    return G.flatten(2).mT.reshape(-1, G.shape[1])


@dataclass(frozen=True)
class ConvCall(LayerCall):
    """A call of a convolution."""

    geometry: ConvGeometry
    takes_bfloat16 = True
    capturable = True

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> ConvTransfer:
        """The transfer of this call."""
        (input,), (weight, bias) = inputs, shapes
        return ConvTransfer(input, like.shape, weight, bias is not None, self.geometry)

    def numbers(self) -> list[int]:
        """Those of the geometry."""
        return self.geometry.numbers()

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "ConvCall":
        """The call with these numbers."""
        return cls(ConvGeometry.of(numbers))

    def layout(self, shapes: Shapes) -> ConvTransfer:
        """The transfer without images."""
        weight, bias = shapes
        g = self.geometry
        channels, outputs = g.groups, bias[0] if bias else 0
        if weight is not None:
            channels, outputs = self._channels(weight)
        space = [sum(p) + e * k for p, e, k in zip(g.padding, g.dilation, g.filter_size, strict=True)]
        image = torch.empty(0, channels, *space, device="meta")
        output = torch.empty(0, outputs, *[1] * len(space), device="meta")
        return self.transfer((image,), output, shapes)

    def _channels(self, weight: torch.Size) -> tuple[int, int]:
        """Channels of the input and of the output."""
        return weight[1] * self.geometry.groups, weight[0]
