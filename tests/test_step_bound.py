"""`bound`: steps of a length that no learning rate changes, and the optimizer's own where they are short enough."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import proxprop
from training import images, loss_of, plain_model, small_model

Make = Callable[[nn.Module, float], torch.optim.Optimizer]


class TwoPoints(torch.optim.SGD):
    """Like Schedule-Free's optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr),
    "nesterov": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.95, nesterov=True),
    "adam": lambda m, lr: torch.optim.Adam(m.parameters(), lr=lr),
    "adamw, decay": lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.5),
    "muon": lambda m, lr: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=lr),
}


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.detach().square().sum()) for t in tensors))


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, first: int = 0
) -> list[float]:
    """The length of every step."""
    lengths = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, images(seed=step)).backward()
        before = [p.detach().clone() for p in held(optimizer)]
        optimizer.step()
        lengths.append(norm([p - q for p, q in zip(held(optimizer), before, strict=True)]))
    return lengths


def same(one: nn.Module, two: nn.Module, tolerance: float = 0.0) -> None:
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lr", [1e-3, 0.3, 1e5])
def test_it_is_the_formula(lr: float) -> None:
    """Momentum's own recurrence on a quadratic, with the factor applied by hand."""
    weight = torch.linspace(1, 2, 6, dtype=torch.float64)
    curvature = torch.logspace(-1, 1, 6, dtype=torch.float64)
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=0.9)
    bounded = proxprop.bound(optimizer, step=0.2, budget=0.5, horizon=4)
    size, spent, buffer, found = float(weight.norm()), 0.0, torch.zeros_like(weight), weight.clone()
    for _ in range(12):
        optimizer.zero_grad()
        (0.5 * curvature * parameter.square()).sum().backward()
        optimizer.step()
        buffer = 0.9 * buffer + curvature * found
        length = lr * float(buffer.norm())
        spent = 0.75 * spent + length**2
        factor = min(1.0, size / math.sqrt(spent / 0.5**2 + length**2 / 0.2**2))
        found = found - factor * lr * buffer
        assert float(bounded.factor) == pytest.approx(factor, rel=1e-9)
        torch.testing.assert_close(parameter.detach(), found, atol=1e-9, rtol=1e-9)
    assert (factor < 1) == (lr > 1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_short_steps_stay_to_the_bit(name: str) -> None:
    plain, bound = plain_model(torch.float32), plain_model(torch.float32)
    optimizers = [OPTIMIZERS[name](model, 1e-4) for model in (plain, bound)]
    bounded = proxprop.bound(optimizers[1])
    for model, optimizer in zip((plain, bound), optimizers, strict=True):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, images(seed=step, dtype=torch.float32)).backward()
            optimizer.step()
    assert float(bounded.factor) == 1
    same(plain, bound)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lr", [1e2, 1e8])
def test_no_step_is_longer_and_all_together_are_not(name: str, lr: float) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[name](model, lr)
    size = norm(held(optimizer))
    proxprop.bound(optimizer, step=0.05, budget=0.1)
    lengths = trained(model, optimizer, steps=20)
    assert max(lengths) <= 0.05 * size * (1 + 1e-6)
    assert sum(lengths) <= 0.1 * size * sum(1 / math.sqrt(t) for t in range(1, 21)) * 2
    assert lengths[-1] > 0


def test_too_large_rates_all_give_the_same_steps() -> None:
    models = plain_model(), plain_model()
    for model, lr in zip(models, (1e4, 1e9), strict=True):
        optimizer = OPTIMIZERS["nesterov"](model, lr)
        proxprop.bound(optimizer)
        trained(model, optimizer)
    same(*models, tolerance=1e-6)


def test_older_steps_are_forgotten() -> None:
    """After one huge step, ordinary ones get their length back; without forgetting they would not."""
    factors = []
    for horizon in (10, 1e9):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        bounded = proxprop.bound(optimizer, horizon=horizon)
        for step in range(300):
            parameter.grad = torch.full_like(parameter, 1e3 if step == 0 else 1e-3 * (-1) ** step)
            optimizer.step()
        factors.append(float(bounded.factor))
    assert factors[0] == 1
    assert factors[1] == pytest.approx(1e-3, rel=0.01)


