"""The inverse root as a sum of inverses: accurate between two eigenvalues, whatever lies between them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxprop.solvers.inverse_root import ACCURACY, resolvents


@given(st.floats(-30, 30), st.floats(0, 12), st.floats(0, 1))
def test_it_is_accurate_between_two_eigenvalues(low: float, orders: float, place: float) -> None:
    pairs = resolvents(10**low, 10 ** (low + orders))
    x = 10 ** (low + place * orders)
    assert sum(weight / (x + shift) for shift, weight in pairs) * math.sqrt(x) == pytest.approx(
        1, rel=1.001 * ACCURACY
    )
    assert all(weight > 0 and shift >= 0 for shift, weight in pairs)  # so that the sum is positive definite


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 1), (10.0, 2), (1e3, 3), (1e4, 4), (1e6, 6)])
def test_few_inverses_are_enough(ratio: float, count: int) -> None:
    assert len(resolvents(1.0, ratio)) == count


def test_a_spectrum_without_end_ends() -> None:
    assert len(resolvents(1e-30, 1e4)) == len(resolvents(1e-8, 1e4))
