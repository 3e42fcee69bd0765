"""Inverses by blocks: as accurate as LAPACK's, and the same rule where a factorisation fails."""

import pytest
import torch
from torch import Tensor

from cases import randn, relative_error
from proxprop import tuning
from proxprop.solvers.cholesky import factorize_whole
from proxprop.solvers.inverse import inverse_by_blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "INVERSE_BLOCK", 32)


def covariance(size: int, decay: float, groups: int = 2) -> Tensor:
    """Matrices with eigenvalues `i**-decay`, scaled to a mean of one."""
    values = torch.arange(1, size + 1).double() ** -decay
    U = torch.linalg.qr(randn(groups, size, size, seed=3))[0]
    return (U * (values / values.mean())) @ U.mT


@pytest.mark.parametrize("size", [33, 64, 97, 150, 256])
@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("damping", [0.3, 0.01])
def test_the_inverse_is_as_accurate_as_lapacks(size: int, decay: float, damping: float) -> None:
    M = covariance(size, decay)
    expected = torch.linalg.inv(M + damping * torch.eye(size).double())
    found, failed = inverse_by_blocks(M.clone(), damping)
    assert not failed.any()
    assert relative_error(found, expected) < 1e-12
    single, failed = inverse_by_blocks(M.float(), damping)
    lapack = factorize_whole(M.float(), damping).inverse()
    assert not failed.any()
    assert relative_error(single.double(), expected) < 3 * relative_error(lapack.double(), expected) + 1e-6


def test_a_failure_is_replaced_as_by_every_factorisation() -> None:
    M = torch.stack([covariance(80, 0.5, 1)[0], torch.full((80, 80), 1e6).double()]).float()
    M[1, 50:, 50:] += 10 * torch.eye(30) * -1e6  # indefinite in a later block
    trace = M[1].diagonal().sum()
    found, failed = inverse_by_blocks(M.clone(), 1e-3)
    assert failed.tolist() == [False, True]
    assert relative_error(found[1], torch.eye(80) / (trace + 1e-3)) < 1e-6
    assert relative_error(found[0] @ (M[0] + 1e-3 * torch.eye(80)), torch.eye(80)) < 1e-2


def test_what_is_not_finite_stays_so_and_is_no_failure() -> None:
    M = covariance(80, 0.5)
    M[1, 70, 70] = torch.nan
    found, failed = inverse_by_blocks(M, 0.1)
    assert failed.tolist() == [False, False]
    assert found[0].isfinite().all()
    assert not found[1].isfinite().all()
