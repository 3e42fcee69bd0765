"""The inverse Cholesky factor on a GPU: its solutions, and failures by the rule of all factorisations."""

from math import isnan

import pytest
import torch
from torch import Tensor

from cases import relative_error
from kernels.interpreter import interpreted
from proxprop.solvers.cholesky import LapackFactorization, TritonFactorization, doubtful_share, least_share

pytest.importorskip("triton")
pytestmark = interpreted


def system(groups: int, size: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    A = torch.randn(groups, size, size + 3, generator=generator)
    return A @ A.mT, torch.randn(groups, size, outputs, generator=generator)


@pytest.mark.parametrize(("groups", "size", "outputs"), [(1, 1, 3), (2, 31, 3), (1, 32, 40), (2, 33, 40)])
def test_the_solution_is_that_of_float64(groups: int, size: int, outputs: int) -> None:
    M, B = system(groups, size, outputs)
    damped = M.double() + 0.5 * torch.eye(size, dtype=torch.float64)
    found = TritonFactorization(M, 0.5)
    value, failed = found.prepared(outputs)(B)
    expected = torch.linalg.solve(damped, B.double())
    for solution in (value, found.solve(B), found.inverse() @ B):
        assert solution.shape == B.shape
        assert relative_error(solution.double(), expected) < 1e-4
    assert failed.tolist() == [False] * groups
    inverse = found.inverse_factor().double()
    assert relative_error(inverse @ damped @ inverse.mT, torch.eye(size).expand(groups, -1, -1)) < 1e-4


@pytest.mark.parametrize("entry", [-10.0, torch.nan, torch.inf])
def test_factorisations_fail_where_those_of_lapack_fail(entry: float) -> None:
    M = torch.eye(34).repeat(2, 1, 1)
    M[1, 33, 33] = entry
    B = torch.randn(2, 34, 3, generator=torch.Generator().manual_seed(0))
    found, twin = (kind(M.clone(), 1.0).prepared(3)(B) for kind in (TritonFactorization, LapackFactorization))
    assert found.failed.tolist() == twin.failed.tolist() == [False, not isnan(entry)]
    torch.testing.assert_close(found.value, twin.value, equal_nan=True)


@pytest.mark.parametrize("share", [0.25, 4.0, 100.0])
def test_a_pivot_has_to_be_more_than_rounding_of_its_diagonal_entry(share: float) -> None:
    """Whatever the scale of the matrix; the twin, on a CPU, flags what is doubtful too."""
    M = torch.eye(20).repeat(3, 1, 1)
    M[:, 9, 8] = M[:, 8, 9] = (1 - share * least_share(M)) ** 0.5
    M *= torch.tensor([1e-12, 1.0, 1e12]).view(-1, 1, 1)
    for kind, least in ((TritonFactorization, 1), (LapackFactorization, doubtful_share(M) / least_share(M))):
        assert kind(M.clone(), 1e-30).failed.tolist() == [share < least] * 3
