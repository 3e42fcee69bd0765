"""The way of one step: the files that docs/architecture.md lists are those that a step passes, in one direction."""

import re
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
from proxprop import CG, Exact, Running

PACKAGE = Path(proxprop.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

ROOMS = ("nn", "backward.py", "direction.py", "transfer", "solvers", "kernels")
"""A step goes through these from left to right; every other file of the package answers questions."""

LAYERS = {
    "Linear, CG, sample space": (
        lambda: proxprop.nn.Linear(300, 40, solver=CG(3), space="sample"),
        (50, 300),
    ),
    "Linear, Exact, feature space": (
        lambda: proxprop.nn.Linear(30, 40, solver=Exact(), space="feature"),
        (50, 30),
    ),
    "Conv2d, CG": (lambda: proxprop.nn.Conv2d(3, 8, 3, solver=CG(3)), (16, 3, 16, 16)),
}


STEPS = {"Linear, running averages, observed": 1, "Linear, running averages, resting": 1000}
"""Every how many steps S is summed."""


def file_of(frame: FrameType | None) -> str | None:
    """The file of the nearest frame inside the package, relative to it."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return path.relative_to(PACKAGE).as_posix()
        frame = frame.f_back
    return None


def calls(layer: nn.Module, shape: tuple[int, ...]) -> list[tuple[str | None, str]]:
    """Files of callers and callees in one eager step, in the order of the calls."""
    x = torch.randn(shape)
    return traced(lambda: layer(x).sum().backward())


def traced(step: Callable[[], None]) -> list[tuple[str | None, str]]:
    """Files of callers and callees in a step, in the order of the calls."""
    found = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            found.append((file_of(frame.f_back), file_of(frame)))

    threading.setprofile(trace)  # autograd may call backward from a thread of its own
    sys.setprofile(trace)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def drawn(title: str) -> dict[str, list[str]]:
    """The files in the page's table of a title, by the column `stations` or `asked`."""
    (row,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {
        name: re.findall(r"`([\w/]+\.py)`", cell)
        for name, cell in zip(("stations", "asked"), row, strict=True)
    }


@pytest.mark.parametrize("title", LAYERS)
def test_the_page_lists_the_files_that_a_step_passes(title: str) -> None:
    make, shape = LAYERS[title]
    passed = list(dict.fromkeys(callee for _, callee in calls(make(), shape)))
    listed = drawn(title)
    assert [file for file in passed if file in listed["stations"]] == listed["stations"]
    assert {*passed} == {*listed["stations"], *listed["asked"]}
    assert len(listed["stations"]) <= 8


def deferred_step(update_every: int) -> Callable[[], None]:
    """A step of two alike layers with running averages, whose inverses were made before."""
    model = proxprop.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Exact(), include_last=True)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(4, 8)
    proxprop.attach(optimizer, model, running=Running(update_every=update_every, invert_every=1000))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    step()
    step()
    return step


@pytest.mark.parametrize("title", STEPS)
def test_the_page_lists_the_files_that_a_step_of_running_averages_passes(title: str) -> None:
    passed = list(dict.fromkeys(callee for _, callee in traced(deferred_step(STEPS[title]))))
    listed = drawn(title)
    assert [file for file in passed if file in listed["stations"]] == listed["stations"]
    assert {*passed} == {*listed["stations"], *listed["asked"]}
    assert len(passed) <= 12


@pytest.mark.parametrize("title", LAYERS)
def test_no_call_goes_back_up(title: str) -> None:
    make, shape = LAYERS[title]
    rooms = [
        tuple(ROOMS.index(file.split("/")[0]) for file in call)
        for call in calls(make(), shape)
        if all(file is not None and file.split("/")[0] in ROOMS for file in call)
    ]
    assert {callee for _, callee in rooms} >= {0, 1, 2, 3, 4}
    assert [(caller, callee) for caller, callee in rooms if callee < caller] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_one_before_it(room: str) -> None:
    """Also inside functions."""
    before = "|".join(re.escape(name.removesuffix(".py")) for name in ROOMS[: ROOMS.index(room)])
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).glob("*.py"))
    assert files
    upwards = rf"^\s*from proxprop(?:\.(?:{before})\b| import .*\b(?:{before})\b)"
    found = [file.name for file in files if before and re.search(upwards, file.read_text(), re.MULTILINE)]
    assert found == (["stopping.py"] if room == "kernels" else [])  # it takes the constants of its plain twin
