"""Put the direction where the gradient was."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proxprop.backward import no_autocast
from proxprop.deferred.equation import Block, Equation
from proxprop.deferred.operator import Operator
from proxprop.deferred.shards import Piece, share
from proxprop.solvers import DIAGONAL
from proxprop.transfer import Transfer


def direct(equation: Equation, operator: Operator) -> None:
    """Turn the gradients of an equation's parameters into its direction, in place.

    Args:
        equation: whose parameters hold B in `.grad`.
        operator: what to apply to B.
    """
    mine = share(equation)
    if DIAGONAL in mine.layout.spaces:
        _rescale(mine.blocks, operator.scale()[0, mine.entries])
        return
    B = mine.layout.to_features(tuple(_read(block, operator.kept) for block in mine.blocks))
    with no_autocast(B.device.type):
        solution = operator.apply(B)
    equation.layer._note_failure(solution.failed)
    _write(mine.blocks, mine.layout, solution.value)
    mine.put_back()


def _read(block: Block | Piece | None, like: Tensor) -> Tensor | None:
    """A block's gradient where S is and in its precision; zero where nothing reached it."""
    if block is None:
        return None
    gradient = block.gradient
    return like.new_zeros(block.shape) if gradient is None else gradient.to(like)


def _write(blocks: Sequence[Block | Piece | None], layout: Transfer, D: Tensor) -> None:
    for block, direction in zip(blocks, layout.from_features(D), strict=True):
        if block is not None and block.gradient is not None:
            assert direction is not None
            block.gradient.copy_(direction)


def _rescale(blocks: Sequence[Block | Piece | None], scale: Tensor) -> None:
    """Multiply every entry of a table's gradient by its scale."""
    (block,) = blocks
    gradient = block.gradient if block is not None else None
    if gradient is None:
        return
    if gradient.is_sparse:
        assert isinstance(block, Block)
        coalesced = gradient.coalesce()
        index, values = coalesced.indices(), coalesced.values()
        values = (values * scale[index[0]][:, None]).to(values.dtype)
        block.parameter.grad = torch.sparse_coo_tensor(
            index, values, gradient.shape, is_coalesced=True, check_invariants=False
        )
        return
    gradient.mul_(scale[:, None].to(gradient.device))
