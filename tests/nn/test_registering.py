"""Linear layers of other libraries, made known by one call."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import SOLVERS, assert_directions, by_name, oracle, randn
from layers import Transposed, last
from proxprop.solvers import Solver


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


@pytest.mark.compatibility(
    "third-party linear layers", section="Layers", note="one call of `proxprop.register`"
)
@pytest.mark.parametrize(("solver", "space"), [(s, sp) for s in SOLVERS for sp in s.spaces], **by_name)
@pytest.mark.usefixtures("registry")
def test_registered_layers_are_solved_like_linear_ones(solver: Solver, space: str) -> None:
    proxprop.register(Transposed, transposed=True)
    torch.manual_seed(0)
    plain = Transposed(3, 4).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space=space, include_last=True)
    input, G = randn(2, 5, 4, seed=1), randn(2, 5, 3, seed=2)
    layer(input).backward(G)
    assert_directions(layer, oracle(plain, input, G, solver, 0.7, owners=last))
    assert pickle.loads(pickle.dumps(layer)).tau_theta == 0.7
    assert type(proxprop.revert(layer)) is Transposed


@pytest.mark.usefixtures("registry")
def test_registering_what_is_not_linear_is_told() -> None:
    proxprop.register(Halved)
    model = proxprop.convert(nn.Sequential(Halved(3, 3), nn.Linear(3, 1)))
    with pytest.raises(
        ValueError, match=r"Halved was registered as a layer that computes x Wᵀ \+ b but its forward"
    ):
        model(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"Linear is built in and can't be registered"):
        proxprop.register(nn.Linear)
    with pytest.raises(TypeError, match=r"register should be given a module class but was given 'Conv1D'"):
        proxprop.register("Conv1D")


@pytest.mark.usefixtures("registry")
def test_a_registered_layer_takes_a_first_batch_of_nan() -> None:
    proxprop.register(Transposed, transposed=True)
    layer = proxprop.convert(Transposed(3, 4), include_last=True)
    layer(torch.full((2, 4), float("nan"))).sum().backward()
    assert not bool(layer.weight.grad.isfinite().any())
