"""The one loop: the textbook's iterates in either inner product, and stops that hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import relative_error, textbook_cg
from proxprop.solvers import FEATURE, SAMPLE
from proxprop.solvers.conjugate_gradients import ConjugateGradients, Iterate, normalize
from solvers.systems import problem, sizes

PER_OUTPUT, FLAT = (-2,), (-3, -2, -1)
BOTH = pytest.mark.parametrize("space", [SAMPLE, FEATURE])


def loop(
    space: str,
    A: Tensor,
    G: Tensor,
    iterations: int,
    damping: float = 0.7,
    dims: tuple[int, ...] = PER_OUTPUT,
) -> Iterate:
    """Its iterate, with D as the solution in sample space too."""
    damped = A.new_full((1, 1, 1), damping)
    if space == FEATURE:
        return ConjugateGradients((A.mT @ A).matmul, A.mT @ G, damped, iterations, dims).solve()
    K = A @ A.mT
    diagonal = K.diagonal(dim1=-2, dim2=-1)[..., None]
    found = ConjugateGradients(K.matmul, G, damped, iterations, dims, diagonal).solve()
    return found._replace(solution=A.mT @ found.solution)


def textbook(A: Tensor, G: Tensor, iterations: int, damping: float = 0.7, flat: bool = False) -> Tensor:
    """Column by column, or of the whole layer as one vector."""
    groups, _, features = A.shape
    outputs = G.shape[-1]
    M, B = A.mT @ A + damping * torch.eye(features, dtype=A.dtype), A.mT @ G
    if flat:
        whole = torch.block_diag(*(M[group] for group in range(groups) for _ in range(outputs)))
        stacked = textbook_cg(whole, B.mT.reshape(-1), iterations)
        return stacked.view(groups, outputs, features).mT
    columns = [
        textbook_cg(M[group], B[group, :, column], iterations)
        for group in range(groups)
        for column in range(outputs)
    ]
    return torch.stack(columns).view(groups, outputs, features).mT


@BOTH
@given(sizes=sizes, seed=st.integers(0, 2**31), iterations=st.integers(1, 8), flat=st.booleans())
def test_the_iterates_are_the_textbooks(space, sizes, seed, iterations, flat) -> None:
    A, G = problem(sizes, seed)
    iterations = min(
        iterations, sizes[1], sizes[2]
    )  # after as many steps as unknowns, the textbook divides noise
    found = loop(space, A, G, iterations, dims=FLAT if flat else PER_OUTPUT).solution
    assert relative_error(found, textbook(A, G, iterations, flat=flat)) < 1e-8


@BOTH
@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e150])
def test_the_size_of_the_right_hand_side_does_not_matter(space: str, size: float) -> None:
    A, G = problem((2, 9, 7, 4), seed=0)
    found = loop(space, A, size * G, iterations=4).solution
    assert relative_error(found / size, loop(space, A, G, iterations=4).solution) < 1e-12


@BOTH
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_a_zero_column_stays_exactly_zero(space: str, iterations: int) -> None:
    A, G = problem((2, 9, 7, 4), seed=0)
    expected = loop(space, A, G, iterations).solution
    G[0, :, 1] = 0.0
    found, lost, stuck = loop(space, A, G, iterations)
    assert not found[0, :, 1].any()
    assert relative_error(found[1], expected[1]) < 1e-14
    assert lost is None or not lost.any()
    assert stuck is None or not stuck.any()


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_own_column_alone(space: str, value: float) -> None:
    A, G = problem((2, 9, 7, 4), seed=0)
    expected = loop(space, A, G, iterations=5).solution
    G[1, 3, 2] = value
    found = loop(space, A, G, iterations=5).solution
    spoilt = found.isfinite().logical_not().any(-2)
    assert spoilt.nonzero().tolist() == [[1, 2]]
    assert relative_error(found.mT[~spoilt], expected.mT[~spoilt]) < 1e-14


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_column_that_has_stopped_stays_where_it_is(space: str, dtype: torch.dtype) -> None:
    """Eight eigenvalues: nothing but rounding is left after as many steps, whatever the number asked for."""
    A, G = problem((1, 8, 30, 5), seed=0, dtype=dtype)
    A, G = A.repeat(1, 4, 1), problem((1, 32, 1, 5), seed=1, dtype=dtype)[1]
    stopped = loop(space, A, G, iterations=20).solution
    for iterations in (21, 40, 300):
        assert torch.equal(loop(space, A, G, iterations).solution, stopped)
    exact = torch.linalg.solve(A.mT @ A + 0.7 * torch.eye(30, dtype=dtype), A.mT @ G)
    assert relative_error(stopped, exact) < torch.finfo(dtype).eps ** 0.5  # all that ⟨ρ, Kρ⟩ can tell


def test_steps_along_curvatures_below_the_rounding_of_S_are_flagged() -> None:
    A, G = problem((2, 20, 8, 3), seed=0, dtype=torch.float32)
    A[1] *= torch.logspace(0, -6, 8)
    lost = loop(FEATURE, A, G, iterations=30, damping=1e-9).lost
    assert lost.any(-1).flatten().tolist() == [False, True]


def nearly_unreached() -> tuple[Tensor, Tensor]:
    """A of low rank, and a G in the null space of K but for so little that rounding of ⟨G, KG⟩ hides it."""
    A, G = problem((1, 30, 4, 20), seed=1)
    return A, 1e-5 * G + G - A @ torch.linalg.lstsq(A, G).solution


@pytest.mark.parametrize("iterations", [1, 2, 5, 30])
def test_what_hides_below_the_rounding_of_K_is_flagged(iterations: int) -> None:
    A, G = nearly_unreached()
    assert bool(loop(SAMPLE, A.float(), G.float(), iterations).lost.all())


@pytest.mark.parametrize("iterations", [1, 2, 5, 30])
@pytest.mark.parametrize("damping", [1e-6, 1.0])
def test_noise_takes_no_step_uphill(iterations: int, damping: float) -> None:
    A, G = (X.float() for X in nearly_unreached())
    D = loop(SAMPLE, A, G, iterations, damping).solution
    assert bool(((A.mT.double() @ G.double()) * D.double()).sum(-2).gt(0).all())


def flagged(found: Iterate) -> bool:
    return found.lost is not None and bool(found.lost.any())


@BOTH
def test_nothing_is_flagged_where_rounding_is_harmless(space: str) -> None:
    A, G = problem((3, 20, 30, 4), seed=0, dtype=torch.float32)
    for iterations in (1, 3, 10, 40):
        assert not flagged(loop(space, A, G, iterations))


@BOTH
def test_the_arguments_are_left_alone_and_a_result_can_be_written_in_place(space: str) -> None:
    A, G = problem((2, 6, 6, 4), seed=0)
    M, before = A @ A.mT, G.clone()
    diagonal = M.diagonal(dim1=-2, dim2=-1)[..., None] if space == SAMPLE else None
    damping, out = G.new_ones(1, 1, 1), torch.empty_like(G)
    written = ConjugateGradients(M.matmul, G, damping, 4, PER_OUTPUT, diagonal, out).solve()
    fresh = ConjugateGradients(M.matmul, G, damping, 4, PER_OUTPUT, diagonal).solve()
    assert written.solution is out
    assert torch.equal(out, fresh.solution)
    assert torch.equal(G, before)


def test_columns_are_brought_to_one_and_zeros_left_alone() -> None:
    B = torch.tensor([[[0.0, 3e30, -2e-30], [0.0, 1e30, 1e-30]]])
    normal, scale = normalize(B, (-2,))
    assert torch.equal(normal.abs().amax(-2), torch.tensor([[0.0, 1.0, 1.0]]))
    torch.testing.assert_close(normal * scale, B)
