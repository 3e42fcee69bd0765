"""Splitting numbers into terms of fewer bits, for tensor cores."""

import pytest
import torch

from cases import relative_error
from kernels.interpreter import interpreted
from proxprop.solvers.matmul import (
    LEFT,
    LEFT_IN_TWO,
    RIGHT,
    RIGHT_IN_TWO,
    SMALLEST_FIRST,
    WALK,
    plain_terms,
)

pytest.importorskip("triton")
from proxprop.kernels import split_bf16, split_fp16

pytestmark = interpreted


@pytest.mark.parametrize("more", [0, 10])
@pytest.mark.parametrize("order", [LEFT, RIGHT, LEFT_IN_TWO, RIGHT_IN_TWO, SMALLEST_FIRST, WALK])
def test_bfloat16_terms_equal_their_twin(order: tuple[int, ...], more: int) -> None:
    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 36, 24)
    assert torch.equal(split_bf16.terms(x, order, 37 + more), plain_terms(x, order, 37 + more))
    for length in (30, 32):
        by_columns, rows = x.mT.contiguous().mT[:length], length + more
        found = split_bf16.terms(by_columns, order, rows)
        assert torch.equal(found, plain_terms(x[:length], order, rows))
        assert (found.stride(0) == 1) == (len(order) * rows % 8 == 0)


@pytest.mark.parametrize(("terms", "rounding"), [(1, 2.0**-11), (3, 2.0**-21)])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_float16_terms_add_up_to_the_matrix(terms: int, rounding: float, scale: float) -> None:
    """Low, high and high again, of M scaled on both sides to a diagonal between 1 and 4."""
    A = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)
    M = (A.mT @ A) * scale
    found, diagonal = split_fp16.split(M, rows=7, terms=terms)
    assert torch.equal(diagonal, M.diagonal(dim1=-2, dim2=-1))
    assert not found[:, 5:].any()
    blocks = found[:, :5].double().unflatten(-1, (terms, -1))[..., :5]
    whole = blocks[..., 0, :] + (blocks[..., 1, :] if terms == 3 else 0.0)
    side = torch.exp2(diagonal.double().sqrt().log2().floor())
    back = whole / 4096 * side[:, :, None] * side[:, None, :]
    largest = (diagonal.double()[:, :, None] * diagonal.double()[:, None, :]).sqrt()
    assert bool(((back - M.double()).abs() <= 4 * rounding * largest).all())
    if terms == 3:
        assert torch.equal(blocks[..., 1, :], blocks[..., 2, :])


def test_products_of_terms_are_those_of_the_matrix() -> None:
    left = torch.randn(2, 3, 16).half()
    right = torch.randn(2, 16, 4).half()
    found = split_fp16.product(left, right)
    assert found.dtype == torch.float32
    assert relative_error(found.double(), left.double() @ right.double()) < 1e-6
