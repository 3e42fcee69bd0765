"""Running averages take in a step in one pass."""

import pytest
import torch

from kernels.interpreter import interpreted

pytest.importorskip("triton")
from proxprop.kernels import averaging

pytestmark = interpreted


def test_an_average_is_scaled_and_added_to_unless_it_is_left_out() -> None:
    held = [torch.randn(3, 70, 50, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    new = [torch.randn(3, 70, 50, generator=torch.Generator().manual_seed(10 + i)) for i in range(3)]
    new[1][2, 3, 4] = torch.nan
    left_out = torch.tensor([False, True, False])
    expected = [held[0] * 0.9 + new[0], held[1].clone(), held[2] * 0.9 + new[2]]
    for index, (average, summed) in enumerate(zip(held, new, strict=True)):
        averaging.take_in(average, summed, left_out, index, 0.9)
    torch.testing.assert_close(held, expected)
