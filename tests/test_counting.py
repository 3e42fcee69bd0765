"""A counter of FLOPs, or any other mode of torch's, sees all that is done on a GPU: the kernels' twins."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import proxprop
from cases import relative_error
from proxprop import CG, Exact, kernels


def test_it_is_shown_the_plain_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_found", lambda: True)
    on_a_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert kernels.take(on_a_gpu)
    with FlopCounterMode(display=False):
        assert not kernels.take(on_a_gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_a_step_on_a_gpu_can_be_counted(dtype: torch.dtype, close: float, solver: CG | Exact) -> None:
    inputs, outputs = 16 * 14 * 14, 4096
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(inputs, outputs), nn.Linear(outputs, 10)
    model = proxprop.convert(nn.Sequential(*layers).cuda(), solver, tau_theta=1e-4)
    x = torch.randn(1003, 3, 16, 16, device="cuda")

    def directions() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters()]

    expected = directions()
    with FlopCounterMode(display=False) as counter:
        found = directions()
    assert counter.get_total_flops() > 6 * len(x) * inputs * outputs
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < close
