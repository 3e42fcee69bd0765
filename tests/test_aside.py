"""Directions that are solved beside the backward pass are the same ones. The streams themselves need a GPU."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from proxprop import CG, Exact, aside
from training import assert_same, directions, images, loss_of, small_model


@pytest.fixture
def forks(monkeypatch):
    """Fork on a CPU as on a GPU; the list grows by each fork."""
    made = []
    monkeypatch.setattr(aside, "has_streams", lambda tensor: True)
    monkeypatch.setattr(aside, "on_its_stream", lambda device: made.append(device) or nullcontext())
    return made


@pytest.mark.parametrize("frozen", [None, "0.weight", "3.bias"])
def test_directions_are_the_same(forks, frozen):
    model = small_model(Exact())
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)

    def found():
        model.zero_grad()
        loss_of(model, images()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    aside_ones = found()
    assert len(forks) == 2
    assert_same(aside_ones, _in_line(found))


def _in_line(found):
    solvers, aside.LATENCY_BOUND = aside.LATENCY_BOUND, ()
    try:
        return found()
    finally:
        aside.LATENCY_BOUND = solvers


def test_gradients_accumulate_and_reach_the_input(forks):
    model = small_model(Exact())
    x = images().requires_grad_()

    def found():
        model.zero_grad()
        x.grad = None
        for _ in range(2):
            loss_of(model, x).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()} | {"x": x.grad.clone()}

    assert_same(found(), _in_line(found))


def test_conjugate_gradients_stay_in_line(forks):
    directions(small_model(CG(3)), images())
    assert forks == []


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_that_is_watched_stays_in_line(forks, hook):
    model = small_model(Exact())
    for parameter in model.parameters():
        getattr(parameter, hook)(lambda gradient: None)
    directions(model, images())
    assert forks == []


def test_a_checkpoint_stays_in_line(forks):
    model = small_model(Exact())
    directions(model, images(), lambda x: checkpoint(model, x, use_reentrant=False))
    assert forks == []


def test_a_slice_of_a_parameter_stays_in_line(forks):
    weight = nn.Parameter(torch.randn(4, 3))
    assert aside.leaves(torch.randn(2, 3), Exact(), [weight[:3], None]) is None
    assert aside.leaves(torch.randn(2, 3), Exact(), [weight.view_as(weight), None]) == [weight, None]
