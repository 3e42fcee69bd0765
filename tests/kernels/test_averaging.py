"""Running averages take in a step in one pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.interpreter import interpreted

pytest.importorskip("triton")
from proxprop import device, tuning
from proxprop.deferred.average import update
from proxprop.deferred.equation import Term
from proxprop.kernels import averaging

pytestmark = interpreted


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_an_average_is_scaled_and_added_to_unless_it_is_left_out() -> None:
    held = [random(3, 70, 50, seed=i) for i in range(3)]
    new = [random(3, 70, 50, seed=10 + i) for i in range(3)]
    new[1][2, 3, 4] = torch.nan
    left_out = torch.tensor([False, True, False])
    expected = [held[0] * 0.9 + new[0], held[1].clone(), held[2] * 0.9 + new[2]]
    for index, (average, summed) in enumerate(zip(held, new, strict=True)):
        averaging.take_in(average, summed, left_out, index, 0.9)
    torch.testing.assert_close(held, expected)


def term(equation: Any, S: Tensor, counted: float) -> Term:
    return Term(equation, S, torch.tensor(counted, dtype=S.dtype))


def test_a_step_is_taken_in_as_torch_takes_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its sums are like: large and small, laid out otherwise, not finite; the plain way in float64."""
    equation: Any = SimpleNamespace(ones=False)
    sizes = [(1, 40, 40), (2, 30, 30), (1, 3, 3), (1, 40, 40), (1, 40, 40)]
    averages = [term(equation, random(*size, seed=i), 7.0) for i, size in enumerate(sizes)]
    steps = [term(equation, random(*size, seed=10 + i), 3.0 + i) for i, size in enumerate(sizes)]
    steps[3] = steps[3]._replace(S=steps[3].S.mT)
    steps[4].S[0, 5, 6] = torch.inf
    expected = [average.to(torch.float64) for average in averages]
    update([(held, step.to(torch.float64)) for held, step in zip(expected, steps, strict=True)], 0.9)

    taken = list[int]()
    take_in = averaging.take_in
    monkeypatch.setattr(averaging, "take_in", lambda *given: (taken.append(given[3]), take_in(*given)))
    monkeypatch.setattr(device, "use_triton", lambda array: array.dtype == torch.float32)
    monkeypatch.setattr(tuning, "AVERAGED_LEAST_NUMBERS", 100)
    update(list(zip(averages, steps, strict=True)), 0.9)
    assert taken == [0, 1, 4]
    for found, wanted in zip(averages, expected, strict=True):
        for one, other in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    assert torch.equal(averages[4].S, random(*sizes[4], seed=4))
