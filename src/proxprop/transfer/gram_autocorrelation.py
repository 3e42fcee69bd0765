"""Exact Gram matrices of convolutions at stride 1 from autocorrelations, without unfolding patches.

For taps i, j of one dimension, `S[i, j] = Σ_o x[o + e·i − p]·x[o + e·j − p]` over output positions o depends on the lag
`j − i` only, except for products near the border that no output position reaches:

    S[i, j] = Σ_u x[u]·x[u + e(j − i)]  −  Σ_{u < e·i − p} …  −  Σ_{u ≥ H − Q + e·i} …,     Q = max(0, e(k−1) − p)

The first sum is an autocorrelation, from a Fourier transform; the other two touch the first and the last Q entries
only. In several dimensions each is a sum over all positions, the first, or the last ones, so S is a signed sum over all
combinations, each of them exact. Unfolding costs `taps²` products an input entry; this costs about one.

Shapes: input `[batch, groups, channels, *space]`; S `[groups, channels·taps, channels·taps]` for all taps of a filter.
"""

from collections.abc import Sequence
from math import log2, pi, prod

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.solvers.matmul import widened
from proxprop.transfer.conv_geometry import Axis, kept


def border(axis: Axis) -> int:
    """Q: number of entries at either end that not all taps see."""
    return max(0, axis.dilation * (axis.taps - 1) - axis.padding)


def transform(axis: Axis) -> int:
    """Length of a Fourier transform in which no lag wraps around: even, and a product of 2, 3 and 5."""
    length = axis.size + axis.dilation * (axis.taps - 1)
    while length % 2 or not _smooth(length):
        length += 1
    return length


def applies(axes: list[Axis]) -> bool:
    """Whether the formula holds: the stride is 1, and the first and the last entries lie in the image."""
    return all(axis.stride == 1 and axis.size >= border(axis) and axis.outputs > 0 for axis in axes)


def flops(walks: list[Axis], batch: int, groups: int, channels: int) -> float:
    """FLOPs of the largest part: transforms, products for each frequency, and the inverse at the lags."""
    points = prod(transform(w) for w in walks)
    transforms = 2.5 * batch * channels * points * log2(points)
    products = 3.0 * batch * channels**2 * points
    inverse = 2.0 * channels**2 * points * prod(2 * w.taps - 1 for w in walks)
    taps = 20.0 * (channels * prod(w.taps for w in walks)) ** 2  # S is moved a few times; counted as FLOPs
    return groups * (transforms + products + inverse + taps)


def gram(x: Tensor, walks: list[Axis]) -> Tensor:
    """`S = AᵀA` of the patches of x, the ones column left out.

    Args:
        x: input `[batch, groups, channels, *space]`, not padded.
        walks: one a spatial dimension.

    Returns:
        S `[groups, channels·taps, channels·taps]`.
    """
    x, (groups, channels) = widened(x), x.shape[1:3]
    S = _products(x.transpose(0, 1), walks, ())
    for axis, walk in enumerate(walks):
        S = torch.movedim(torch.tensordot(_signs(walk, x.dtype, x.device), S, ([1], [1 + axis])), 0, 1 + axis)
    pairs = [size for walk in walks for size in (walk.taps, walk.taps)]
    S = S.reshape(groups, *pairs, channels, channels)
    first, second = (range(start, 1 + len(pairs), 2) for start in (1, 2))
    features = channels * prod(walk.taps for walk in walks)
    return S.permute(0, -2, *first, -1, *second).reshape(groups, features, features)


