"""A small model with a convolution and linear layers, its data, and one pass: what the tests of training share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from proxprop.solvers import CG, Exact, Solver


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


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def attached(layer: nn.Module, **options) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, attached."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    proxprop.attach(optimizer, layer, **options)
    return optimizer


class Tied(nn.Module):
    """Two layers that share a weight and have biases of their own, or none, or the same."""

    def __init__(self, biases: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=biases != "none", dtype=torch.float64)
        self.second = nn.Linear(4, 4, bias=biases != "none", dtype=torch.float64)
        self.second.weight = self.first.weight
        if biases == "same":
            self.second.bias = self.first.bias
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()))


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    wanted = targets()

    def step(input: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(input) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def saved_by(call: Callable[[], Tensor]) -> tuple[dict[int, int], Tensor]:
    """The storages that autograd keeps for a call, with their bytes, and the call's output."""
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is freed and its address taken anew

    def save(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        return saved, call()


def sparse_inputs() -> dict[str, Tensor]:
    return {
        "torch.sparse_coo": torch.eye(4).to_sparse(),
        "torch.sparse_csr": torch.eye(4).to_sparse_csr(),
        "torch.jagged": torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    }


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, input: Tensor, call=None
) -> dict[str, Tensor]:
    """The directions of one step of an attached model."""
    optimizer.zero_grad()
    loss_of(call or model, input).backward()
    optimizer.step()
    return grads(model)


def told_of_failure(solver: Solver, value: float, forms_S: bool = False) -> AbstractContextManager[object]:
    """A solver whose K or S meets infinities, as where AᵀA overflows, says so; NaN came with the inputs."""
    if value != float("inf") or not (forms_S or solver == Exact()):
        return nullcontext()
    words = "not positive definite" if solver == Exact() else "these products overflowed"
    return pytest.warns(RuntimeWarning, match=words)
