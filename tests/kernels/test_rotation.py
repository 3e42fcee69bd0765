"""The rotation kernel against the plain rotation."""

import pytest
import torch

from cases import relative_error
from kernels.interpreter import interpreted
from proxprop import tuning
from proxprop.solvers.rotation import rotate

pytest.importorskip("triton")
from proxprop.kernels import rotation as kernel

pytestmark = interpreted


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 5, 7), (1, 130, 18), (2, 33, 16)])
def test_the_kernel_rotates_as_torch_does(shape: tuple[int, ...], mean: float) -> None:
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + mean
    expected = rotate(X.double())
    found = kernel.rotate(X)
    assert relative_error(found.double(), expected) < 1e-6
    assert relative_error(found[:, 1:].double(), expected[:, 1:]) < 1e-6, "differences keep their digits"


@pytest.mark.parametrize("layout", ["transposed", "part of rows"])
def test_inputs_may_have_any_layout(layout: str) -> None:
    X = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0))
    X = X.mT if layout == "transposed" else X[..., 2:7]
    assert relative_error(kernel.rotate(X), rotate(X)) < 1e-6


def test_equal_rows_become_zero_except_for_the_first() -> None:
    X = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0)).repeat(1, 7, 1)
    assert float(kernel.rotate(X)[:, 1:].abs().max()) < 1e-15


def test_columns_may_be_longer_than_a_program_holds() -> None:
    X = torch.randn(1, tuning.ROTATION_WHOLE_ROWS + 1, 3, generator=torch.Generator().manual_seed(0))
    assert relative_error(kernel.rotate(X), rotate(X)) < 1e-6