def test_a_step_that_overflows_is_taken_back_and_nan_stays() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    bounded = proxprop.bound(optimizer)
    parameter.grad = torch.full_like(parameter, 1e30)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(4))
    assert float(bounded.factor) == 0
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.999))
    parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert parameter.isnan().all()


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    model = plain_model()
    optimizer = OPTIMIZERS["adam"](model, 10.0)
    bounded = proxprop.bound(optimizer)
    trained(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), bounded.state_dict()))
    other = plain_model()
    other.load_state_dict(saved[0])
    second = OPTIMIZERS["adam"](other, 1.0)
    second.load_state_dict(saved[1])
    proxprop.bound(second).load_state_dict(saved[2])
    trained(model, optimizer, 4, first=4)
    trained(other, second, 4, first=4)
    same(model, other)


def test_a_detached_optimizer_is_free() -> None:
    plain, freed = plain_model(), plain_model()
    optimizers = [OPTIMIZERS["sgd"](model, 0.5) for model in (plain, freed)]
    bounded = proxprop.bound(optimizers[1], step=1e-6)
    bounded.detach()
    bounded.detach()
    for model, optimizer in zip((plain, freed), optimizers, strict=True):
        trained(model, optimizer, 2)
    same(plain, freed)


@pytest.mark.parametrize("running", [None, proxprop.Running()], ids=["batch", "running"])
def test_it_bounds_attached_models(running: proxprop.Running | None) -> None:
    model = small_model()
    optimizer = OPTIMIZERS["nesterov"](model, 1e3)
    proxprop.attach(optimizer, model, running=running)
    size = norm(held(optimizer))
    proxprop.bound(optimizer)
    assert max(trained(model, optimizer)) <= 0.1 * size * (1 + 1e-6)


def test_parameters_of_several_precisions() -> None:
    parameters = [
        nn.Parameter(torch.ones(8, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)
    ]
    optimizer = torch.optim.SGD(parameters, lr=1e4)
    proxprop.bound(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = norm([(1 - p.detach()).double() for p in parameters])
    assert moved == pytest.approx(math.sqrt(24) / math.hypot(1, 10), rel=0.02)


def test_a_step_does_not_wait_for_the_device() -> None:
    class NoValues(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return func(*args, **(kwargs or {}))

    model = plain_model()
    optimizer = OPTIMIZERS["sgd"](model, 1e3)
    proxprop.bound(optimizer)
    loss_of(model, images()).backward()
    with NoValues():
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_bounded() -> None:
    models = plain_model(), plain_model()
    for model, compiled in zip(models, (False, True), strict=True):
        optimizer = OPTIMIZERS["nesterov"](model, 1e3)
        proxprop.bound(optimizer)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, images(seed=seed)).backward()
            step()
    same(*models, tolerance=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0.0}, "step should be > 0 but is 0.0"),
        ({"budget": -1}, "budget should be > 0 but is -1"),
        ({"horizon": 1}, "horizon should be > 1 but is 1"),
        ({"step": math.nan}, "step should be > 0 but is nan"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxprop.bound(OPTIMIZERS["sgd"](plain_model(), 0.1), **options)


def test_what_can_not_be_bounded() -> None:
    model = plain_model()
    with pytest.raises(TypeError, match=r"should be a torch.optim.Optimizer but has type list.*a call each"):
        proxprop.bound([OPTIMIZERS["sgd"](model, 0.1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="TwoPoints keeps weights of its own"):
        proxprop.bound(TwoPoints(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="all zero"):
        proxprop.bound(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    bounded = proxprop.bound(optimizer := OPTIMIZERS["sgd"](model, 0.1))
    with pytest.raises(ValueError, match="should hold reference and spent but holds nothing"):
        bounded.load_state_dict({})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"got other parameters after proxprop\.bound"):
        optimizer.step()