def _products(x: Tensor, walks: list[Axis], at_edge: tuple[bool, ...]) -> Tensor:
    """All products that S is made of.

    Args:
        x: the input `[groups, batch, channels, *space]`.
        walks: one a spatial dimension.
        at_edge: for each dimension so far, whether the products are those of its first and last entries, which
            S takes off, or those of all its entries; the other dimensions are still to be chosen.

    Returns:
        `[groups, *products of each dimension, channels, channels]`, in the order of `_signs`.
    """
    axis = len(at_edge)
    if axis < len(walks):
        choices = [False, True] if border(walks[axis]) else [False]
        return torch.cat([_products(x, walks, (*at_edge, choice)) for choice in choices], dim=1 + axis)
    whole = [axis for axis, edge in enumerate(at_edge) if not edge]
    edges = [axis for axis, edge in enumerate(at_edge) if edge]
    for axis in edges:  # both sides at once, as groups
        walk = walks[axis]
        width = border(walk)
        sides = [x.narrow(3 + axis, start, width) for start in (0, walk.size - width)]
        x = torch.cat(sides)
    # Entries at an edge are told apart, like channels; along the other dimensions only lags matter.
    x = x.permute(0, 1, *(3 + axis for axis in edges), 2, *(3 + axis for axis in whole))
    found = _correlations(x.flatten(2, 2 + len(edges)), [walks[axis] for axis in whole])
    widths = x.shape[2 : 3 + len(edges)]
    found = found.reshape(*[2] * len(edges), -1, *found.shape[1 : 1 + len(whole)], *widths, *widths)
    return _by_dimension(found, whole, edges)


def _by_dimension(found: Tensor, whole: list[int], edges: list[int]) -> Tensor:
    """Products with one axis for each dimension.

    They come as `[*sides (last edge first), groups, *lags, *edge entries, channels, *edge entries, channels]`.
    """
    side = {axis: len(edges) - 1 - place for place, axis in enumerate(edges)}
    lag = {axis: len(edges) + 1 + place for place, axis in enumerate(whole)}
    entry = {axis: len(edges) + 1 + len(whole) + place for place, axis in enumerate(edges)}
    other = 1 + len(edges)
    order, sizes = [len(edges)], [found.shape[len(edges)]]
    for axis in range(len(whole) + len(edges)):
        places = [lag[axis]] if axis in lag else [side[axis], entry[axis], entry[axis] + other]
        order += places
        sizes.append(prod(found.shape[place] for place in places))
    channels = [found.dim() - 1 - other, found.dim() - 1]
    return found.permute(*order, *channels).reshape(*sizes, found.shape[-1], found.shape[-1])


def _correlations(x: Tensor, walks: list[Axis]) -> Tensor:
    """`Σ_b Σ_u x[b, c, u]·x[b, c', u + lag]` for all lags between taps.

    Args:
        x: `[groups, batch, channels, *space]`.
        walks: one for each dimension of space; none leaves a plain product over the batch.

    Returns:
        `[groups, *lags, channels, channels]`.
    """
    groups, batch, channels = x.shape[:3]
    if not walks:
        return x.mT @ x
    by_products = x.device.type == "cpu" and max(_lengths(walks)[0]) <= tuning.SHORT_TRANSFORM
    stacked = _multiplied(x, walks) if by_products else _transformed(x, walks)
    even = stacked @ stacked.mT
    cross = stacked[..., :batch] @ stacked[..., batch:].mT
    odd = cross - cross.mT
    cosine, sine = _inverse(tuple(walks), x.dtype, x.device)
    found = cosine @ even.flatten(2) - sine @ odd.flatten(2)
    return found.reshape(groups, *(2 * w.taps - 1 for w in walks), channels, channels)


def _transformed(x: Tensor, walks: list[Axis]) -> Tensor:
    """The spectrum `[groups, frequencies (last dimension first), channels, (real | imaginary)·batch]`."""
    lengths, half = _lengths(walks)
    dimensions = range(3, x.dim())
    spectrum = torch.view_as_real(torch.fft.rfftn(x, s=lengths, dim=list(dimensions)))
    stacked = spectrum.permute(0, *reversed(dimensions), 2, -1, 1)
    return stacked.reshape(len(x), prod(half), x.shape[2], -1)


