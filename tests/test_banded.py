"""Gram matrices of convolutions from products of image rows, against unfolded patches."""

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import proxprop
from cases import LAYERS, assert_directions, by_name, oracle, randn
from proxprop import CG, Exact
from proxprop.transfer import banded, conv


@given(
    sizes=st.tuples(*[st.integers(1, 7)] * 2),
    kernel=st.tuples(*[st.integers(1, 4)] * 2),
    stride=st.tuples(*[st.integers(1, 3)] * 2),
    padding=st.tuples(*[st.integers(0, 3)] * 2),
    channels=st.integers(1, 3),
)
def test_equals_the_product_of_patches(sizes, kernel, stride, padding, channels) -> None:
    axes = [banded.Axis(*axis) for axis in zip(sizes, kernel, stride, padding, strict=True)]
    assume(all(axis.size + 2 * axis.padding >= axis.kernel for axis in axes))
    x = torch.randn(4, channels, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = functional.unfold(x, kernel, padding=padding, stride=stride).mT.flatten(0, 1)
    torch.testing.assert_close(banded.gram(x, *axes), A.mT @ A)
    torch.testing.assert_close(banded.sums(x, *axes), A.sum(0))


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("solver", [CG(3), Exact()], **by_name)
@pytest.mark.parametrize("case", [c for c in LAYERS if isinstance(c.layer(), nn.Conv2d)], **by_name)
def test_a_convolution_finds_the_same_direction(case, solver, monkeypatch) -> None:
    """On a GPU it multiplies rows where it can; here it is made to."""
    monkeypatch.setattr(conv, "MULTIPLY_ROWS", ("cpu",))
    plain, input = case.layer(), case.input()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space="feature", include_last=True)
    output = layer(input)
    G = randn(*output.shape, seed=2)
    output.backward(G)
    assert_directions(layer, oracle(plain, input, G, solver, 0.7))
