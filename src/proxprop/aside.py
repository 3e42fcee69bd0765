"""Solve on a CUDA stream of its own, beside the backward pass that goes on.

A factorisation is a chain of small kernels that leaves most of a GPU idle, and nothing but the optimizer waits for a
direction. So the output gradient is forked: one copy goes on to the layer's input, the other to a node that belongs to
a second stream. Autograd runs a node's backward on the stream of its forward and makes streams wait for one
another where they must; at the end of backward the caller's stream waits for the directions.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proxprop.distributed import running
from proxprop.solve import Exact, Solver

LATENCY_BOUND: tuple[type[Solver], ...] = (Exact,)
"""Solvers that leave most of a GPU idle."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_its_stream(device: torch.device) -> AbstractContextManager[object]:
    """Within, nodes are made whose backward runs on the stream that directions are solved on."""
    return torch.cuda.stream(_stream(device))


def has_streams(tensor: Tensor) -> bool:
    """Whether a tensor is on a device with streams."""
    return tensor.is_cuda


def leaves(output: Tensor, solver: Solver, handles: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The parameters behind `handles` where their direction can be solved aside, else None.

    Not where something else acts in the midst of a backward pass: hooks that could read or change a parameter as
    soon as its gradient is there, other ranks that reduce gradients, checkpoints that compute inputs again.

    Args:
        output: the layer's output.
        solver: of the layer.
        handles: views of the layer's parameters.
    """
    if not isinstance(solver, LATENCY_BOUND) or torch.compiler.is_compiling() or not has_streams(output):
        return None
    if running() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    found = [handle if handle is None or handle._base is None else handle._base for handle in handles]
    return found if all(map(_plain, found, handles)) else None


def _plain(parameter: Tensor | None, handle: Tensor | None) -> bool:
    """Whether this is a whole leaf that nobody watches."""
    if parameter is None or handle is None:
        return True
    hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.is_leaf and parameter.shape == handle.shape and not hooked


def keep(tensors: Sequence[Tensor]) -> None:
    """Tell the allocator that the stream uses these, which were made on another."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(_stream(tensor.device))


class Fork(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands the gradient to the output and to a token."""

    @staticmethod
    def forward(output: Tensor, token: Tensor) -> Tensor:
        """Return the output, detached so that an in-place activation may follow."""
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient, twice."""
        return G, G
