"""Feature-space conjugate gradients on a GPU, against the loop that every other device runs."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import relative_error
from kernels.interpreter import interpreted
from proxprop import CG, tuning
from solvers.systems import problem

pytest.importorskip("triton")
from proxprop.kernels import feature_cg as kernel

pytestmark = interpreted
VARIANTS = pytest.mark.parametrize("whole", [True, False], ids=["whole columns", "some rows at a time"])


def solve(
    S: Tensor, B: Tensor, damping: float, iterations: int, whole: bool, width: int = 2048, terms: int = 3
) -> tuple[Tensor, list[bool] | None]:
    """D in blocks of at least `width` outputs, and which groups are spoilt."""
    with mock.patch.multiple(
        tuning,
        FEATURE_CG_WHOLE_ROWS=1024 if whole else 0,
        FEATURE_CG_ROWS=32,
        FEATURE_CG_MOST_NUMBERS=1,
        FEATURE_CG_LEAST_OUTPUTS=width,
    ):
        D, spoilt = kernel.feature_cg(S, B, damping, iterations, terms)
    return D.double(), spoilt.tolist() if spoilt is not None else None


def in_float64(S: Tensor, B: Tensor, damping: float, iterations: int) -> Tensor:
    return CG(iterations).features(S.double(), B.double(), damping).value


@VARIANTS
@settings(max_examples=4)
@given(
    groups=st.integers(1, 2),
    features=st.integers(1, 40),
    outputs=st.integers(2, 6),
    iterations=st.integers(1, 4),
    scale=st.sampled_from([1e-25, 1.0, 1e25]),
    width=st.sampled_from([4, 2048]),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_takes_the_loops_steps(
    whole, groups, features, outputs, iterations, scale, width, seed
) -> None:
    """Also where outputs are solved for in blocks, the last of which has fewer."""
    A, _ = problem((groups, features + 5, features, 1), seed, torch.float32)
    _, B = problem((groups, features, 1, outputs), seed, torch.float32)
    B[..., 0] = 0.0
    D, _ = solve(A.mT @ A, B * scale, 0.7, iterations, whole, width)
    assert relative_error(D / scale, in_float64(A.mT @ A, B, 0.7, iterations)) < 1e-4
    assert not D[..., 0].any()


@VARIANTS
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_entries_that_are_not_finite_spoil_only_their_own_column(whole: bool, value: float) -> None:
    B = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    B[0, 2, 1] = value
    D, _ = solve(torch.eye(6)[None], B, 1.0, 3, whole)
    assert D.isfinite().all(-2).tolist() == [[True, False, True, True]]


@VARIANTS
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_there_may_be_fewer_directions_than_iterations(whole: bool, scale: float) -> None:
    A, G = problem((1, 3, 16, 3), seed=0, dtype=torch.float32)
    A = scale * A
    D, _ = solve(A.mT @ A, A.mT @ G, scale**2, 8, whole)
    assert relative_error(D, in_float64(A.mT @ A, A.mT @ G, scale**2, 8)) < 1e-4


@VARIANTS
def test_the_kernel_flags_the_groups_that_the_loop_flags(whole: bool) -> None:
    """In one group, steps are taken along curvatures below the rounding of S."""
    A, G = problem((2, 20, 8, 3), seed=0, dtype=torch.float32)
    A[1] *= torch.logspace(0, -6, 8)
    S, B = A.mT @ A, A.mT @ G
    expected = CG(10).features(S, B, 1e-9).failed
    assert solve(S, B, 1e-9, 10, whole)[1] == expected.tolist() == [False, True]


@VARIANTS
@pytest.mark.parametrize("scale", [3e18, 1e20])
def test_a_matrix_or_a_curvature_that_overflowed_is_flagged(whole: bool, scale: float) -> None:
    A, G = problem((2, 20, 8, 3), seed=0, dtype=torch.float32)
    A[1] *= scale
    S, B = A.mT @ A, A.mT @ G
    D, spoilt = solve(S, B, 1.0, 3, whole)
    assert spoilt == [False, True]
    assert relative_error(D[0], in_float64(S, B, 1.0, 3)[0]) < 1e-4


@VARIANTS
def test_one_term_is_as_accurate_as_tf32(whole: bool) -> None:
    A, G = problem((1, 40, 16, 3), seed=0, dtype=torch.float32)
    S, B = A.mT @ A, A.mT @ G
    expected = in_float64(S, B, 0.7, 3)
    coarse, fine = (relative_error(solve(S, B, 0.7, 3, whole, terms=p)[0], expected) for p in (1, 3))
    assert fine < 5e-6 < coarse < 5e-3
