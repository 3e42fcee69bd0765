"""What stands beside an optimizer: schedulers, averaged models, Schedule-Free, LoRA by PEFT, Accelerate."""

import copy
from collections.abc import Callable
from pathlib import Path

import accelerate
import peft
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import proxprop
from cases import randn, relative_error
from deferred_claims import works
from proxprop import Exact, Running
from running_averages import stated
from training import assert_same, images, loss_of, plain_model

RUNNING = pytest.mark.parametrize("running", [None, Running(update_every=2, invert_every=4)], ids=str)
STEPS = 9


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_step(model: nn.Module, optimizer: object, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, images(seed=step))
    loss.backward()
    optimizer.step()
    return loss.detach()


SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(
        optimizer, threshold=10.0, patience=1
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.8)],
        milestones=[4],
    ),
}


@works("Learning-rate schedulers")
@RUNNING
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_rates_of_the_steps(name: str, running: Running | None) -> None:
    """The same rates and momenta set by hand give the same parameters."""
    scheduled, by_hand = plain_model(), plain_model()
    first, second = adamw(scheduled), adamw(by_hand)
    proxprop.wrap(first, scheduled, running=running)
    proxprop.wrap(second, by_hand, running=running)
    scheduler, rates = SCHEDULERS[name](first), set()
    for step in range(STEPS):
        for key in ("lr", "betas"):
            second.param_groups[0][key] = first.param_groups[0][key]
        rates.add(first.param_groups[0]["lr"])
        loss = one_step(scheduled, first, step)
        one_step(by_hand, second, step)
        scheduler.step(loss) if name == "ReduceLROnPlateau" else scheduler.step()
    assert len(rates) > 2
    assert_same(dict(scheduled.named_parameters()), dict(by_hand.named_parameters()), 0.0)


@works("Averaged and EMA copies (`AveragedModel`)")
@RUNNING
@pytest.mark.parametrize("made_at", [0, 1, 3], ids=lambda step: f"made-before-step-{step}")
def test_an_averaged_model_follows_and_disturbs_nothing(running: Running | None, made_at: int) -> None:
    """Whether layers rest or are observed when it is made."""
    model, alone = plain_model(), plain_model()
    first, second = adamw(model), adamw(alone)
    proxprop.wrap(first, model, running=running)
    proxprop.wrap(second, alone, running=running)
    averaged, expected = None, {}
    for step in range(STEPS):
        if step == made_at:
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        one_step(model, first, step)
        one_step(alone, second, step)
        if averaged is not None:
            averaged.update_parameters(model)
            for name, parameter in model.named_parameters():
                now = parameter.detach().clone()
                expected[name] = 0.7 * expected.get(name, now) + 0.3 * now
    assert_same(dict(model.named_parameters()), dict(alone.named_parameters()), 0.0)
    assert_same(dict(averaged.module.named_parameters()), expected, 1e-12)
    plain = plain_model()
    plain.load_state_dict(averaged.module.state_dict())
    with torch.no_grad():
        assert torch.equal(averaged(images()), plain(images()))


FREE: dict[str, Callable[[nn.Module], object]] = {
    "AdamWScheduleFree": lambda model: schedulefree.AdamWScheduleFree(
        model.parameters(), lr=1e-2, warmup_steps=3
    ),
    "SGDScheduleFree": lambda model: schedulefree.SGDScheduleFree(model.parameters(), lr=0.1),
    "RAdamScheduleFree": lambda model: schedulefree.RAdamScheduleFree(model.parameters(), lr=1e-2),
    "ScheduleFreeWrapper": lambda model: schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    ),
}


