"""The callback for Lightning: the loop by hand, its checkpoints, and a module that is given back as it was."""

from pathlib import Path

import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn

import proxprop
from deferred_claims import works
from proxprop import CG, Running
from proxprop.integrations.lightning import ProxPropCallback
from proxprop.nn import ProximalLayer
from trainers import MICRO_BATCH, Lit, Net, X, Y, adamw, by_hand, fit
from training import assert_same

EVERY = Running(update_every=1, invert_every=2)
SECOND = Running(update_every=2, invert_every=2)
CLIP = 0.05
CALLBACK = "`integrations.lightning.ProxPropCallback`: accumulation, clipping, bf16, exact resume"


def expected(running: Running | None, epochs: int = 1, **options: object) -> dict[str, Tensor]:
    """What a loop gives that solves, then clips."""
    net = Net(options.pop("dtype", torch.float64))
    optimizer = adamw(net)
    handle = proxprop.wrap(optimizer, net, running=running)

    def solve_and_clip() -> None:
        handle.solve()
        norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        assert norm > CLIP

    return by_hand(net, optimizer, epochs, before_step=solve_and_clip, **options)


@works(CALLBACK)
@pytest.mark.parametrize("running", [None, EVERY, SECOND], ids=str)
def test_it_is_the_loop_by_hand(running: Running | None) -> None:
    net = Net()
    fit(Lit(net), callbacks=[ProxPropCallback(running=running)], gradient_clip_val=CLIP)
    assert_same(dict(net.named_parameters()), expected(running), 1e-12)


@works(CALLBACK)
def test_under_bf16_autocast() -> None:
    net = Net(torch.float32)
    callback = ProxPropCallback(running=EVERY)
    fit(Lit(net), callbacks=[callback], gradient_clip_val=CLIP, precision="bf16-mixed")
    assert_same(dict(net.named_parameters()), expected(EVERY, dtype=torch.float32, bf16=True), tolerance=1e-6)


@works(CALLBACK)
@pytest.mark.parametrize("running", [Running(update_every=3, invert_every=3), None], ids=str)
def test_a_resumed_run_equals_one_that_went_on(running: Running | None, tmp_path: Path) -> None:
    whole, part, resumed = Net(), Net(), Net()
    options = {"gradient_clip_val": CLIP}
    fit(Lit(whole), callbacks=[ProxPropCallback(running=running)], max_epochs=2, **options)
    trainer = fit(Lit(part), callbacks=[ProxPropCallback(running=running)], **options)
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    callback = ProxPropCallback(running=running)
    fit(Lit(resumed), tmp_path / "last.ckpt", callbacks=[callback], max_epochs=2, **options)
    assert_same(dict(resumed.named_parameters()), dict(whole.named_parameters()), 0.0)
    assert not torch.equal(whole.layers[0].weight, part.layers[0].weight)


def test_checkpoints_within_training_have_the_averages(tmp_path: Path) -> None:
    save = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=2)
    callbacks = [ProxPropCallback(running=EVERY), save]
    fit(Lit(Net()), callbacks=callbacks, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["ProxPropCallback"]
    assert int(saved["net.layers.0.steps"]) == 4
    assert float(saved["net.layers.0.samples"]) > 0


def test_the_module_is_given_back_as_it_was() -> None:
    net, converted = Net(), Net()
    callback = ProxPropCallback()
    fit(Lit(net), callbacks=[callback])
    assert type(net.layers[0]) is nn.Linear
    assert callback.attached is None
    proxprop.convert(converted, CG(2))
    fit(Lit(converted), callbacks=[ProxPropCallback()])
    assert isinstance(converted.layers[0], ProximalLayer)
    assert converted.layers[0]._attached is None


def test_the_handle_is_there_while_training_runs() -> None:
    seen = []

    class Look(pytorch_lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            seen.append(callback.attached)

    callback = ProxPropCallback(include_last=True)
    fit(Lit(Net()), callbacks=[callback, Look()])
    assert len(seen) == 8
    assert seen[0] is seen[-1]
    assert [*seen[0].choices] == ["net.layers.0", "net.layers.2"]


def test_an_error_inside_training_does_not_stand_in_the_way_of_the_next() -> None:
    class Fails(Lit):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            if index == 5:
                raise ZeroDivisionError
            return super().training_step(batch, index)

    net, callback = Net(), ProxPropCallback(running=EVERY)
    with pytest.raises(ZeroDivisionError):
        fit(Fails(net), callbacks=[callback], gradient_clip_val=CLIP)
    net.load_state_dict(Net().state_dict())
    net.zero_grad()
    fit(Lit(net), callbacks=[callback], gradient_clip_val=CLIP)
    assert_same(dict(net.named_parameters()), expected(EVERY), 1e-12)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    callback = ProxPropCallback()
    callback.load_state_dict({"other.S": torch.zeros(2)})
    net = Net()
    with pytest.raises(ValueError, match=r"the state has no 'net\.layers\.0\.steps'"):
        fit(Lit(net), callbacks=[callback])
    assert type(net.layers[0]) is nn.Linear


class Two(Lit):
    """Steps of two optimizers by hand, one after the other."""

    def __init__(self, net: Net) -> None:
        super().__init__(
            net, lambda net: [torch.optim.SGD(layer.parameters(), 0.1) for layer in net.layers[::2]]
        )
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(*batch)["loss"])
            optimizer.step()


def test_several_optimizers_stepped_by_hand() -> None:
    one, two = Net(), Net()
    options = {"include_last": True, "running": None}
    fit(Two(one), callbacks=[ProxPropCallback(**options)], accumulate_grad_batches=1)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in two.layers[::2]]
    proxprop.wrap(optimizers, two, **options)
    lit = Two(two)
    lit.optimizers, lit.manual_backward = lambda: optimizers, lambda loss: loss.backward()
    for batch in zip(X.split(MICRO_BATCH), Y.split(MICRO_BATCH), strict=True):
        lit.training_step(batch, 0)
    assert_same(dict(one.named_parameters()), dict(two.named_parameters()), 1e-12)
