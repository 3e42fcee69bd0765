"""The space a system is solved in changes the cost, never the answer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cases import relative_error
from proxprop import CG, Exact, tuning
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, ProductSolve
from proxprop.transfer import LinearTransfer
from solvers.systems import problem, sizes, solve_in


@given(sizes=sizes, seed=st.integers(0, 2**31), k=st.integers(1, 10), per_output=st.booleans())
def test_cg_takes_the_same_iterates_in_every_space(sizes, seed, k, per_output) -> None:
    A, G = problem(sizes, seed)
    results = [
        solve_in(space, CG(k, per_output), A, G, damping=1.0) for space in (FEATURE, SAMPLE, MATRIX_FREE)
    ]
    for other in results[1:]:
        assert relative_error(other, results[0]) < 1e-7  # as many steps as unknowns lose some digits


@given(sizes=sizes, seed=st.integers(0, 2**31), log_damping=st.floats(-2, 4))
def test_exact_agrees_in_every_space_and_solves_the_system(sizes, seed, log_damping) -> None:
    A, G = problem(sizes, seed)
    damping = 10**log_damping
    D = solve_in(FEATURE, Exact(), A, G, damping)
    assert relative_error(solve_in(SAMPLE, Exact(), A, G, damping), D) < 1e-9
    assert relative_error(damping * D + A.mT @ (A @ D), A.mT @ G) < 1e-9


@given(sizes=sizes, seed=st.integers(0, 2**31), space=st.sampled_from([FEATURE, SAMPLE, MATRIX_FREE]))
def test_cg_tends_to_the_exact_direction(sizes, seed, space) -> None:
    A, G = problem(sizes, seed)
    exact = solve_in(FEATURE, Exact(), A, G, damping=1.0)
    assert relative_error(solve_in(space, CG(60), A, G, damping=1.0), exact) < 1e-7


@given(sizes=sizes, seed=st.integers(0, 2**31), space=st.sampled_from([FEATURE, SAMPLE]))
def test_error_shrinks_with_every_step_in_the_systems_own_norm(sizes, seed, space) -> None:
    """The defining property of conjugate gradients: each iterate is the best of a growing subspace."""
    A, G = problem(sizes, seed)
    exact = solve_in(FEATURE, Exact(), A, G, damping=1.0)

    def energy(D: Tensor) -> Tensor:
        error = D - exact
        return (error * error).sum((-2, -1)) + (A @ error).square().sum((-2, -1))

    energies = torch.stack([energy(solve_in(space, CG(k), A, G, 1.0)) for k in range(1, 8)])
    start = energy(torch.zeros_like(exact))
    assert bool((energies.diff(dim=0) <= 1e-12 * start).all())


@pytest.mark.parametrize("space", [SAMPLE, FEATURE, MATRIX_FREE])
@pytest.mark.parametrize("rank", ["equal rows", "zero rows", "more samples than features"])
def test_singular_gram_matrices_stay_finite_and_right_in_float32(space: str, rank: str) -> None:
    """Part of G lies in the null space of K; it must neither reach D nor blow up in many iterations."""
    A, G = problem((2, 40, 5, 3), seed=0, dtype=torch.float32)
    if rank == "equal rows":
        A = A[:, :1].expand_as(A).contiguous()
    elif rank == "zero rows":
        A = torch.zeros_like(A)
    exact = solve_in(FEATURE, Exact(), A.double(), G.double(), damping=1.0)
    for iterations in (1, 5, 20, 50):
        D = solve_in(space, CG(iterations), A, G, damping=1.0)
        assert bool(D.isfinite().all())
    assert relative_error(D.double(), exact) < 2e-3


def test_cg_needs_no_more_steps_than_there_are_eigenvalues() -> None:
    A = torch.diag(torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64))[None]
    G = torch.ones(1, 4, 2, dtype=torch.float64)
    exact = solve_in(FEATURE, Exact(), A, G, damping=0.5)
    for space in (SAMPLE, FEATURE, MATRIX_FREE):
        assert relative_error(solve_in(space, CG(1), A, G, 0.5), exact) > 1e-3
        assert relative_error(solve_in(space, CG(2), A, G, 0.5), exact) < 1e-14


def test_plain_cg_on_the_sample_system_is_another_method() -> None:
    """Guards the reason for the inner product with K: Euclidean CG on K gives other iterates."""
    A, G = problem((1, 8, 12, 2), seed=3)
    ours = solve_in(SAMPLE, CG(3), A, G, damping=1.0)
    other = A.mT @ CG(3).features(A @ A.mT, G, damping=1.0).value
    assert relative_error(other, ours) > 1e-2


@pytest.mark.parametrize("outlier", [1e3, 1e4])
def test_one_large_row_does_not_drown_the_others(outlier: float) -> None:
    """Rounding is measured row by row: a large row that G does not touch is no reason to stop."""
    A, G = problem((1, 64, 200, 10), seed=0, dtype=torch.float32)
    A[:, 3] *= outlier
    G[:, 3] = 0.0
    D = solve_in(SAMPLE, CG(1), A, G, damping=1.0)
    assert relative_error(D.double(), solve_in(FEATURE, CG(1), A.double(), G.double(), 1.0)) < 1e-3


@pytest.mark.parametrize("k", [1, 3])
def test_a_gradient_that_is_nearly_zero_is_still_followed(k: int) -> None:
    """G almost orthogonal to A: D is small, but it descends."""
    A, G = problem((1, 30, 4, 3), seed=1)
    G = G - A @ torch.linalg.lstsq(A, G).solution + 1e-4 * (A @ torch.ones(1, 4, 3, dtype=torch.float64))
    A, G = A.float(), G.float()
    D = solve_in(SAMPLE, CG(k), A, G, damping=1.0)
    assert bool(((A.mT.double() @ G.double()) * D.double()).sum(-2).gt(0).all())


@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_blocks_of_outputs_give_what_a_few_at_a_time_do(space, groups: int, iterations: int) -> None:
    """There are three blocks; a few outputs are few enough numbers to be solved for as columns."""
    A, G = problem((groups, 200, 210, 2 * tuning.CPU_BLOCK_LEAST_OUTPUTS + 1), seed=0)
    assert CG()._width(G) == tuning.CPU_BLOCK_LEAST_OUTPUTS
    given = G.clone()
    few = tuning.CPU_COLUMNS_MOST_NUMBERS // (groups * 210)
    pieces = [
        solve_in(space, CG(iterations), A, some.contiguous(), damping=30.0) for some in G.split(few, -1)
    ]
    assert relative_error(solve_in(space, CG(iterations), A, G, damping=30.0), torch.cat(pieces, -1)) < 1e-11
    assert torch.equal(G, given)


@pytest.mark.parametrize("space", [SAMPLE, FEATURE, MATRIX_FREE])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("iterations", [1, 3])
def test_outputs_may_differ_in_scale_and_be_dead(space: str, groups: int, iterations: int) -> None:
    """A sum of squares that float32 can't hold in one output of one group leaves all others right."""
    scales = torch.tensor([[1.0, 1e-25, 1e25, 1e-3, 0.0, 1e-22], [1e-22, 1.0, 0.0, 1e25, 1e-25, 1e-3]])
    scales = scales[:groups, None]
    A, G = problem((groups, 9, 6, 6), seed=5, dtype=torch.float32)
    D = solve_in(space, CG(iterations), A, G * scales, damping=0.3)
    expected = solve_in(FEATURE, CG(iterations), A.double(), G.double() * scales.double(), damping=0.3)
    for found, right in zip(D.mT.flatten(0, 1), expected.mT.flatten(0, 1), strict=True):
        assert relative_error(found.double(), right) < 1e-5


