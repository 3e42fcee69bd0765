"""S of a convolution from autocorrelations equals S from unfolded patches, for any geometry."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from cases import randn, relative_error
from proxprop.transfer import ConvGeometry, ConvTransfer
from proxprop.transfer.conv_geometry import Axis, patch_sums
from proxprop.transfer.gram_autocorrelation import applies, gram

walks = st.builds(
    Axis,
    size=st.integers(1, 9),
    taps=st.integers(1, 5),
    stride=st.just(1),
    dilation=st.integers(1, 3),
    padding=st.integers(0, 5),
)


def patches(x: torch.Tensor, walks: list[Axis]) -> torch.Tensor:
    """Rows `[groups, batch·positions, channels·kernel]`, cut out one tap at a time."""
    x = functional.pad(x, [width for walk in reversed(walks) for width in (walk.padding,) * 2])
    taps = torch.cartesian_prod(*[torch.arange(walk.taps) for walk in walks]).view(-1, len(walks))
    cut = []
    for tap in taps.tolist():
        seen = x
        for axis, walk in enumerate(walks):
            seen = seen.narrow(3 + axis, tap[axis] * walk.dilation, walk.outputs)
        cut.append(seen.flatten(3))
    # [batch, groups, channels, positions, taps] -> [groups, batch·positions, channels·taps]
    return torch.stack(cut, -1).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


@given(
    walks=st.lists(walks, min_size=1, max_size=2),
    batch=st.integers(1, 3),
    groups=st.integers(1, 2),
    channels=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_equals_the_product_of_patches(walks, batch, groups, channels, seed) -> None:
    assume(applies(walks))
    x = randn(batch, groups, channels, *(walk.size for walk in walks), seed=seed) + 0.5
    A = patches(x, walks)
    assert relative_error(gram(x, walks), A.mT @ A) < 1e-11
    assert relative_error(patch_sums(x, walks), A.sum(1)) < 1e-11


def test_equals_the_product_of_patches_in_three_dimensions() -> None:
    walks = [Axis(4, 2, 1, 1, 0), Axis(5, 3, 1, 1, 1), Axis(3, 2, 1, 2, 2)]
    x = randn(2, 1, 2, 4, 5, 3, seed=0)
    A = patches(x, walks)
    assert relative_error(gram(x, walks), A.mT @ A) < 1e-12
    assert relative_error(patch_sums(x, walks), A.sum(1)) < 1e-12


@pytest.mark.parametrize(("shape", "kernel", "padding"), [((500, 3, 32, 32), 5, 2), ((64, 32, 8, 8), 3, 1)])
def test_float32_is_as_good_as_unfolding(shape, kernel, padding) -> None:
    """Images with a mean, as real ones have."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    walk = Axis(shape[2], kernel, 1, 1, padding)
    S = gram(x[:, None], [walk, walk])
    exact = gram(x[:, None].double(), [walk, walk])
    assert relative_error(S.double(), exact) < 2e-6
    damped = torch.eye(S.shape[-1], dtype=torch.float64) + exact[0]
    B = randn(S.shape[-1], 4, seed=1)
    found = torch.linalg.solve(torch.eye(S.shape[-1], dtype=torch.float64) + S[0].double(), B)
    assert relative_error(found, torch.linalg.solve(damped, B)) < 2e-2


@pytest.mark.parametrize(
    ("stride", "kernel", "size", "reason"),
    [
        ((1, 1), (3, 3), 6, "about one product an entry"),
        ((2, 1), (3, 3), 6, "a stride above 1"),
        ((1, 1), (1, 1), 6, "a filter of one entry"),
        ((1, 1), (9, 9), 5, "a border wider than the image"),
    ],
)
def test_a_convolution_correlates_where_that_is_right(stride, kernel, size, reason) -> None:
    """With so many images that a CPU does not multiply patches because there are few."""
    correlates = reason.startswith("about")
    padding = ((0, 0),) * 2 if size > 5 else ((2, 2),) * 2
    geometry = ConvGeometry(kernel, stride, (1, 1), padding, "constant", 1)
    x = randn(1000, 2, size, size, seed=0)
    weight = randn(3, 2, *kernel, seed=1)
    output = functional.conv2d(x, weight, None, stride, padding[0])
    transfer = ConvTransfer([x], output, [weight.shape, torch.Size([3])], geometry)
    assert transfer.gram_method().reason.startswith(reason)
    assert (transfer.gram_method().name == "autocorrelation") == correlates
    A = torch.cat([transfer.rows(), torch.ones(1, transfer.sizes.samples, 1, dtype=torch.float64)], dim=-1)
    assert relative_error(transfer.gram(), A.mT @ A) < 1e-12
    assert (transfer.gram_method().flops is not None) == correlates


@pytest.mark.parametrize(("batch", "correlates"), [(1, False), (64, True)])
def test_a_cpu_unfolds_few_patches(batch: int, correlates: bool) -> None:
    geometry = ConvGeometry((3, 3), (1, 1), (1, 1), ((0, 0),) * 2, "constant", 1)
    x = randn(batch, 4, 10, 10, seed=0)
    shapes = [torch.Size([3, 4, 3, 3]), torch.Size([3])]
    transfer = ConvTransfer([x], torch.empty(batch, 3, 8, 8), shapes, geometry)
    assert (transfer.gram_method().name == "autocorrelation") == correlates
