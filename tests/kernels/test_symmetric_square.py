"""`AᵀA` of 16-bit numbers by tiles, each of which is summed once for both of its places.

The interpreter multiplies float16 alone; `tests/solvers/test_matmul.py` has bfloat16, on a GPU.
"""

import pytest
import torch
from torch import Tensor

from cases import relative_error
from kernels.interpreter import interpreted

pytest.importorskip("triton")
from proxprop import tuning
from proxprop.kernels import symmetric_square

pytestmark = interpreted


@pytest.fixture(autouse=True)
def few_rows_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(tuning, "SQUARE_TILE", 32)
    monkeypatch.setattr(tuning, "SQUARE_DEPTH", 16)
    monkeypatch.setattr(tuning, "SQUARE_ADDED_ROWS", 8)
    monkeypatch.setattr(tuning, "SQUARE_PART_ROWS", 1)


def squared(A: Tensor, ones: bool) -> Tensor:
    A = A.double()
    A = torch.cat([A, A.new_ones(len(A), 1)], 1) if ones else A
    return A.mT @ A


@pytest.mark.parametrize("programs", [1, 12])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize(("samples", "features"), [(50, 40), (64, 64), (33, 100), (2, 7), (70, 33)])
def test_a_square_by_tiles_is_the_product(
    samples: int, features: int, ones: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_square, "multiprocessors", lambda array: programs)
    A = (torch.randn(samples, features, generator=torch.Generator().manual_seed(0)) + 1).half()
    S, expected = symmetric_square.transposed_square(A, ones, dense=True), squared(A, ones)
    assert S.is_contiguous()
    assert S.dtype == torch.float32
    assert relative_error(S.double(), expected) < 1e-6
    aligned = symmetric_square.transposed_square(A, ones, dense=False)
    assert aligned.stride(0) % tuning.ALIGNED == 0
    assert torch.equal(aligned, S)


def test_rows_may_lie_apart_or_across(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_square, "multiprocessors", lambda array: 1)
    wide = torch.randn(40, 90, generator=torch.Generator().manual_seed(0)).half()
    for A in (wide[:, 3:50], wide.mT):
        assert (
            relative_error(symmetric_square.transposed_square(A, True, True).double(), squared(A, True))
            < 1e-6
        )


def test_what_is_not_finite_reaches_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_square, "multiprocessors", lambda array: 4)
    A = torch.ones(40, 40).half()
    A[3, 35] = torch.nan
    broken = symmetric_square.transposed_square(A, True, True).isnan()
    assert broken[35].all()
    assert broken[:, 35].all()
    assert broken.sum() == 2 * 41 - 1


def test_few_tiles_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SQUARE_PART_ROWS", 700)
    assert symmetric_square.parts_of(8192, pairs=264, programs=132) == 1
    assert symmetric_square.parts_of(8192, pairs=21, programs=132) > 4
    assert symmetric_square.parts_of(15, pairs=1, programs=132) == 1
