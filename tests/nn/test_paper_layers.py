"""The paper's layers in the middle of a model: their directions are the dense oracle's, for the G the model makes."""

import copy

import pytest
from torch import nn

import proxprop
from cases import assert_directions, oracle, randn
from proxprop import CG, Exact


def row(feature: str, make, shape: tuple[int, ...]):
    return pytest.param(make, shape, marks=pytest.mark.compatibility(feature, section="Layers"), id=feature)


@pytest.mark.parametrize(("make", "shape"), [
    row("nn.Linear", lambda: nn.Linear(5, 4), (3, 2, 5)),
    row("nn.Conv1d", lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (3, 2, 7)),
    row("nn.Conv2d", lambda: nn.Conv2d(2, 3, (3, 2), padding=1, dilation=(1, 2)), (2, 2, 4, 5)),
    row("nn.Conv3d", lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 2, 3, 4, 3)),
    row("Grouped and depthwise convolutions", lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 4)),
    row("Grouped and depthwise convolutions", lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 4)),
    row("Padding modes", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 5)),
    row("Padding modes", lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), (2, 2, 4, 5)),
])  # fmt: skip
@pytest.mark.parametrize("solver", [CG(1), CG(3), Exact()], ids=str)
def test_direction_in_the_middle_of_a_model(make, shape, solver) -> None:
    layer = make().double()
    plain = nn.Sequential(nn.Tanh(), layer, nn.Softplus(), nn.Flatten())
    model = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.3, include_last=True)
    input = randn(*shape, seed=1)
    model(input).square().mean().backward()
    output = layer(input.tanh()).detach().requires_grad_()
    plain[2:](output).square().mean().backward()
    assert_directions(model[1], oracle(layer, input.tanh(), output.grad, solver, tau_theta=0.3))
