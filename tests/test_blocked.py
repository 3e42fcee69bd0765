"""Exact solutions by blocks, which GPUs take for large systems, against LAPACK's way; here on the CPU."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import relative_error
from proxprop import tuning
from proxprop.deferred.operator import Form, Inverse
from proxprop.solvers.block_cholesky import by_blocks
from proxprop.solvers.cholesky import factorize
from proxprop.solvers.exact import Exact, by_factor


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CHOLESKY_BLOCK", 64)


def system(size: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(1, size // 2 + 3, size, dtype=torch.float64, generator=generator)
    return A.mT @ A, torch.randn(1, size, outputs, dtype=torch.float64, generator=generator)


@given(
    size=st.integers(1, 300),
    outputs=st.integers(1, 40),
    tau_theta=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_blocks_equal_one_factor(size: int, outputs: int, tau_theta: float, seed: int) -> None:
    M, B = system(size, outputs, seed)
    before = M.clone(), B.clone()
    found = by_blocks(M, 1 / tau_theta, outputs)(B)
    assert torch.equal(M, before[0])
    assert torch.equal(B, before[1])
    twin = by_factor(factorize(M.clone(), 1 / tau_theta), outputs)(B)
    assert found.value.shape == B.shape
    assert relative_error(found.value, twin.value) < 1e-7
    assert not bool(found.failed.any())


@pytest.mark.parametrize("place", [3, 70, 199])
def test_blocks_that_are_not_positive_definite_fail_like_one_factor(place: int) -> None:
    M, B = system(200, 7)
    M[0, place, place] = -50.0
    found, twin = by_blocks(M, 1.0, 7)(B), by_factor(factorize(M.clone(), 1.0), 7)(B)
    assert found.failed.tolist() == twin.failed.tolist() == [True]
    assert relative_error(found.value, twin.value) < 1e-12


@pytest.mark.parametrize("place", [3, 199])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_blocks_take_what_is_not_finite_like_one_factor(place: int, value: float) -> None:
    M, B = system(200, 7)
    M[0, place, place] = value
    found, twin = by_blocks(M, 1.0, 7)(B), by_factor(factorize(M.clone(), 1.0), 7)(B)
    torch.testing.assert_close(found.value, twin.value, equal_nan=True)
    assert found.failed.tolist() == twin.failed.tolist() == [False]


def test_a_failure_does_not_hide_what_is_not_finite() -> None:
    M, B = system(200, 7)
    M[0, 3, 3], M[0, 199, 199] = -50.0, float("inf")
    found, twin = by_blocks(M, 1.0, 7)(B), by_factor(factorize(M.clone(), 1.0), 7)(B)
    assert bool(found.value.isnan().all())
    assert bool(twin.value.isnan().all())
    assert found.failed.tolist() == twin.failed.tolist() == [False]


def test_a_captured_step_takes_blocks_for_one_large_system() -> None:
    M, B = system(200, 7)
    with (
        mock.patch("proxprop.solvers.block_cholesky.has_fast_bfloat16", return_value=True),
        mock.patch("proxprop.solvers.exact.by_blocks", wraps=by_blocks) as taken,
    ):
        right = Exact().features(M.clone(), B, damping=1.0)
        assert not taken.called
        with mock.patch("proxprop.device.is_captured", return_value=True):
            found = Exact().features(M.clone(), B, damping=1.0)
            Exact().features(M.expand(2, -1, -1).clone(), B.expand(2, -1, -1), damping=1.0)
    assert taken.call_count == 1
    assert relative_error(found.value, right.value) < 1e-12


def test_a_captured_step_inverts_one_large_matrix_by_blocks() -> None:
    M, _ = system(200, 7)
    right, _ = Inverse.of(Form(M.clone(), 0.5, 1.5))
    with (
        mock.patch("proxprop.solvers.block_cholesky.has_fast_bfloat16", return_value=True),
        mock.patch("proxprop.device.is_captured", return_value=True),
        mock.patch("proxprop.deferred.operator.by_blocks", wraps=by_blocks) as taken,
    ):
        found, failed = Inverse.of(Form(M.clone(), 0.5, 1.5))
    assert taken.call_count == 1
    assert relative_error(found.kept, right.kept) < 1e-12
    assert failed.tolist() == [False]
