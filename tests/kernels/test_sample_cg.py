"""Sample-space conjugate gradients on a GPU, against the loop that every other device runs."""

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
from proxprop.kernels import sample_cg as kernel

pytestmark = interpreted


def in_float64(A: Tensor, G: Tensor, damping: float, iterations: int) -> Tensor:
    """D from the loop."""
    A, G = A.double(), G.double()
    return A.mT @ CG(iterations).samples(A @ A.mT, G, damping).value


def solve(
    A: Tensor, G: Tensor, damping: float, iterations: int, terms: int = 3
) -> tuple[Tensor, list[bool] | None]:
    """D from the kernel, and which groups are lost."""
    U, lost = kernel.sample_cg(A @ A.mT, G, damping, iterations, terms)
    return A.double().mT @ U.double(), lost.tolist() if lost is not None else None


@settings(max_examples=5)
@given(
    groups=st.integers(1, 2),
    samples=st.integers(1, 20),
    features=st.integers(1, 24),
    outputs=st.integers(1, 5),
    iterations=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_takes_the_loops_steps(groups, samples, features, outputs, iterations, seed) -> None:
    A, G = problem((groups, samples, features, outputs), seed, torch.float32)
    before = G.clone()
    D, _ = solve(A, G, 0.7, iterations)
    assert torch.equal(G, before), "G is not the kernel's to write to"
    # where K is singular, the loop stops at the rounding of ⟨ρ, Kρ⟩, as float32 has it
    assert relative_error(D, in_float64(A, G, 0.7, iterations)) < 1e-3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_columns_of_any_scale_and_zero_columns_are_solved(scale: float) -> None:
    A, G = problem((1, 6, 9, 4), seed=0, dtype=torch.float32)
    G[..., 1] = 0.0
    D, lost = solve(A, G * scale, 1.0, 3)
    assert not D[..., 1].any()
    assert relative_error(D / scale, in_float64(A, G, 1.0, 3)) < 1e-5
    assert lost == [False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_entries_that_are_not_finite_spoil_only_their_own_column(value: float) -> None:
    A, G = problem((1, 6, 9, 4), seed=0, dtype=torch.float32)
    G[0, 2, 1] = value
    D, _ = solve(A, G, 1.0, 3)
    assert D.isfinite().all(-2).tolist() == [[True, False, True, True]]


@pytest.mark.parametrize(("terms", "rounding"), [(1, 1e-3), (3, 1e-6)])
def test_blocks_of_outputs_have_the_same_solution(terms: int, rounding: float, monkeypatch) -> None:
    A, G = problem((1, 6, 9, 3), seed=0, dtype=torch.float32)
    whole, _ = solve(A, G, 0.7, 2, terms)
    monkeypatch.setattr(tuning, "SAMPLE_CG_MOST_BYTES", 2**9)
    with mock.patch.object(kernel, "_solve", wraps=kernel._solve) as counted:
        D, lost = solve(A, G, 0.7, 2, terms)
    assert counted.call_count > 1
    assert relative_error(D, whole) < rounding
    assert lost == ([False] if terms == 3 else None)


def test_with_an_input_of_zeros_the_solution_is_G_over_the_damping() -> None:
    G = problem((1, 6, 9, 4), seed=0, dtype=torch.float32)[1]
    U, lost = kernel.sample_cg(torch.zeros(1, 6, 6), G, 0.5, 4, terms=3)
    assert relative_error(U, G / 0.5) < 1e-6
    assert lost.tolist() == [False]


def test_one_term_is_as_accurate_as_tf32() -> None:
    A, G = problem((1, 40, 60, 5), seed=0, dtype=torch.float32)
    expected = in_float64(A, G, 0.7, 3)
    coarse, fine = (relative_error(solve(A, G, 0.7, 3, terms)[0], expected) for terms in (1, 3))
    assert fine < 2e-6 < coarse < 2e-3


@pytest.mark.parametrize(("terms", "close"), [(1, 5e-2), (3, 1e-3)])
def test_repeated_rows_may_have_fewer_directions_than_iterations(terms: int, close: float) -> None:
    A, G = problem((1, 4, 12, 3), seed=0, dtype=torch.float32)
    A, G = A.repeat(1, 4, 1), problem((1, 16, 1, 3), seed=1, dtype=torch.float32)[1]
    D, _ = solve(A, G, 1.0, 10, terms)
    assert relative_error(D, in_float64(A, G, 1.0, 10)) < close


def test_activations_with_large_squares_do_not_overflow() -> None:
    A, G = problem((1, 8, 12, 3), seed=0, dtype=torch.float32)
    D, lost = solve(1e10 * A, G, 1.0, 4)
    assert relative_error(D, in_float64(1e10 * A, G, 1.0, 4)) < 1e-4
    assert lost == [False]


def test_a_gram_matrix_that_overflowed_is_flagged() -> None:
    A, G = problem((2, 6, 9, 4), seed=0, dtype=torch.float32)
    A[1] *= 1e20
    D, lost = solve(A, G, 1.0, 3)
    assert lost == [False, True]
    assert relative_error(D[0], in_float64(A, G, 1.0, 3)[0]) < 1e-5


def test_the_kernel_flags_the_groups_that_the_loop_flags() -> None:
    """In one group nearly all of G is in the null space of K."""
    A, G = problem((2, 16, 3, 4), seed=1)
    unreached = G - A @ torch.linalg.lstsq(A, G).solution
    G[1] = unreached[1] + 1e-5 * G[1]
    A, G = A.float(), G.float()
    for iterations in (1, 3):
        expected = CG(iterations).samples(A @ A.mT, G, 1.0).failed
        assert solve(A, G, 1.0, iterations)[1] == expected.tolist() == [False, True]
