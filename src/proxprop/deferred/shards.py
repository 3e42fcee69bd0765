"""Gradients that are spread over ranks (FSDP2): each rank solves for the outputs it owns.

`D = (λI + S)⁻¹B` acts on features, and columns of B are outputs. A parameter that is sharded by outputs therefore
needs nothing from other ranks but S. Where shards cut through a system's features or groups, or one step length is
shared by all outputs, the gradient is gathered, solved as a whole, and each rank keeps its shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proxprop.deferred.equation import Block, Equation
from proxprop.distributed import mesh_of
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import local_rows
from proxprop.transfer import Shapes, Transfer


@dataclass(frozen=True)
class Piece:
    """What this rank solves of a block; read and written like the block itself."""

    gradient: Tensor | None
    shape: torch.Size


@dataclass(frozen=True)
class Share:
    """What this rank solves of a system.

    Attributes:
        blocks: None for one that is not trained.
        layout: how they lie in the system.
        entries: the entries of a diagonal S that are about them.
        put_back: to be called once the blocks hold the direction.
    """

    blocks: Sequence[Block | Piece | None]
    layout: Transfer
    entries: slice = field(default_factory=lambda: slice(None))
    put_back: Callable[[], None] = field(default=lambda: None)


def share(equation: Equation) -> Share:
    """The outputs of a system that this rank solves: all of them, unless its parameters are spread over ranks."""
    blocks = [block if block is not None and block.trained else None for block in equation.blocks]
    present = [block for block in blocks if block is not None]
    if not any(mesh_of(block.parameter) is not None for block in present):
        return Share(blocks, equation.layout)
    own = [_own(block) for block in blocks]
    if DIAGONAL in equation.layout.spaces:
        return Share(own, equation.layout, _entries(present[0]))
    if _by_outputs(equation, blocks):
        shapes: Shapes = [piece.shape if piece is not None else None for piece in own]
        return Share(own, equation.layout_of(shapes))
    return _gathered(equation, blocks)


def _own(block: Block | None) -> Piece | None:
    """This rank's shard of a parameter, in whole."""
    if block is None:
        return None
    gradient = block.parameter.grad
    shape = local(block.parameter).shape
    return Piece(local(gradient) if gradient is not None else None, shape)


def _by_outputs(equation: Equation, blocks: Sequence[Block | None]) -> bool:
    """Whether shards are whole outputs, each with all of its features, that can be solved alone.

    Every rank must come to the same answer, so that it is about one row and not about the shard that a rank has.
    """
    if not getattr(equation.layer._settings.solver, "per_output", True):
        return False
    if any(b is not None and b.shape != b.parameter.shape for b in blocks):
        return False  # a slice of a parameter, whose shards do not follow the slice
    if not all(b is None or _sharded_dimension(b.parameter) == 0 for b in blocks):
        return False
    row: Shapes = [torch.Size([1, *b.shape[1:]]) if b is not None else None for b in blocks]
    whole, single = equation.layout.sizes, equation.layout_of(row).sizes
    return (whole.groups, single.groups, single.features, single.outputs) == (1, 1, whole.features, 1)


def _gathered(equation: Equation, blocks: Sequence[Block | None]) -> Share:
    """The whole system, to be cut again when it is solved."""
    whole = {
        b.parameter: _full(b.parameter.grad) for b in blocks if b is not None and b.parameter.grad is not None
    }
    pieces = [
        Piece(whole[b.parameter][b.rows] if b.parameter in whole else None, b.shape)
        if b is not None
        else None
        for b in blocks
    ]

    def put_back() -> None:
        for parameter, direction in whole.items():
            local(parameter.grad).copy_(_shard_of(direction, parameter))

    return Share(pieces, equation.layout, put_back=put_back)


def _sharded_dimension(parameter: Any) -> int | None:
    """The dimension that a DTensor is cut along; None where it is not cut along just one."""
    cut = [placement.dim for placement in parameter.placements if placement.is_shard()]
    return cut[0] if len(cut) == 1 else None


def local(tensor: Any) -> Tensor:
    """What this rank holds; shares memory."""
    held: Tensor = tensor.to_local() if mesh_of(tensor) is not None else tensor
    return held


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if mesh_of(tensor) is not None else tensor
    return full


def _shard_of(full: Tensor, parameter: Any) -> Tensor:
    """The part of a full tensor that this rank holds of the parameter."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements).to_local()


def _entries(block: Block) -> slice:
    """The rows of a table that this rank holds."""
    return local_rows(block.parameter)
