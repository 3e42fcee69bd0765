"""Inverses of triangular matrices by halves, against substitution and the definition."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from proxprop import tuning
from proxprop.solvers.triangular import inverse_of_product, inverse_of_triangle


def triangle(groups: int, size: int, seed: int = 0) -> Tensor:
    """The factor of a Gram matrix whose features have scales from 1 to 1/100."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, 2 * size, size, generator=generator, dtype=torch.float64)
    A *= torch.logspace(0, -2, size, dtype=torch.float64)
    return torch.linalg.cholesky(A.mT @ A + 1e-2 * torch.eye(size, dtype=torch.float64))


def left_over(product: Tensor) -> float:
    identity = torch.eye(product.shape[-1], dtype=product.dtype)
    return float((product - identity).abs().max()) if product.numel() else 0.0


@given(st.integers(0, 3), st.integers(1, 40), st.booleans(), st.integers(0, 2**31))
@example(2, tuning.TRIANGLE_MOST_ROWS, True, 0)
@example(2, tuning.TRIANGLE_MOST_ROWS + 1, False, 0)
@example(1, 2 * tuning.TRIANGLE_MOST_ROWS + 1, True, 0)
def test_a_triangle_times_its_inverse_is_the_identity(groups: int, size: int, rows: bool, seed: int) -> None:
    L = triangle(groups, size, seed)
    L = L.contiguous() if rows else L.mT.contiguous().mT
    X = inverse_of_triangle(L)
    assert left_over(X @ L) < 1e-11
    assert not X.triu(1).any()
    assert left_over(inverse_of_product(L) @ (L @ L.mT)) < 1e-9


@pytest.mark.parametrize("size", [300, 1100, 2049])
def test_halves_round_as_substitution_does(size: int) -> None:
    L = triangle(1, size).float()
    identity = torch.eye(size)
    exact = torch.linalg.inv(L.double())
    substituted = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)
    found = inverse_of_triangle(L)
    assert float((found - exact).norm()) <= 2 * float((substituted - exact).norm())
    assert left_over((found @ L).double()) <= 2 * left_over((substituted @ L).double())


def test_a_triangle_is_left_as_it_was() -> None:
    L = triangle(1, 2 * tuning.TRIANGLE_MOST_ROWS)
    before = L.clone()
    inverse_of_triangle(L)
    assert torch.equal(L, before)
