"""Products of stacked terms, and inverses made of them."""

import pytest
import torch

from cases import relative_error
from kernels.interpreter import interpreted

pytest.importorskip("triton")
from proxprop import device, tuning
from proxprop.solvers.block_inverse import BlockInverse
from proxprop.solvers.stacked_terms import Stack, add_product, by_columns, by_rows, product

pytestmark = interpreted


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take Triton's way on a CPU too."""
    monkeypatch.setattr(device, "use_triton", lambda array: array.dtype == torch.float32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_terms_add_up_and_are_stacked_along_the_dimension_of_sums() -> None:
    X = random(2, 3, 5)
    for found, dim in ((by_rows(X, 2.0**10), 1), (by_columns(X, 2.0**10), 2)):
        high, low, again = found.first.chunk(3, dim)
        assert torch.equal(again, high)
        assert torch.equal(found.last, torch.cat([low, high, high], dim))
        assert relative_error((high.double() + low.double()) / 2**10, X.double()) < 2.0**-21


@pytest.mark.parametrize("wide", [False, True])
def test_products_are_as_accurate_as_float32s(wide: bool) -> None:
    left, right = random(2, 40, 33), random(2, 33, 1100 if wide else 17, seed=1)
    stacks: tuple[Stack, Stack] = by_columns(left, 4.0), by_rows(right, 2.0**12)
    expected = left.double() @ right.double()
    assert relative_error(product(*stacks).double(), expected) < 1e-6
    total = torch.ones_like(expected, dtype=torch.float32)
    add_product(total, *stacks, sign=-1.0)
    assert relative_error(1 - total.double(), expected) < 1e-6
    add_product(total, *stacks)
    assert float((total - 1).abs().max()) < 1e-5


def test_columns_and_the_transpose_are_those_of_the_matrix() -> None:
    X = random(2, 8, 40)
    stack = by_rows(X, 4.0)
    expected = X.double()[..., 3:10].mT @ X.double()[..., 20:]
    assert relative_error(product(stack.columns(3, 10).mT, stack.columns(20)).double(), expected) < 1e-6


def test_parts_of_a_matrix_need_no_copy() -> None:
    X = random(2, 30, 40)[:, 3:20, 10:30]
    assert not X.is_contiguous()
    assert torch.equal(by_rows(X, 4.0).first, by_rows(X.contiguous(), 4.0).first)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_inverses_in_terms_are_as_accurate_as_float32s(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CHOLESKY_BLOCK", 32)
    A = random(2, 200, 70).double() * torch.logspace(0, -3, 70, dtype=torch.float64)
    M = A.mT @ A * scale
    damping = 0.01 * float(M[0].diagonal().mean())
    expected = torch.linalg.inv(M + damping * torch.eye(70, dtype=M.dtype))
    library = torch.cholesky_inverse(torch.linalg.cholesky(M.float() + damping * torch.eye(70)))
    found = BlockInverse(M.float(), damping)
    inverse, factor = found.inverse().double(), found.inverse_factor().double()
    bound = 4 * relative_error(library.double(), expected)
    assert relative_error(inverse, expected) < bound
    assert relative_error(factor.mT @ factor, expected) < bound
    assert found.failed.tolist() == [False, False]