def _multiplied(x: Tensor, walks: list[Axis]) -> Tensor:
    """The spectrum by products with cosines and sines: each leaves the layout that the next one needs."""
    groups, batch, channels = x.shape[:3]
    last, *others = reversed(walks)
    entries = x.permute(0, *range(3, x.dim()), 1, 2).reshape(-1, last.size, batch * channels)
    half = transform(last) + 2  # of the frequencies, for x is real
    waves = _waves(last, x.dtype, x.device)[:half, : last.size]
    found = torch.bmm(waves.expand(len(entries), -1, -1), entries)
    for walk in others:
        # [groups and dimensions to come, entry, frequency, real or imaginary, batch and channels]
        split = found.unflatten(1, (-1, 2)).unflatten(0, (-1, walk.size))
        real, imaginary = (part.transpose(1, 2).flatten(0, 1) for part in split.unbind(3))
        waves = _waves(walk, x.dtype, x.device).expand(len(real), -1, -1)
        found = torch.bmm(waves[..., : walk.size], real).baddbmm_(waves[..., walk.size :], imaginary)
        found = found.view(len(split), -1, batch * channels)
    return found.view(groups, -1, 2 * batch, channels).mT


@kept
def _waves(walk: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A Fourier transform `[frequency · (real | imaginary), (real | imaginary) · entry]`."""
    turns = (
        torch.arange(transform(walk))[:, None]
        * torch.arange(walk.size, dtype=torch.float64)
        / transform(walk)
    )
    cosine, sine = (2 * pi * turns).cos(), (2 * pi * turns).sin()
    parts = torch.cat([cosine, sine], dim=1), torch.cat([-sine, cosine], dim=1)
    return torch.stack(parts, dim=1).flatten(0, 1).to(device, dtype)


@kept
def _inverse(walks: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the inverse transform at the lags `[lags, frequencies]`, both halves of it counted.

    The frequencies of the last dimension come first.
    """
    lengths, half = _lengths(walks)
    angle = torch.zeros(1, 1, dtype=torch.float64)
    for walk, length, frequencies in zip(walks, lengths, half, strict=True):
        lags = walk.dilation * torch.arange(1 - walk.taps, walk.taps)
        turns = lags[:, None] * torch.arange(frequencies, dtype=torch.float64) / length
        total = angle[:, None, None, :] + 2 * pi * turns[None, :, :, None]
        angle = total.reshape(total.shape[0] * total.shape[1], -1)
    twice = torch.full((half[-1],), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1.0
    weight = twice.repeat_interleave(prod(half[:-1])) / prod(lengths)
    return (angle.cos() * weight).to(device, dtype), (angle.sin() * weight).to(device, dtype)


@kept
def _signs(axis: Axis, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How products enter S `[tap·tap, products]`: by lag; less those of first and of last entries."""
    i, j = torch.arange(axis.taps)[:, None, None], torch.arange(axis.taps)[None, :, None]
    by_lag = (j - i == torch.arange(1 - axis.taps, axis.taps)).double().flatten(0, 1)
    r, s = torch.arange(border(axis))[:, None], torch.arange(border(axis))[None, :]
    i, j = i[..., None], j[..., None]
    same_lag = s - r == axis.dilation * (j - i)
    first = (same_lag & (r < axis.dilation * i - axis.padding)).double().flatten(2).flatten(0, 1)
    last = (same_lag & (r >= axis.dilation * i)).double().flatten(2).flatten(0, 1)
    return torch.cat([by_lag, -first, -last], dim=1).to(device, dtype)


def _lengths(walks: Sequence[Axis]) -> tuple[list[int], list[int]]:
    """Transform lengths, and how many frequencies of each are kept: half of the last, since x is real."""
    lengths = [transform(walk) for walk in walks]
    return lengths, [*lengths[:-1], lengths[-1] // 2 + 1]


def _smooth(length: int) -> bool:
    for factor in (2, 3, 5):
        while length % factor == 0:
            length //= factor
    return length == 1
