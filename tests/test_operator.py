"""The operator of a compiled backward pass: what torch asks of one, and that it is told all of a layer."""

import pytest
import torch
from torch import nn

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact
from proxprop.compiled import call_numbers, call_of, can_be_described
from proxprop.nn.conv import geometry
from proxprop.settings import Settings
from proxprop.solvers import Solver
from proxprop.transfer import (
    ConvTransfer,
    ConvTransposeTransfer,
    EmbeddingTransfer,
    LayerCall,
    LinearTransfer,
)

CONVOLUTIONS = [
    nn.Conv1d(4, 6, 3, groups=2, padding="same", dilation=2),
    nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), padding_mode="circular"),
    nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate"),
    nn.ConvTranspose2d(2, 4, 3, stride=2, dilation=(1, 2), groups=2),
]


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=lambda conv: type(conv).__name__)
def test_numbers_hold_all_of_a_convolution(conv: nn.Module) -> None:
    kind = ConvTransposeTransfer if isinstance(conv, nn.ConvTranspose2d) else ConvTransfer
    call = LayerCall(kind, (geometry(conv),))
    assert call_of(kind.__name__, call_numbers(call)) == call


@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_hold_all_of_a_linear_layer(transposed: bool) -> None:
    call = LayerCall(LinearTransfer, (transposed,))
    assert call_of("LinearTransfer", call_numbers(call)) == call


def test_what_numbers_can_not_hold_is_left_to_be_traced() -> None:
    class Own(CG):
        pass

    assert can_be_described(LayerCall(LinearTransfer), Settings(CG(2)))
    assert not can_be_described(LayerCall(EmbeddingTransfer, (None, False)), Settings(CG(2)))
    assert not can_be_described(LayerCall(LinearTransfer), Settings(Own(2)))


@pytest.mark.parametrize("trained", ["weight and bias", "weight", "bias"])
@pytest.mark.parametrize(
    ("solver", "numbers"), [(CG(2), [2, 1]), (CG(2, per_output=False), [2, 0]), (Exact(), [])], ids=str
)
def test_the_operator_is_what_torch_asks_for_and_gives_the_layers_direction(
    solver: Solver, numbers: list[int], trained: str
) -> None:
    torch.manual_seed(0)
    layer = proxprop.nn.Linear(4, 3, solver=solver, tau_theta=0.7, scaling="gradient", dtype=torch.float64)
    layer.weight.requires_grad_("weight" in trained)
    layer.bias.requires_grad_("bias" in trained)
    input, G = randn(5, 4, seed=1), randn(5, 3, seed=2)
    layer(input).backward(G)
    parameters = layer.weight, layer.bias
    shapes = [list(p.shape) if p.requires_grad else None for p in parameters]
    arguments = (input, G, *shapes, "LinearTransfer", [0], numbers, 0.7, "gradient", None)
    torch.library.opcheck(torch.ops.proxprop.direction.default, arguments)
    found = torch.ops.proxprop.direction(*arguments)
    expected = [p.grad for p in parameters if p.requires_grad]
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-14


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_warns_of_a_failed_factorisation() -> None:
    model = nn.Sequential(proxprop.nn.Linear(4, 3, solver=Exact(), tau_theta=1e30, space="feature"))
    compiled, input = (
        torch.compile(model, backend="aot_eager"),
        torch.tensor([[0.1], [0.2], [0.7]]).expand(3, 4),
    )
    with pytest.warns(
        RuntimeWarning, match=r"a compiled layer .*\[3, 4\] and \[3\]: I/τ_θ \+ AᵀA is not positive"
    ):
        compiled(input).sum().backward()
    compiled(input).sum().backward()  # and not again
