"""Constants that are kept for a convolution."""

import threading

import pytest
import torch

from proxprop.transfer.conv_geometry import kept


@pytest.mark.parametrize(("device", "here"), [("cpu", True), ("cuda", False)])
def test_a_constant_is_made_once_and_for_a_gpu_in_another_thread(device: str, here: bool) -> None:
    """Its memory must not be that of CUDA graphs which the calling thread is about to capture."""
    threads = []

    @kept
    def constant(size: int, device: torch.device) -> int:
        threads.append(threading.get_ident())
        return 2 * size

    assert [constant(3, torch.device(device)) for _ in range(2)] == [6, 6]
    assert [thread == threading.get_ident() for thread in threads] == [here]
