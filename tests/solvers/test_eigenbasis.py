"""Conjugate gradients in an eigenbasis take the steps that they take anywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import proxprop
from cases import relative_error
from proxprop import CG, tuning
from proxprop.device import is_transformed
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, ProductSolve, eigenbasis
from solvers.systems import problem, sizes, solve_in

SPACES = pytest.mark.parametrize("space", [SAMPLE, FEATURE])


@contextmanager
def eigenbases(wanted: bool) -> Iterator[None]:
    """Wherever they are possible, or nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigenbasis, "pays", lambda M, iterations, outputs: wanted and not is_transformed(M))
        yield


def in_eigenbasis(space: str, iterations: int, A: Tensor, G: Tensor, damping: float = 1.0) -> Tensor:
    """D, which is not to be had in another way."""
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    with eigenbases(True):
        ready = CG(iterations).prepared(space, M, damping, G.shape[-1])
        assert isinstance(ready, ProductSolve)
        found = ready(right).value
    return A.mT @ found if space == SAMPLE else found


@SPACES
@given(sizes=sizes, seed=st.integers(0, 2**31), k=st.integers(1, 10), log_damping=st.floats(-1, 3))
def test_the_iterates_are_those_of_every_other_basis(space, sizes, seed, k, log_damping) -> None:
    A, G = problem(sizes, seed)
    assume(eigenbasis.is_level(A @ A.mT) and eigenbasis.is_level(A.mT @ A))
    expected = solve_in(MATRIX_FREE, CG(k), A, G, 10**log_damping)
    found = in_eigenbasis(space, k, A, G, 10**log_damping)
    assert relative_error(found, expected) < 1e-6  # as many steps as unknowns lose some digits


@SPACES
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("rank", ["full", "equal rows", "zero rows", "more samples than features"])
def test_float32_is_enough_whatever_the_rank_and_the_scale_of_the_gradient(space, rank, scale) -> None:
    A, G = problem((2, 40, 5 if rank == "more samples than features" else 60, 3), seed=0, dtype=torch.float32)
    if rank == "equal rows":
        A = A[:, :1].sign().expand_as(A).contiguous()
    elif rank == "zero rows":
        A = torch.zeros_like(A)
    G[..., 0] = 0.0
    for iterations in (1, 3, 10, 50):
        D = in_eigenbasis(space, iterations, A, scale * G) / scale
        expected = solve_in(MATRIX_FREE, CG(iterations), A.double(), G.double(), 1.0)
        rounding = torch.finfo(torch.float32).eps * A.norm() * G.norm()  # of AᵀU: U is at most G/λ
        assert (D - expected).norm() <= 1e-4 * expected.norm() + rounding
        assert not D[..., 0].any()


@pytest.mark.parametrize("case", ["zero rows", "repeated rows", "more samples than features"])
@pytest.mark.parametrize("share", [1.0, 1e-2])
def test_what_does_not_reach_the_direction_is_no_reason_for_a_step(case: str, share: float) -> None:
    """Eigenvalues that are zero come out as rounding; G has far more of their vectors than of all others."""
    A, G = problem((1, 60, 20 if case == "more samples than features" else 80, 9), seed=2)
    if case == "zero rows":
        A[:, ::4] = 0.0
    elif case == "repeated rows":
        A[:, 30:] = A[:, :30]
    reached = A @ torch.linalg.pinv(A) @ G
    A, G = A.float(), (G - reached + share * reached).float()
    for iterations in (3, 10, 30):
        expected = solve_in(MATRIX_FREE, CG(iterations), A.double(), G.double(), 1.0)
        assert relative_error(in_eigenbasis(SAMPLE, iterations, A, G).double(), expected) < 1e-4 / share


def test_small_eigenvalues_are_not_taken_for_zero() -> None:
    """What is small beside the largest still reaches the direction, where damping is smaller yet."""
    A, G = problem((1, 200, 400, 9), seed=3)
    A = A * torch.logspace(0, -3, 400, dtype=torch.float64) + 1.0
    expected = solve_in(MATRIX_FREE, CG(3), A, G, 0.01)
    assert relative_error(in_eigenbasis(SAMPLE, 3, A.float(), G.float(), 0.01).double(), expected) < 3e-3


def test_an_eigenvalue_that_rounding_hides_may_still_make_much_of_the_direction() -> None:
    """Most rows are zero, so that their mean does not dominate K, and the others differ in their last digits only."""
    torch.manual_seed(0)
    rows = torch.cat([torch.zeros(30, 30), 1 + 1e-3 * torch.randn(18, 30)])
    layer = proxprop.nn.Linear(30, 100, solver=CG(100), tau_theta=0.1, space=SAMPLE)
    G, A = torch.randn(48, 100), torch.cat([rows, torch.ones(48, 1)], dim=1).double()
    G -= 0.5 * (A @ torch.linalg.pinv(A, rtol=1e-2) @ G.double()).float()
    with eigenbases(True):
        layer(rows).backward(G)
    exact = torch.linalg.solve(10 * torch.eye(31) + A.mT @ A, A.mT @ G.double())
    found = torch.cat([layer.weight.grad.mT, layer.bias.grad[None]])
    for one, other in zip(found.double().mT, exact.mT, strict=True):
        assert relative_error(one, other) < 1e-2


