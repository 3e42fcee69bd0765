"""The blocked factorisation of one large system in a step that is captured in a CUDA graph, here on a CPU."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases import relative_error
from proxprop import Exact, tuning
from proxprop.solvers.block_cholesky import BlockFactorization
from proxprop.solvers.cholesky import factorize


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose as a GPU with fast bfloat16 products does in a captured step, with small blocks."""
    monkeypatch.setattr(tuning, "CHOLESKY_BLOCK", 64)
    with (
        mock.patch("proxprop.device.has_fast_bfloat16", return_value=True),
        mock.patch("proxprop.device.is_captured", return_value=True),
    ):
        yield


def system(groups: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(groups, 103, 200, dtype=torch.float64, generator=generator)
    return A.mT @ A, torch.randn(groups, 200, 7, dtype=torch.float64, generator=generator)


def test_a_captured_step_factorises_one_system_by_blocks(captured: None) -> None:
    assert isinstance(factorize(system()[0], 1.0), BlockFactorization)
    assert not isinstance(factorize(system(groups=2)[0], 1.0), BlockFactorization)


def test_an_eager_step_does_not_factorise_by_blocks() -> None:
    assert not isinstance(factorize(system()[0], 1.0), BlockFactorization)


def test_the_solution_by_blocks_is_exact(captured: None) -> None:
    M, B = system()
    found = Exact().features(M.clone(), B, damping=1.0)
    expected = torch.linalg.solve(M + torch.eye(200, dtype=M.dtype), B)
    assert relative_error(found.value, expected) < 1e-10
    assert found.failed.tolist() == [False]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130])
def test_the_size_need_not_be_a_multiple_of_the_blocks(captured: None, size: int) -> None:
    M, B = (X[:, :size] for X in system())
    M = M[..., :size].contiguous()
    found = BlockFactorization(M.clone(), 1.0)
    assert relative_error(found.solve(B), torch.linalg.solve(M + torch.eye(size, dtype=M.dtype), B)) < 1e-10
