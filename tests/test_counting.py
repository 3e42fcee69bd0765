"""A counter of FLOPs sees all that is done on a GPU: the kernels' plain twins."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import proxprop
from cases import relative_error
from proxprop import CG, Exact, device
from training import handle_of

works = pytest.mark.compatibility
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COUNTING = "Counting FLOPs (`FlopCounterMode`)"


def test_it_is_shown_the_plain_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_triton", lambda: True)
    on_a_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32, dim=lambda: 2)
    assert device.use_triton(on_a_gpu)
    with FlopCounterMode(display=False):
        assert not device.use_triton(on_a_gpu)


@works(COUNTING)
@works(COUNTING, mode="deferred")
@pytest.mark.parametrize("mode", ["immediate", "deferred"])
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("device", "samples", "outputs"), [("cpu", 103, 512), pytest.param("cuda", 1003, 4096, marks=GPU)]
)
def test_a_step_can_be_counted(
    device: str, samples: int, outputs: int, dtype: torch.dtype, close: float, solver: CG | Exact, mode: str
) -> None:
    inputs = 16 * 14 * 14
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(inputs, outputs), nn.Linear(outputs, 10)
    model = proxprop.convert(nn.Sequential(*layers).to(device), solver, tau_theta=1e-4)
    x = torch.randn(samples, 3, 16, 16, device=device)
    if mode == "deferred":
        proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def directions() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
        if mode == "deferred":
            handle_of(model).solve()
        return [p.grad for p in model.parameters()]

    expected = directions()
    with FlopCounterMode(display=False) as counter:
        found = directions()
    assert counter.get_total_flops() > 6 * samples * inputs * outputs  # BackProp's, of the largest layer
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < close
