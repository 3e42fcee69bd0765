"""Deferred mode under trainers that write the loop themselves: PyTorch Lightning's and Hugging Face's, as they are."""

from pathlib import Path

import pytest
import torch

import proxprop
from proxprop import Exact, Running
from trainers import Lit, Net, adamw, by_hand, fit, hugging_face, train
from training import assert_same

works = pytest.mark.compatibility
ACCUMULATED = "micro-batches as under gradient accumulation"
RUNNING = pytest.mark.parametrize(
    "running",
    [None, Running(update_every=1, invert_every=2), Running(update_every=2, invert_every=2)],
    ids=str,
)


def converted() -> Net:
    net = Net()
    proxprop.convert(net, Exact(), tau_theta=0.5, include_last=True)
    return net


def attached(net: Net, running: Running | None) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    proxprop.attach(optimizer, net, running=running)
    return optimizer


def expected(running: Running | None) -> dict[str, torch.Tensor]:
    net = converted()
    return by_hand(net, attached(net, running))


LIGHTNING = "PyTorch Lightning's `Trainer`, with accumulation and clipping"


@works(LIGHTNING, mode="deferred")
@works(LIGHTNING, status="approximate", note=ACCUMULATED)
@RUNNING
def test_lightning(running: Running | None) -> None:
    net = converted()
    fit(Lit(net, lambda net: attached(net, running)), gradient_clip_val=1e9)
    assert_same(dict(net.named_parameters()), expected(running), 1e-12)


TRAINER = "Hugging Face's `Trainer`, with accumulation and clipping"


@works(TRAINER, mode="deferred")
@works(TRAINER, status="approximate", note=ACCUMULATED)
@RUNNING
def test_trainer(running: Running | None, tmp_path: Path) -> None:
    net = converted()
    train(hugging_face(net, tmp_path, attached(net, running)))
    assert_same(dict(net.named_parameters()), expected(running), 1e-12)
