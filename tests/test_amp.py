"""Autocast and gradient scaling: the loss scale drops out, and an overflow skips the step."""

import pytest
import torch
from torch import nn

from cases import relative_error
from proxprop import CG, Exact
from training import images, loss_of, small_model

works = pytest.mark.compatibility
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
SOLVERS = pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)


def scaled_backward(
    model: nn.Module, scaler: torch.amp.GradScaler, dtype: torch.dtype, factor: float = 1.0
) -> None:
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, images(dtype=torch.float32)).float() * factor
    scaler.scale(loss).backward()


@works("Autocast to bfloat16 and float16 with `GradScaler`")
@DTYPES
@SOLVERS
def test_loss_scale_drops_out(solver, dtype: torch.dtype) -> None:
    """A power of two shifts exponents only, so nothing but subnormal output gradients may differ."""
    model = small_model(solver, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for scale in (1.0, 2.0**8):
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaled_backward(model, scaler, dtype)
        scaler.unscale_(optimizer)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, scaled in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(scaled, one) <= (1e-3 if dtype == torch.float16 else 1e-6)


@works("Autocast to bfloat16 and float16 with `GradScaler`")
@DTYPES
@SOLVERS
def test_training_under_a_scaler(solver, dtype: torch.dtype) -> None:
    model = small_model(solver, torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    before = float(loss_of(model, images(dtype=torch.float32)).detach())
    for _ in range(10):
        optimizer.zero_grad()
        scaled_backward(model, scaler, dtype)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**8
    assert float(loss_of(model, images(dtype=torch.float32)).detach()) < 0.9 * before


@works("An overflow skips the step and lowers the loss scale")
@DTYPES
@SOLVERS
def test_an_overflow_skips_the_step(solver, dtype: torch.dtype) -> None:
    model = small_model(solver, torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaled_backward(model, scaler, dtype, factor=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    scaled_backward(model, scaler, dtype)
    scaler.step(optimizer)
    assert not torch.equal(model[0].weight, before[0])


@works("An overflow skips the step and lowers the loss scale")
@SOLVERS
def test_an_overflow_in_float16s_own_range_is_seen(solver) -> None:
    """The scaled output gradient leaves float16 although loss and scale are finite."""
    model = small_model(solver, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    scaled_backward(model, scaler, torch.float16, factor=1e4)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**19
