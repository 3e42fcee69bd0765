"""The callback for Hugging Face's Trainer: the loop by hand, its checkpoints, and clipping behind the solve."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import proxprop
from deferred_claims import works
from proxprop import CG, Running
from proxprop.integrations.huggingface import ProxPropCallback
from proxprop.nn import ProximalLayer
from trainers import RATE, Net, by_hand, hugging_face, train
from training import assert_same

EVERY = Running(update_every=1, invert_every=2)
SECOND = Running(update_every=2, invert_every=2)
CLIP = 0.05
CALLBACK = "`integrations.huggingface.ProxPropCallback`: accumulation, clipping, bf16, exact resume"


def expected(running: Running | None, max_norm: float = CLIP, **options: object) -> dict[str, Tensor]:
    """What a loop gives that solves, then clips, with the AdamW that Trainer makes."""
    net = Net(options.pop("dtype", torch.float64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    handle = proxprop.wrap(optimizer, net, running=running)

    def solve_and_clip() -> None:
        handle.solve()
        norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        assert norm > CLIP

    return by_hand(net, optimizer, before_step=solve_and_clip, **options)


@works(CALLBACK)
@pytest.mark.parametrize("running", [None, EVERY, SECOND], ids=str)
def test_it_is_the_loop_by_hand(running: Running | None, tmp_path: Path) -> None:
    net = Net()
    callback = ProxPropCallback(running=running)
    trainer = hugging_face(net, tmp_path, None, [callback], max_grad_norm=CLIP)
    train(trainer)
    assert_same(dict(net.named_parameters()), expected(running), 1e-12)
    assert trainer.args.max_grad_norm == CLIP


def test_without_clipping(tmp_path: Path) -> None:
    net = Net()
    train(hugging_face(net, tmp_path, None, [ProxPropCallback(running=EVERY)], max_grad_norm=0.0))
    assert_same(dict(net.named_parameters()), expected(EVERY, max_norm=1e9), 1e-12)


@works(CALLBACK)
def test_under_bf16_autocast(tmp_path: Path) -> None:
    net = Net(torch.float32)
    callback = ProxPropCallback(running=EVERY)
    train(hugging_face(net, tmp_path, None, [callback], max_grad_norm=CLIP, bf16=True))
    assert_same(dict(net.named_parameters()), expected(EVERY, dtype=torch.float32, bf16=True), tolerance=1e-6)


@works(CALLBACK)
@pytest.mark.parametrize("running", [Running(update_every=3, invert_every=3), None], ids=str)
def test_a_resumed_run_equals_one_that_went_on(running: Running | None, tmp_path: Path) -> None:
    whole, resumed = Net(), Net()
    options = {"max_grad_norm": CLIP, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5}
    train(hugging_face(whole, tmp_path, None, [ProxPropCallback(running=running)], **options))
    (tmp_path / "checkpoint-5").rename(tmp_path / "moved")
    trainer = hugging_face(resumed, tmp_path / "other", None, [ProxPropCallback(running=running)], **options)
    train(trainer, resume_from_checkpoint=str(tmp_path / "moved"))
    assert trainer.state.global_step == 8
    assert_same(dict(resumed.named_parameters()), dict(whole.named_parameters()), 0.0)


def test_a_checkpoint_without_averages_is_told_of(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    train(hugging_face(Net(), tmp_path, None, [ProxPropCallback(running=None)], **options))
    trainer = hugging_face(Net(), tmp_path, None, [ProxPropCallback()], **options)
    with pytest.warns(UserWarning, match="resumes at step 2 from a checkpoint without running averages"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_averages_that_are_not_asked_for_are_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    train(hugging_face(Net(), tmp_path, None, [ProxPropCallback()], **options))
    net = Net()
    trainer = hugging_face(net, tmp_path, None, [ProxPropCallback(running=None)], **options)
    with pytest.raises(ValueError, match="keeps no running averages: attach with running="):
        train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert type(net.layers[0]) is nn.Linear


def test_the_model_is_given_back_as_it_was(tmp_path: Path) -> None:
    net, converted = Net(), Net()
    callback = ProxPropCallback()
    train(hugging_face(net, tmp_path, None, [callback]))
    assert type(net.layers[0]) is nn.Linear
    assert callback.attached is None
    proxprop.convert(converted, CG(2))
    train(hugging_face(converted, tmp_path, None, [ProxPropCallback()]))
    assert isinstance(converted.layers[0], ProximalLayer)
    assert converted.layers[0]._attached is None


class Fails(transformers.TrainerCallback):
    """Ends training in the middle of the third step, once."""

    def __init__(self) -> None:
        self.left = 3

    def on_substep_end(self, *_: object, **__: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError


def test_an_error_in_the_middle_of_a_step_does_not_end_clipping(tmp_path: Path) -> None:
    net = Net()
    callbacks = [ProxPropCallback(running=EVERY), Fails()]
    trainer = hugging_face(net, tmp_path, None, callbacks, max_grad_norm=CLIP)
    with pytest.raises(ZeroDivisionError):
        train(trainer)
    net.load_state_dict(Net().state_dict())
    trainer.optimizer = trainer.lr_scheduler = None
    train(trainer)
    assert_same(dict(net.named_parameters()), expected(EVERY), 1e-12)
    assert trainer.args.max_grad_norm == CLIP


def test_a_checkpoint_resumes_without_the_callback(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    train(hugging_face(Net(), tmp_path, None, [ProxPropCallback()], **options))
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert "layers.0.S" in saved["param_groups"][0]["proxprop"]
    trainer = hugging_face(Net(), tmp_path, None, **options)
    train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4
