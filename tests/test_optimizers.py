"""Every optimizer of torch goes on from the directions, as do clipping, parameter groups and schedulers."""

import math

import pytest
import torch
from torch import Tensor, nn

from cases import randn
from optimizers import OPTIMIZERS, matrices
from proxprop import CG, Exact
from training import assert_same, directions, images, loss_of, small_model

works = pytest.mark.compatibility


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    input, wanted = randn(12, 6, seed=1), randn(12, 3, seed=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(input) - wanted).square().mean()
        loss.backward()
        return loss

    return [float(torch.as_tensor(optimizer.step(closure)).detach()) for _ in range(steps)]


def test_the_list_of_optimizers_is_torchs() -> None:
    names = {optimizer.__name__ for optimizer in OPTIMIZERS}
    assert {"SGD", "Adam", "AdamW", "Muon", "LBFGS", "Adafactor", "Rprop"} <= names
    assert len(names) >= 14


@works("Every optimizer of `torch.optim` that takes dense gradients, `Muon` and `LBFGS` included")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
def test_trains_with_its_default_settings(solver, optimizer) -> None:
    model = matrices(solver)
    losses = train(model, optimizer(model.parameters()), steps=15)
    assert all(math.isfinite(loss) for loss in losses)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert losses[-1] < losses[0]


@works("`torch.optim.SparseAdam`", status="refused", note="by torch itself: directions are dense")
def test_sparse_adam_says_that_directions_are_dense() -> None:
    model = matrices(CG(3))
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        train(model, torch.optim.SparseAdam(list(model.parameters())), steps=1)


@works("Parameter groups")
def test_groups_step_with_their_own_settings() -> None:
    model = small_model()
    found = directions(model, images())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.5},
        {"params": list(model[3].parameters()), "lr": 0.1, "weight_decay": 0.3},
        {"params": list(model[5].parameters()), "lr": 0.0},
    ]
    torch.optim.SGD(groups, lr=1.0).step()
    step = {"0": (0.5, 0.0), "3": (0.1, 0.3), "5": (0.0, 0.0)}
    expected = {}
    for name, value in before.items():
        lr, decay = step[name.split(".")[0]]
        expected[name] = value - lr * (found[name] + decay * value)
    assert_same({name: parameter.detach() for name, parameter in model.named_parameters()}, expected)


@works("Learning-rate schedulers")
def test_a_scheduler_scales_the_step() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    moved = []
    for _ in range(2):
        found = directions(model, images())
        before = model[0].weight.detach().clone()
        optimizer.step()
        scheduler.step()
        moved.append(float((before - model[0].weight.detach()).norm() / found["0.weight"].norm()))
    assert moved == pytest.approx([0.4, 0.2])


@works("Gradient clipping, by norm and by value")
def test_clipping_by_norm_acts_on_the_directions() -> None:
    model = small_model()
    found = directions(model, images())
    total = torch.stack([value.norm() for value in found.values()]).norm()
    returned = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=float(total) / 4)
    assert float(returned) == pytest.approx(float(total))
    clipped = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(clipped, {name: value / 4 for name, value in found.items()}, tolerance=1e-5)


@works("Gradient clipping, by norm and by value")
def test_clipping_by_value_acts_on_the_directions() -> None:
    model = small_model()
    found = directions(model, images())
    limit = float(found["3.weight"].abs().median())
    torch.nn.utils.clip_grad_value_(model.parameters(), limit)
    clipped = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(clipped, {name: value.clamp(-limit, limit) for name, value in found.items()})


@works("`zero_grad`, to None and to zero")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = small_model()
    expected = directions(model, images())
    held = model[3].weight.grad
    model.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert model[3].weight.grad is None
    else:
        assert torch.equal(model[3].weight.grad, torch.zeros_like(held))
    loss_of(model, images()).backward()
    assert (model[3].weight.grad is held) is not set_to_none
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


@works("An optimizer step inside backward (`register_post_accumulate_grad_hook`)")
def test_a_step_inside_backward_moves_along_the_directions() -> None:
    model = small_model()
    expected = directions(model, images())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model.zero_grad()
    loss_of(model, images()).backward()
    moved = {name: (before[name] - parameter.detach()) / 0.1 for name, parameter in model.named_parameters()}
    assert_same(moved, expected, tolerance=1e-9)