@works("Schedule-Free optimizers (`schedulefree`), also its wrapper of others")
@RUNNING
@pytest.mark.parametrize("name", FREE)
def test_schedule_free_steps_along_the_directions(name: str, running: Running | None) -> None:
    """Given the directions that a model with the same parameters has, an optimizer alone takes the same steps."""
    model, moved, twin = plain_model(), plain_model(), plain_model()
    optimizer, alone, still = FREE[name](model), FREE[name](moved), torch.optim.SGD(twin.parameters(), lr=0.0)
    proxprop.wrap(optimizer, model, running=running)
    handle = proxprop.wrap(still, twin, running=running)
    for step in range(STEPS):
        if step % 3 == 0:  # as for an evaluation
            optimizer.eval(), alone.eval()
        optimizer.train(), alone.train()
        one_step(model, optimizer, step)
        twin.load_state_dict(moved.state_dict())
        still.zero_grad()
        loss_of(twin, images(seed=step)).backward()
        handle.solve()
        for parameter, direction in zip(moved.parameters(), twin.parameters(), strict=True):
            parameter.grad = direction.grad.clone()
        alone.step()
    optimizer.eval(), alone.eval()
    assert_same(dict(model.named_parameters()), dict(moved.named_parameters()), 1e-9)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).tanh()).tanh())


def with_lora(wrap: bool) -> tuple[nn.Module, Optimizer]:
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Classifier(), config).double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    if wrap:
        proxprop.wrap(optimizer, model, running=Running(damping=0.3))
    return model, optimizer


@works("LoRA by PEFT (`get_peft_model`)", note="convert after adding its layers")
def test_loras_matrices_take_the_stated_direction() -> None:
    x = randn(16, 6, seed=1)
    (plain, _), (model, optimizer) = with_lora(wrap=False), with_lora(wrap=True)
    seen: dict[str, Tensor] = {}
    for name, module in plain.named_modules():
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen.__setitem__(name, args[0].detach())
        )
    for each in (plain, model):
        each(x).square().sum().backward()
    optimizer.step()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"base_model.model.{layer}.lora_{matrix}.default.weight"
        for layer in ("up", "down")
        for matrix in "AB"
    }
    for name in trained:
        A, B = seen[name.removesuffix(".weight")], plain.get_parameter(name).grad
        expected = stated(A.T @ A / len(A), B.T, 0.3, Exact()).T
        assert relative_error(model.get_parameter(name).grad, expected) < 1e-9


@works("LoRA by PEFT (`get_peft_model`)")
def test_merging_lora_gives_a_plain_model_back() -> None:
    model, optimizer = with_lora(wrap=False)
    handle = proxprop.wrap(optimizer, model)
    model(randn(4, 6, seed=1)).sum().backward()
    optimizer.step()
    expected = model(randn(4, 6, seed=2)).detach()
    handle.detach()
    merged = proxprop.revert(model).merge_and_unload()
    assert {type(module) for module in merged.modules()} == {Classifier, nn.Linear}
    assert relative_error(merged(randn(4, 6, seed=2)).detach(), expected) < 1e-12


def accelerated(folder: Path, steps: range, resume: bool = False) -> dict[str, Tensor]:
    """Training with accumulation and clipping as in examples/with_accelerate.py."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = plain_model()
    model, optimizer = accelerator.prepare(model, adamw(model))
    attached = proxprop.wrap(optimizer, model, running=Running(update_every=2, invert_every=2))
    accelerator.register_for_checkpointing(attached)
    if resume:
        accelerator.load_state(str(folder))
    for step in steps:
        for micro in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, images(seed=2 * step + micro)))
                if accelerator.sync_gradients:
                    attached.solve()
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return dict(model.named_parameters())


@works("Hugging Face's Accelerate, with accumulation, clipping and its checkpoints")
def test_accelerate_is_the_loop_by_hand_and_resumes_exactly(tmp_path: Path) -> None:
    model = plain_model()
    optimizer = adamw(model)
    attached = proxprop.wrap(optimizer, model, running=Running(update_every=2, invert_every=2))
    for step in range(5):
        for micro in range(2):
            (loss_of(model, images(seed=2 * step + micro)) / 2).backward()
        attached.solve()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05
        optimizer.step()
        optimizer.zero_grad()
    whole = copy.deepcopy(accelerated(tmp_path / "whole", range(5)))
    assert_same(whole, dict(model.named_parameters()), 1e-12)
    accelerated(tmp_path / "part", range(3))
    assert_same(accelerated(tmp_path / "part", range(3, 5), resume=True), whole, 0.0)
