"""Where layers are small, a step is calls: no more of torch's and of ours for a layer than it needs.

Bounds are a few calls above what is needed. They count what another layer adds to a step: a step of 24 layers less one
of 12, so that what is called once a step does not count.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import proxprop
from calls import torch_calls
from proxprop import Exact, Running

PACKAGE = str(Path(proxprop.__file__).parent)
OBSERVED, RESTING = Running(update_every=1, invert_every=1000), Running(update_every=1000, invert_every=1000)
INVERTING = Running(update_every=1, invert_every=1)


def trained(layers: int, running: Running | None, bias: bool = True) -> Callable[[], None]:
    """A step of a network of small layers; without proxprop if nothing is averaged."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(layers)))
    if running is not None:
        model = proxprop.convert(model, Exact(), include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    if running is not None:
        proxprop.attach(optimizer, model, running=running)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    step()  # sets S up, and makes the inverses
    return step


def own_calls(step: Callable[[], None]) -> int:
    """How many Python functions of the package are called."""
    step()
    found = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    threading.setprofile(trace)  # autograd may call backward from a thread of its own
    sys.setprofile(trace)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def per_layer(
    count: Callable[[Callable[[], None]], int], running: Running | None, bias: bool = True
) -> float:
    return (count(trained(24, running, bias)) - count(trained(12, running, bias))) / 12


@pytest.mark.parametrize(
    ("running", "bias", "most"),
    [(OBSERVED, True, 68), (OBSERVED, False, 69), (RESTING, True, 18), (INVERTING, True, 132)],
)
def test_a_layer_takes_few_calls_of_ours(running: Running, bias: bool, most: int) -> None:
    assert 0 < per_layer(own_calls, running, bias) <= most


@pytest.mark.parametrize(
    ("running", "bias", "most"),
    [(OBSERVED, True, 8), (OBSERVED, False, 10), (RESTING, True, 0), (INVERTING, True, 11)],
)
def test_a_layer_takes_few_calls_of_torch_beside_its_own(running: Running, bias: bool, most: int) -> None:
    assert per_layer(torch_calls, running, bias) - per_layer(torch_calls, None, bias) <= most