@SPACES
@pytest.mark.parametrize("groups", [1, 2])
def test_columns_may_converge_after_a_step_or_two(space, groups: int) -> None:
    A, G = problem((groups, 20, 30, 7), seed=4)
    _, vectors = torch.linalg.eigh(A @ A.mT)
    G[0, :, 1] = vectors[0, :, 5]  # one step is all
    G[0, :, 2] = vectors[0, :, 3] - vectors[0, :, 7]
    G[0, :, 4] = 0.0
    G[-1, :, 6] *= 1e-200
    expected, found = solve_in(MATRIX_FREE, CG(3), A, G, 1.0), in_eigenbasis(space, 3, A, G)
    for one, other in zip(found.mT.flatten(0, 1), expected.mT.flatten(0, 1), strict=True):
        assert relative_error(one, other) < 1e-8


@pytest.mark.parametrize("iterations", [2, 4, 6, 10, 12])
def test_equal_eigenvalues_beside_zeros(iterations: int) -> None:
    A, G = problem((1, 60, 20, 9), seed=6)
    A, G = torch.linalg.qr(A.float()).Q, G.float()
    G[..., 4] = 0.0
    expected = solve_in(MATRIX_FREE, CG(iterations), A.double(), G.double(), 1.0)
    found = in_eigenbasis(SAMPLE, iterations, A, G)
    assert relative_error(found.double(), expected) < 1e-5
    assert not found[..., 4].any()


@SPACES
def test_right_hand_sides_of_any_layout(space) -> None:
    A, G = problem((1, 20, 30, 7), seed=4)
    for right in (G.mT.contiguous().mT, G[..., :1].expand(-1, -1, 7)):
        expected = solve_in(MATRIX_FREE, CG(3), A, right, 1.0)
        assert relative_error(in_eigenbasis(space, 3, A, right), expected) < 1e-10


@SPACES
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_outputs_give_what_a_few_at_a_time_do(space, groups: int) -> None:
    A, G = problem((groups, 200, 210, 2 * tuning.CPU_BLOCK_LEAST_OUTPUTS + 1), seed=1)
    assert CG()._width(G) == tuning.CPU_BLOCK_LEAST_OUTPUTS
    given, pieces = G.clone(), [in_eigenbasis(space, 4, A, some, 30.0) for some in G.split(300, -1)]
    assert relative_error(in_eigenbasis(space, 4, A, G, 30.0), torch.cat(pieces, -1)) < 1e-11
    assert torch.equal(G, given)


@pytest.mark.parametrize("iterations", [1, 2])
def test_rows_of_very_different_size_are_multiplied_instead(iterations: int) -> None:
    """A large row that G does not touch: in the eigenbasis, the others would be within its rounding."""
    A, G = problem((1, 64, 200, 10), seed=0, dtype=torch.float32)
    A[:, 3] *= 1e4
    G[:, 3] = 0.0
    with eigenbases(True):
        D = solve_in(SAMPLE, CG(iterations), A, G, damping=1.0)
    expected = solve_in(MATRIX_FREE, CG(iterations), A.double(), G.double(), 1.0)
    assert relative_error(D.double(), expected) < 1e-2


@pytest.mark.parametrize(
    ("diagonal", "level"),
    [([1.0, 2.0, 0.0], True), ([0.0, 0.0], True), ([1.0, 1e-4], False), ([1.0, torch.nan], False)],
)
def test_rows_are_level_where_all_but_zeros_are_alike(diagonal: list[float], level: bool) -> None:
    assert eigenbasis.is_level(torch.tensor(diagonal).diag()[None]) == level


@SPACES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_and_raises_nothing(space, value) -> None:
    A, G = problem((1, 6, 8, 9), seed=1, dtype=torch.float32)
    A[0, 2, 3] = value
    with eigenbases(True):
        assert not solve_in(space, CG(4), A, G, damping=1.0).isfinite().all()
    A, G = problem((1, 6, 8, 9), seed=1, dtype=torch.float32)
    G[0, 2, 3] = value
    spoilt = in_eigenbasis(space, 4, A, G).isfinite().logical_not().any(-2)[0]
    assert spoilt.nonzero().flatten().tolist() == [3]  # that output alone


@pytest.mark.parametrize("bias", [True, False])
def test_a_network_has_the_same_directions(bias: bool) -> None:
    """Layers that widen and narrow, in sample and in feature space."""
    torch.manual_seed(0)
    x = torch.randn(20, 12, dtype=torch.float64)
    widths = [12, 30, 8, 40, 5]
    layers = [nn.Linear(n, m, bias) for n, m in pairwise(widths)]
    directions = []
    for wanted in (True, False):
        model = proxprop.convert(nn.Sequential(*layers).double(), CG(4), tau_theta=3.0, include_last=True)
        model.zero_grad()
        with eigenbases(wanted):
            model(x).square().sum().backward()
        directions.append([parameter.grad.clone() for parameter in model.parameters()])
        proxprop.revert(model)
    for ours, theirs in zip(*directions, strict=True):
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize(
    ("threads", "iterations", "outputs", "pays"),
    [
        (2, 10, 1000, True),
        (2, 3, 4000, True),
        (2, 3, 1000, False),
        (2, 2, 10**6, False),
        (64, 10, 4000, False),  # so many cores have multiplied long before
    ],
)
def test_eigenvectors_are_looked_for_where_they_are_fewer_products(
    monkeypatch: pytest.MonkeyPatch, threads: int, iterations: int, outputs: int, pays: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert eigenbasis.pays(torch.empty(1, 500, 500), iterations, outputs) == pays


def test_a_basis_that_lapack_does_not_find_is_none() -> None:
    M = torch.ones(1, 3, 3).masked_fill_(~torch.eye(3).bool(), torch.nan)
    assert eigenbasis.is_level(M)
    assert eigenbasis.find(M, "feature") is None


def test_no_eigenvectors_are_looked_for_on_another_device() -> None:
    assert not eigenbasis.pays(torch.empty(1, 500, 500, device="meta"), iterations=10, outputs=10**6)
