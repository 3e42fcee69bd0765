"""Inverses by blocks, here on a CPU, where products are plain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import relative_error
from proxprop import tuning
from proxprop.solvers.block_inverse import BlockInverse


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "CHOLESKY_BLOCK", 32)
        yield


def gram(groups: int, size: int, seed: int = 0) -> Tensor:
    """Gram matrices of features whose scales differ a millionfold."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, 2 * size, size, generator=generator, dtype=torch.float64)
    A *= torch.logspace(3, -3, size, dtype=torch.float64)
    return A.mT @ A


def shifted(M: Tensor, damping: float) -> Tensor:
    return M + damping * torch.eye(M.shape[-1], dtype=M.dtype)


@given(st.integers(1, 3), st.integers(1, 110), st.integers(0, 2**31))
def test_the_inverse_and_its_factor_are_exact(groups: int, size: int, seed: int) -> None:
    M = gram(groups, size, seed)
    expected = torch.linalg.inv(shifted(M, 0.5))
    found = BlockInverse(M.clone(), 0.5)
    factor = found.inverse_factor()
    assert relative_error(found.inverse(), expected) < 1e-9
    assert relative_error(factor.mT @ factor, expected) < 1e-9
    assert not factor.triu(1).any()
    assert not found.failed.any()


@given(st.integers(1, 110))
def test_the_solution_is_exact(size: int) -> None:
    M = gram(2, size)
    B = M[..., :3]
    assert (
        relative_error(BlockInverse(M.clone(), 0.5).solve(B), torch.linalg.solve(shifted(M, 0.5), B)) < 1e-9
    )


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scales_cost_no_digits(scale: float) -> None:
    """Of features that are far apart, too."""
    M = gram(1, 70) * scale
    expected = torch.linalg.inv(shifted(M, 1e-3 * scale))
    found = BlockInverse(M.float(), 1e-3 * scale)
    assert relative_error(found.inverse().double(), expected) < 1e-4
    assert not found.failed.any()


def test_a_failure_gives_a_step_that_cannot_overshoot_and_leaves_other_groups_alone() -> None:
    M = gram(2, 70)
    M[0, 40, 40] = -1.0
    found, bound = BlockInverse(M.clone(), 0.5), 0.5 + M[0].trace()
    inverse, factor = found.inverse(), found.inverse_factor()
    assert found.failed.tolist() == found.broken.tolist() == [True, False]
    identity = torch.eye(70, dtype=M.dtype)
    assert torch.allclose(inverse[0], identity / bound, rtol=1e-12)
    assert torch.allclose(factor[0], identity / bound.sqrt(), rtol=1e-12)
    assert relative_error(inverse[1], torch.linalg.inv(shifted(M[1], 0.5))) < 1e-9


def test_a_repeated_feature_without_damping_fails() -> None:
    A = torch.randn(200, 70, generator=torch.Generator().manual_seed(0))
    A[:, 50] = A[:, 10]
    found = BlockInverse((A.mT @ A)[None], 0.0)
    assert found.failed.tolist() == [True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_and_is_no_failure(value: float) -> None:
    M = gram(1, 70)
    M[0, 5, 5] = value
    found = BlockInverse(M, 0.5)
    assert not found.inverse().isfinite().any()
    assert not found.inverse_factor().isfinite().any()


def test_a_matrix_is_left_as_it_was() -> None:
    M = gram(2, 70)
    before = M.clone()
    BlockInverse(M, 0.5).inverse()
    assert torch.equal(M, before)
