"""A small model with a convolution and linear layers, its data, and one pass: what the tests of training share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from proxprop.solvers import CG, Solver


def plain_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(48, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)


def small_model(solver: Solver = CG(3), dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return proxprop.convert(plain_model(dtype), solver, tau_theta=0.7)


def images(batch: int = 6, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return randn(batch, 1, 4, 4, seed=seed).to(dtype)


def targets(batch: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    return randn(batch, 3, seed=2).to(dtype)


def loss_of(model: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    output = model(input)
    return (output - targets(len(input), output.dtype)).square().mean()


def directions(
    model: nn.Module, input: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """What one backward pass leaves in `.grad`; `call` runs the model if it is not called as it is."""
    model.zero_grad()
    loss_of(model if call is None else call, input).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def handle_of(model: nn.Module) -> proxprop.Attached:
    """What `attach` returned for a model whose layers are all attached together."""
    layers = (module for module in model.modules() if isinstance(module, proxprop.nn.ProximalLayer))
    (handle,) = {layer._attached.handle for layer in layers if layer._attached is not None}
    return handle


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = relative_error(found[name], value)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
