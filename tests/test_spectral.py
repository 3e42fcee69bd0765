"""Conjugate gradients in an eigenbasis take the steps that they take anywhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import proxprop
from cases import relative_error
from proxprop import CG
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Factored, eigenbasis
from test_spaces import problem, sizes, solve_in

SPACES = pytest.mark.parametrize("space", [SAMPLE, FEATURE])


@contextmanager
def eigenbases(wanted: bool) -> Iterator[None]:
    """Wherever they are possible, or nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigenbasis, "pays", lambda size, iterations, outputs: wanted)
        yield


def in_eigenbasis(space: str, iterations: int, A: Tensor, G: Tensor, damping: float = 1.0) -> Tensor:
    """D, which is not to be had in another way."""
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    with eigenbases(True):
        ready = CG(iterations).prepared(space, M, damping, G.shape[-1])
        assert isinstance(ready, Factored)
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


def steps_and_columns(
    space: str, iterations: int, A: Tensor, G: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The solution in steps, that without them, and the columns for which these were taken all the same."""
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    module, taken = sys.modules[CG.__module__], []

    def solve() -> Tensor:
        return CG(iterations).prepared(space, M, 1.0, G.shape[-1])(right).value

    with eigenbases(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigenbasis, "MOST_POLYNOMIALS", 0)
        in_steps = solve()
    with eigenbases(True), pytest.MonkeyPatch.context() as patch:
        on_diagonal = module.on_diagonal
        patch.setattr(module, "on_diagonal", lambda *args: (taken.append(args[3]), on_diagonal(*args))[1])
        return in_steps, solve(), taken


@SPACES
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
def test_few_steps_need_not_be_taken(space, groups: int, iterations: int) -> None:
    A, G = problem((groups, 40, 30, 600), seed=4)
    expected, found, taken = steps_and_columns(space, iterations, A, G)
    assert not taken
    assert relative_error(found, expected) < 1e-10


@SPACES
@pytest.mark.parametrize("groups", [1, 2])
def test_columns_that_converge_earlier_take_their_steps(monkeypatch, space, groups: int) -> None:
    for name, value in (("FEWEST_OUTPUTS", 4), ("BYTES_IN_USE", 1), ("ALIGNED", 1)):  # in two blocks
        monkeypatch.setattr(sys.modules[CG.__module__], name, value)
    A, G = problem((groups, 20, 30, 7), seed=4)
    _, vectors = torch.linalg.eigh(A @ A.mT)
    G[0, :, 1] = vectors[0, :, 5]  # one step is all
    G[0, :, 2] = vectors[0, :, 3] - vectors[0, :, 7]
    G[0, :, 4] = 0.0
    G[..., 5] = 0.0
    G[-1, :, 6] *= 1e-200
    expected, found, taken = steps_and_columns(space, 3, A, G)
    assert [columns.shape[-1] for columns in taken] == [3]
    for column in range(7):
        assert torch.allclose(found[..., column], expected[..., column], rtol=1e-8, atol=0.0)


@SPACES
def test_where_squares_overflow_all_take_their_steps(space) -> None:
    A, G = problem((1, 20, 30, 7), seed=4)
    G[..., 5] *= 1e200
    expected, found, taken = steps_and_columns(space, 3, A, G)
    assert [columns.shape[-1] for columns in taken] == [7]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("iterations", [2, 4, 6, 10, 12])
def test_equal_eigenvalues_beside_zeros(iterations: int) -> None:
    """No polynomial of a higher degree tells apart what is equal but for rounding; at zero, it would be huge."""
    A, G = problem((1, 60, 20, 9), seed=6)
    A, G = torch.linalg.qr(A.float()).Q, G.float()
    G[..., 4] = 0.0
    expected = solve_in(MATRIX_FREE, CG(iterations), A.double(), G.double(), 1.0)
    found = in_eigenbasis(SAMPLE, iterations, A, G)
    assert relative_error(found.double(), expected) < 1e-5
    assert not found[..., 4].any()


@SPACES
def test_a_gradient_without_the_largest_eigenvector_takes_no_steps(space) -> None:
    """As normalisation of a batch makes it, of activations that have a mean."""
    A, G = problem((1, 100, 200, 50), seed=5)
    A = A + 10.0
    top = torch.linalg.eigh(A @ A.mT).eigenvectors[..., -1:]
    G = G - top @ (top.mT @ G)
    for dtype, close in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        in_steps, found, taken = steps_and_columns(space, 3, A.to(dtype), G.to(dtype))
        assert not taken
        assert relative_error(found, in_steps) < close


@SPACES
def test_right_hand_sides_of_any_layout(space) -> None:
    A, G = problem((1, 20, 30, 7), seed=4)
    for right in (G.mT.contiguous().mT, G[..., :1].expand(-1, -1, 7)):
        expected, found, taken = steps_and_columns(space, 3, A, right)
        assert not taken
        assert relative_error(found, expected) < 1e-10


@SPACES
@pytest.mark.parametrize("iterations", [4, 6, 10])
def test_without_steps_no_conjugacy_is_lost(space, iterations: int) -> None:
    """One large eigenvalue, as the mean of activations makes it: there, recurrences in float32 fall behind."""
    A, G = problem((1, 100, 200, 50), seed=5)
    A, G = (A + 3.0).float(), G.float()
    exact = best_in_krylov_space(A[0].double(), G[0].double(), iterations)
    in_steps, found, taken = steps_and_columns(space, iterations, A, G)
    in_steps, found = (A.mT @ D if space == SAMPLE else D for D in (in_steps, found))
    assert not taken
    assert relative_error(found[0].double(), exact) < min(
        5e-3, relative_error(in_steps[0].double(), exact) / 3
    )


def best_in_krylov_space(A: Tensor, G: Tensor, iterations: int) -> Tensor:
    """Iterates of conjugate gradients at damping 1 in exact arithmetic, from an orthonormal basis of each space."""
    matrix, found = A.mT @ A + torch.eye(A.shape[-1], dtype=A.dtype), []
    for right in (A.mT @ G).mT:
        basis = right[:, None] / right.norm()
        for _ in range(1, iterations):
            basis = torch.linalg.qr(torch.cat((basis, matrix @ basis[:, -1:]), dim=1)).Q
        found.append(basis @ torch.linalg.solve(basis.mT @ matrix @ basis, basis.mT @ right))
    return torch.stack(found, dim=1)


@SPACES
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_outputs_give_what_all_at_once_do(
    monkeypatch: pytest.MonkeyPatch, space, groups: int
) -> None:
    A, G = problem((groups, 6, 8, 19), seed=1)
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    given = right.clone()
    with eigenbases(True):
        whole = CG(4).prepared(space, M, 1.0, 19)(right).value
        batched = torch.vmap(lambda one: CG(4).prepared(space, M, 1.0, 19)(one).value)(right[None])
        small = {"FEWEST_OUTPUTS": 1, "BYTES_IN_USE": 20 * 8 * groups * M.shape[-1], "ALIGNED": 1}
        for name, value in small.items():
            monkeypatch.setattr(sys.modules[CG.__module__], name, value)
        in_blocks = CG(4).prepared(space, M, 1.0, 19)(right).value
    assert relative_error(in_blocks, whole) < 1e-11
    assert relative_error(batched[0], whole) < 1e-11
    assert torch.equal(right, given)


@SPACES
def test_a_solution_can_be_tracked_and_traced(space) -> None:
    A, G = problem((1, 6, 8, 9), seed=1)
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    solve = CG(4).samples if space == SAMPLE else CG(4).features
    with eigenbases(True):
        plain = solve(M, right, 1.0).value
        tracked = solve(M, right.clone().requires_grad_(), 1.0).value
        traced = make_fx(lambda M, right: solve(M, right, 1.0).value)(M, right)
    assert relative_error(tracked, plain) < 1e-12
    assert relative_error(traced(M, right), plain) < 1e-12


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


def test_stand_in_tensors_have_no_eigenvectors_to_look_for() -> None:
    with eigenbases(True), FakeTensorMode(allow_non_fake_inputs=True):
        layer = proxprop.nn.Linear(8, 9, solver=CG(10))
        layer(torch.ones(6, 8)).sum().backward()
    assert layer.weight.grad.shape == (9, 8)


def test_eigenvectors_are_looked_for_where_they_are_fewer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert eigenbasis.pays(size=500, iterations=10, outputs=1000)
    assert eigenbasis.pays(size=500, iterations=3, outputs=4000)
    assert not eigenbasis.pays(size=500, iterations=3, outputs=1000)
    assert not eigenbasis.pays(size=500, iterations=2, outputs=10**6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)  # which have multiplied long before
    assert not eigenbasis.pays(size=500, iterations=10, outputs=4000)
