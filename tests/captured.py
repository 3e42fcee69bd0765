"""What a layer of a model was called with, and its direction by an independent computation."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

import proxprop
from cases import textbook_cg
from models import GraphConv, ModelCase
from proxprop import Exact
from proxprop.solvers import CG, Solver


def convert(case: ModelCase, model: nn.Module, solver: Solver = CG(3)) -> nn.Module:
    return proxprop.convert(model, solver, tau_theta=0.5, module_types=case.module_types)


def captured(case: ModelCase, model: nn.Module) -> dict[str, tuple[tuple[Tensor, ...], Tensor]]:
    """What each looked-at layer of a plain model was called with, and the gradient at its output."""
    found: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}

    def look(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen = tuple(input.detach().clone() for input in inputs)
        output.register_hook(lambda G: found.__setitem__(name, (seen, G.clone())))

    for name in case.layers:
        model.get_submodule(name).register_forward_hook(
            lambda _, inputs, output, name=name: look(name, inputs, output)
        )
    case.loss(model).backward()
    return found


def rows(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The layer's input as `[samples, features]`, without the ones."""
    input = inputs[0]
    if isinstance(layer, GraphConv):
        return inputs[1] @ input
    if isinstance(layer, nn.Conv2d):
        patches = functional.unfold(input, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    if isinstance(layer, nn.ConvTranspose2d):
        return transposed_rows(layer, input)
    return input.flatten(0, -2)


def transposed_rows(layer: nn.ConvTranspose2d, input: Tensor) -> Tensor:
    """A transposed convolution is a convolution, kernel turned round, of the input with zeros between its pixels."""
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    batch, channels, height, width = input.shape
    spread = input.new_zeros(batch, channels, (height - 1) * stride + 1, (width - 1) * stride + 1)
    spread[..., ::stride, ::stride] = input
    return functional.unfold(spread, kernel, padding=kernel - 1).transpose(1, 2).flatten(0, 1)


def columns(layer: nn.Module, G: Tensor) -> Tensor:
    """An output-shaped array as `[samples, outputs]`."""
    return G.movedim(1, -1).flatten(0, -2) if G.dim() == 4 else G.flatten(0, -2)


def weight_of(layer: nn.Module, D: Tensor) -> Tensor:
    """`D [features, outputs]` in the shape of the layer's weight."""
    if isinstance(layer, GraphConv | Conv1D):
        return D
    if isinstance(layer, nn.ConvTranspose2d):
        inputs, outputs, *kernel = layer.weight.shape
        return D.T.view(outputs, inputs, *kernel).transpose(0, 1).flip(2, 3)
    return D.T.reshape(layer.weight.shape)


def expected_direction(
    layer: nn.Module, inputs: tuple[Tensor, ...], G: Tensor, solver: Solver
) -> dict[str, Tensor]:
    """Dense, in float64, without the package."""
    A, G = rows(layer, inputs), columns(layer, G)
    if layer.bias is not None:
        A = torch.cat([A, A.new_ones(len(A), 1)], dim=1)
    M, B = A.T @ A + torch.eye(A.shape[1], dtype=A.dtype) / 0.5, A.T @ G
    if isinstance(solver, Exact):
        D = torch.linalg.solve(M, B)
    elif isinstance(layer, GraphConv):  # any class that is in no table: one step length for all outputs
        stacked = torch.kron(torch.eye(B.shape[1], dtype=M.dtype), M)
        D = textbook_cg(stacked, B.T.flatten(), solver.iterations).view_as(B.T).T
    else:
        D = torch.stack([textbook_cg(M, b, solver.iterations) for b in B.T], dim=1)
    if layer.bias is None:
        return {"weight": weight_of(layer, D)}
    return {"weight": weight_of(layer, D[:-1]), "bias": D[-1]}
