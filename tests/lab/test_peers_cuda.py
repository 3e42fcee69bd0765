"""Steps of the peers' benchmark as CUDA graphs; a task that needs torch alone."""

import pytest
import torch

from proxprop.lab.peers import timing
from proxprop.lab.peers.tasks import anisotropic


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", timing.GRAPHED)
def test_a_captured_step_trains(method: str) -> None:
    task = anisotropic.make("anisotropic", "gpu", features=16, width=8, batch=5, steps=4)
    rows, failed = timing.time_task(task, {method: 0}, torch.device("cuda"), ["graph"], rounds=2)
    assert [row["way"] for row in rows] == ["graph"]
    assert not failed
