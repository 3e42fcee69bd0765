"""Rules about devices: which kernels run, and in how many terms numbers are multiplied."""

import pytest
import torch

from proxprop import CG, device
from proxprop.backward import Task
from proxprop.failures import FailureWarner
from proxprop.settings import Settings
from proxprop.transfer import LayerCall, LinearTransfer


def test_triton_is_not_used_on_a_cpu() -> None:
    assert not device.use_triton(torch.zeros(1, 4, 4))


@pytest.mark.parametrize(("dtype", "terms"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_bfloat16_layers_are_solved_in_fewer_terms(dtype: torch.dtype, terms: int) -> None:
    x, seen = torch.randn(5, 3, dtype=dtype), []

    class Looking(CG):
        def samples(self, K, G, damping):
            seen.append(device.fp16_terms())
            return super().samples(K, G, damping)

    settings = Settings(Looking(), space="sample")
    task = Task(LayerCall(LinearTransfer), settings, "layer", FailureWarner(), None, inputs=1)
    G = torch.randn(5, 4, dtype=dtype)
    task._solve(
        LinearTransfer([x], G, [torch.Size([4, 3]), None]), G
    )  # a CPU would otherwise be given float32
    assert seen == [terms]
    assert device.fp16_terms() == 3
