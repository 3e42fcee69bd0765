"""Every factorisation gives the float64 solution, and all fail by one rule and leave one substitute."""

from collections.abc import Callable
from math import isnan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import relative_error
from proxprop import Exact, device, tuning
from proxprop.solvers import FEATURE, ProductSolve
from proxprop.solvers.block_cholesky import BlockFactorization
from proxprop.solvers.block_inverse import BlockInverse
from proxprop.solvers.cholesky import (
    LEAST_PIVOT,
    Factorization,
    LapackFactorization,
    backend,
    factorize,
    factorize_whole,
    least_share,
)

FACTORIZATIONS = pytest.mark.parametrize("factorization", [LapackFactorization, BlockFactorization])
"""Under Triton's interpreter, tests/kernels/test_cholesky.py holds the third to the same."""

Make = Callable[[Tensor, float], Factorization]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CHOLESKY_BLOCK", 32)


def system(
    size: int, outputs: int, seed: int = 0, dtype: torch.dtype = torch.float64, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """M of half its rank, and B."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, size // 2 + 3, size, dtype=torch.float64, generator=generator)
    B = torch.randn(groups, size, outputs, dtype=torch.float64, generator=generator)
    return (A.mT @ A).to(dtype), B.to(dtype)


def exact(M: Tensor, B: Tensor, damping: float) -> Tensor:
    return torch.linalg.solve(M.double() + damping * torch.eye(M.shape[-1], dtype=torch.float64), B.double())


@FACTORIZATIONS
@given(
    size=st.integers(1, 100),
    outputs=st.integers(1, 20),
    tau_theta=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_the_solution_is_that_of_float64(factorization, size, outputs, tau_theta, dtype, seed) -> None:
    M, B = system(size, outputs, seed, dtype)
    condition = 1 + tau_theta * float(M.double().diagonal(dim1=-2, dim2=-1).sum())
    found = factorization(M.clone(), 1 / tau_theta)
    if bool(found.failed.any()):
        assert condition * torch.finfo(dtype).eps > 1e-3
        return
    close = 10 * condition * torch.finfo(dtype).eps
    assert relative_error(found.solve(B).double(), exact(M, B, 1 / tau_theta)) < close
    if isinstance(found, LapackFactorization):
        identity = torch.eye(size, dtype=dtype)[None]
        assert relative_error(found.inverse().double(), exact(M, identity, 1 / tau_theta)) < close


@FACTORIZATIONS
def test_the_right_hand_side_is_left_alone(factorization: Make) -> None:
    M, B = system(50, 7)
    before = B.clone()
    factorization(M, 1.0).prepared(7)(B)
    assert torch.equal(B, before)


@FACTORIZATIONS
@pytest.mark.parametrize("outputs", [1, 100])
@pytest.mark.parametrize("place", [0, 40, 69])
@pytest.mark.parametrize("entry", [-50.0, torch.nan, torch.inf])
def test_one_rule_for_failure(factorization: Make, outputs: int, place: int, entry: float) -> None:
    """The gradient over an upper bound of the spectrum; where M is not finite, neither is the solution.

    NaN came with the inputs and is not flagged.
    """
    M, B = system(70, outputs)
    M[0, place, place] = entry
    bound = 0.5 + float(M.diagonal(dim1=-2, dim2=-1).sum())
    value, failed = factorization(M, 0.5).prepared(outputs)(B)
    assert failed.tolist() == [not isnan(entry)]
    if entry == -50.0:
        assert relative_error(value, B / bound) < 1e-12
    else:
        assert bool(value.isnan().all())


@FACTORIZATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [1, 45])
@pytest.mark.parametrize("share", [0.25, 4.0, 100.0])
def test_a_pivot_has_to_be_more_than_rounding_of_its_diagonal_entry(
    factorization: Make, dtype: torch.dtype, place: int, share: float
) -> None:
    """`[[1, c], [c, 1]]` with `c² = 1 − pivot` in an identity; both scaled, because the rule has no scale.

    A CPU flags a doubtful matrix too, and keeps the factor; only tests factorise by blocks on a CPU.
    """
    M, B = torch.eye(50, dtype=dtype)[None], torch.ones(1, 50, 1, dtype=dtype)
    pivot = share * LEAST_PIVOT * torch.finfo(dtype).eps * 50**0.5
    assert least_share(M) == pytest.approx(pivot / share)
    M[0, place, place - 1] = M[0, place - 1, place] = (1 - pivot) ** 0.5
    for scale in (1e-12, 1.0, 1e12):
        found = factorization(M * scale, 1e-30)
        assert found.failed.tolist() == [share < 100.0]
        substituted = relative_error(found.solve(B), B / (50 * scale)) < 1e-3
        assert substituted == (share < (1 if factorization is LapackFactorization else 100.0))


@pytest.mark.parametrize("size", [200, 600, 1500])
@pytest.mark.parametrize("ratio", [10, 900, 4e3, 8e3])
def test_a_cpu_flags_a_matrix_whose_pivots_suffice_but_whose_condition_does_not(
    size: int, ratio: float
) -> None:
    """Equal columns: no pivot is far below its diagonal entry, but all of them together are far above λ."""
    torch.manual_seed(0)
    A = torch.ones(24, size)
    M, B = (A.mT @ A)[None], (A.mT @ torch.randn(24, 4))[None]
    found = LapackFactorization(M.clone(), 24 / ratio)
    error = relative_error(found.solve(B).double(), exact(M, B, 24 / ratio))
    assert not found.broken
    assert bool(found.failed) or error < 0.1
    assert not bool(found.failed) or size * ratio > 2e5


def test_a_failure_in_one_group_leaves_the_others_alone() -> None:
    M, B = system(20, 4, groups=3)
    expected = exact(M, B, 0.5)
    M[1, 7, 7] = -50.0
    bound = 0.5 + float(M[1].diagonal().sum())
    for outputs in (4, 40):
        value, failed = factorize(M.clone(), 0.5).prepared(outputs)(B)
        assert failed.tolist() == [False, True, False]
        assert relative_error(value[::2], expected[::2]) < 1e-9
        assert relative_error(value[1], B[1] / bound) < 1e-12


def test_many_outputs_are_multiplied_by_the_inverse() -> None:
    M, _ = system(20, 4)
    assert isinstance(Exact().prepared(FEATURE, M.clone(), 1.0, outputs=20), ProductSolve)
    assert not isinstance(Exact().prepared(FEATURE, M.clone(), 1.0, outputs=19), ProductSolve)


def test_an_inverse_factor_is_one() -> None:
    M, _ = system(20, 4)
    inverse = LapackFactorization(M.clone(), 0.5).inverse_factor()
    assert relative_error(inverse.mT @ inverse, exact(M, torch.eye(20)[None], 0.5)) < 1e-9
    assert torch.equal(inverse, inverse.tril())


def test_a_block_is_not_cut_into_blocks_where_its_kernel_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "use_triton", lambda M: True)
    monkeypatch.setattr(device, "use_fp16_products", lambda M: False)
    monkeypatch.setattr(tuning, "TRITON_CHOLESKY_MOST_ROWS", 0)
    for size, kind in [(32, LapackFactorization), (33, BlockInverse)]:
        M, _ = system(size, 1, groups=2)
        assert type(factorize_whole(M.clone(), 0.5)) is kind


def test_a_cpu_takes_lapack() -> None:
    assert backend(torch.empty(1, 4, 4)) == "lapack"
