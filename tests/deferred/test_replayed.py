"""Solves of deferred mode that are replayed in eager steps: the same directions."""

import pytest
import torch
from torch import nn

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact, Running
from proxprop.deferred import preconditioner, writer
from proxprop.replay import Replays
from replaying import Recorder

RUNNING = Running(decay=0.8, update_every=2, invert_every=2)


def steps(solver: proxprop.Solver, running: Running | None) -> list[torch.Tensor]:
    """Directions of a wide layer, whose rows are kept, of two alike and of one that has more samples than features."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2, bias=False)
    ).double()
    proxprop.convert(model, solver, 0.7, include_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model, running=running)
    found = []
    for step in range(16):
        optimizer.zero_grad()
        model(randn(9, 40, seed=step)).square().mean().backward()
        optimizer.step()
        found += [p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
@pytest.mark.parametrize("running", [None, RUNNING], ids=["deferred", "running"])
def test_replayed_solves_are_the_eager_ones(
    solver: proxprop.Solver, running: Running | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, recorder = steps(solver, running), Recorder()
    replays = Replays(recorder, lambda: None)
    for module in (preconditioner, writer):
        monkeypatch.setattr(module, "replays", lambda like: replays)
    found = steps(solver, running)
    assert recorder.runs > 5
    if running is not None and solver == Exact():
        assert any("directions" in str(question) for question in replays.kept)
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-12


def test_a_large_solve_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    replays = Replays(recorder, lambda: None)
    monkeypatch.setattr(preconditioner, "replays", lambda like: replays)
    monkeypatch.setattr(proxprop.tuning, "REPLAYED_MOST_BYTES", 8)
    steps(Exact(), None)
    assert recorder.captures == 0


def test_a_failure_is_told_of_its_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of the same shapes write to the same memory."""
    replays = Replays(Recorder(), lambda: None)
    monkeypatch.setattr(preconditioner, "replays", lambda like: replays)
    good, bad = torch.eye(3)[None], -torch.eye(3)[None]
    for _ in range(6):
        flags = [preconditioner.inverse(M.clone(), 0.5)[1] for M in (bad, good)]
    assert [flag.tolist() for flag in flags] == [[True], [False]]
