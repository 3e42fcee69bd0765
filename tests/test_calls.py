"""A small layer on a CPU is calls of torch: no more of them than it needs.

The bounds are a few calls above what is needed. BackProp takes 8.
"""

import pytest
import torch

import proxprop
from calls import torch_calls
from proxprop import CG, Exact, Solver

SAMPLE, FEATURE = (256, 128), (64, 256)
"""Inputs and outputs of layers that are solved in that space, with 100 samples."""


@pytest.mark.parametrize(
    ("sizes", "solver", "most"),
    [
        (SAMPLE, CG(1), 50),
        (SAMPLE, CG(3), 85),
        (SAMPLE, CG(10), 255),
        (SAMPLE, Exact(), 45),
        (FEATURE, CG(1), 45),
        (FEATURE, CG(3), 77),
        (FEATURE, Exact(), 43),
    ],
)
def test_backward_takes_few_calls(sizes: tuple[int, int], solver: Solver, most: int) -> None:
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(*sizes, solver=solver)
    output, G = layer(torch.rand(100, sizes[0])), torch.randn(100, sizes[1])

    def backward() -> None:
        layer.weight.grad = layer.bias.grad = None
        output.backward(G, retain_graph=True)

    assert torch_calls(backward) <= most


def test_forward_takes_few_calls() -> None:
    layer = proxprop.nn.Linear(64, 256)
    assert torch_calls(lambda: layer(torch.rand(100, 64))) <= 6