def test_a_first_step_whose_sums_are_all_rounding_has_a_possible_length() -> None:
    """G in the null space of K: ⟨G, KG⟩ comes out as noise of either sign, the length must not."""
    A, G = problem((1, 30, 4, 50), seed=1)
    G = G - A @ torch.linalg.lstsq(A, G).solution
    K, G = (A @ A.mT).float(), G.float()
    squared = (G * (K @ G)).sum(-2)
    assert bool((squared < 0).any())
    lengths = CG(1).samples(K, G, 0.3).value / G
    assert float(lengths.max()) <= (1 + 1e-5) / 0.3
    assert float(lengths.min()) >= (1 - 1e-5) / (0.3 + float(K.diagonal(dim1=-2, dim2=-1).sum()))


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch's words on what vmap does one by one
@pytest.mark.parametrize("given", ["tracked", "traced", "batched"])
@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
def test_a_solve_can_be_tracked_traced_and_batched(space: str, given: str) -> None:
    A, G = problem((1, 6, 8, 9), seed=1)
    M, right = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    solve = CG(4).samples if space == SAMPLE else CG(4).features
    plain = solve(M, right, 1.0).value
    if given == "tracked":
        found = solve(M, right.clone().requires_grad_(), 1.0).value
    elif given == "traced":
        found = make_fx(lambda M, right: solve(M, right, 1.0).value)(M, right)(M, right)
    else:
        found = torch.vmap(lambda one: solve(M, one, 1.0).value)(right[None])[0]
    assert relative_error(found, plain) < 1e-12


@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
@pytest.mark.parametrize("iterations", [1, 3, 10])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_spoil_their_group_alone(space: str, iterations: int, value: float) -> None:
    A, G = problem((2, 9, 7, 4), seed=0, dtype=torch.float32)
    A[1, 3, 2] = value
    M, B = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    found = (CG(iterations).samples if space == SAMPLE else CG(iterations).features)(M, B, 1.0).value
    assert not found[1].isfinite().all(-2).any()
    assert found[0].isfinite().all()


@pytest.mark.parametrize("iterations", [0, -1])
def test_fewer_than_one_iteration_is_refused(iterations: int) -> None:
    with pytest.raises(ValueError, match=rf"iterations should be at least 1 but is {iterations}"):
        CG(iterations)


@pytest.mark.parametrize("iterations", [True, 2.0, "3"])
def test_iterations_that_are_no_whole_number_are_refused(iterations: object) -> None:
    with pytest.raises(TypeError, match="iterations should be a whole number but is"):
        CG(iterations)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_an_inverse_may_act_on_a_narrow_input_instead_of_the_gradient(bias: bool, transposed: bool) -> None:
    X, G = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 9, dtype=torch.float64)
    shapes = [torch.Size([6, 9] if transposed else [9, 6]), torch.Size([9]) if bias else None]
    transfer = LinearTransfer([X], G, shapes, transposed)
    ready = Exact().prepared(SAMPLE, transfer.sample_gram(), 0.3, outputs=9)
    assert isinstance(ready, ProductSolve)
    expected = transfer.gradient(transfer.from_samples(ready(transfer.to_samples(G)).value))
    right, failed = ready.right(transfer.to_samples(G))
    found = transfer.direction(2.0 * ready.left, right)
    assert transfer.is_narrow()
    assert failed is not None
    assert not failed.any()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or relative_error(ours, 2 * theirs) < 1e-12
