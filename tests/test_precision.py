"""Half-precision inputs are solved in float32 and handed back in the parameter's dtype."""

import copy

import pytest
import torch
from torch import nn

import proxprop
from cases import by_name, oracle, randn, relative_error
from proxprop import CG, Exact

LAYERS = [(lambda: nn.Linear(6, 4), (5, 6)), (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 5, 5))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("solver", [Exact(), CG(3)], **by_name)
def test_autocast(dtype, make, shape, solver) -> None:
    """The direction is that of the rounded inputs the kernel saw, solved in float32, in the parameter's float32."""
    torch.manual_seed(0)
    plain = make()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.5, include_last=True)
    input = randn(*shape, seed=1).float()
    with torch.autocast("cpu", dtype=dtype):
        output = layer(input)
        assert output.dtype == dtype
        assert torch.equal(output, plain(input))
    G = randn(*output.shape, seed=2).to(dtype)
    output.backward(G)
    rounded = plain.double(), input.to(dtype).double(), G.double()
    for name, expected in oracle(*rounded, solver, tau_theta=0.5).items():
        found = layer.get_parameter(name).grad
        assert found.dtype == torch.float32
        assert relative_error(found.double(), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_half_precision_parameters(dtype, make, shape) -> None:
    torch.manual_seed(0)
    plain = make().to(dtype)
    layer = proxprop.convert(copy.deepcopy(plain), CG(3), include_last=True)
    input = randn(*shape, seed=1).to(dtype)
    output = layer(input)
    G = randn(*output.shape, seed=2).to(dtype)
    output.backward(G)
    for name, expected in oracle(plain.double(), input.double(), G.double(), CG(3), tau_theta=1.0).items():
        found = layer.get_parameter(name).grad
        assert found.dtype == dtype
        assert relative_error(found.double(), expected) < torch.finfo(dtype).eps


def test_backward_inside_autocast_is_solved_in_float32_all_the_same() -> None:
    torch.manual_seed(0)
    layer, input = proxprop.nn.Linear(6, 4, solver=Exact()), randn(5, 6, seed=1).float()
    G = randn(5, 4, seed=2).bfloat16()
    grads = []
    for inside in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(input)
            if inside:
                output.backward(G)
        if not inside:
            output.backward(G)
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


def test_loss_scale_drops_out_to_the_bit_for_powers_of_two() -> None:
    layer, input = proxprop.nn.Linear(6, 4, solver=Exact()), randn(5, 6, seed=1).float()
    G = randn(5, 4, seed=2).float()
    layer(input).backward(G)
    plain = layer.weight.grad.clone()
    layer.zero_grad()
    layer(input).backward(G * 2.0**16)
    assert torch.equal(layer.weight.grad / 2.0**16, plain)


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize("space", ["sample", "feature"])
@pytest.mark.parametrize("solver", [Exact(), CG(3)], **by_name)
def test_float32_is_close_to_float64(make, shape, space, solver) -> None:
    torch.manual_seed(0)
    plain = make()
    layer = proxprop.convert(copy.deepcopy(plain), solver, space=space, include_last=True)
    input = randn(*shape, seed=1)
    output = layer(input.float())
    G = randn(*output.shape, seed=2)
    output.backward(G.float())
    for name, expected in oracle(plain.double(), input, G, solver, tau_theta=1.0).items():
        assert relative_error(layer.get_parameter(name).grad.double(), expected) < 1e-5
