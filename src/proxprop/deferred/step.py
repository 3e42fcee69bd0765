"""Solve one accumulated system, and put the direction where the gradient was."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proxprop.deferred.shards import Piece, share
from proxprop.deferred.system import Block, System
from proxprop.settings import Settings
from proxprop.solve import DIAGONAL, Solution
from proxprop.transfer import Transfer


def direct(system: System, S: Tensor, samples: Tensor | None) -> None:
    """Turn the gradients of a system's parameters into its direction, in place.

    `D = (I/τ_θ + S)⁻¹B`, or `D = (I + τ_θ·S/N)⁻¹B` where the scaling is "gradient", with B the gradient.

    Args:
        system: whose parameters hold B in `.grad`.
        S: `[groups, features, features]`, or a diagonal `[groups, features]`; overwritten.
        samples: N, for the scaling "gradient".
    """
    mine, settings = share(system), system.layer._settings
    if settings.scaling == "gradient":
        assert samples is not None
        S = S.div_(samples.clamp(min=1.0))
    factor = 1.0 if settings.scaling == "paper" else 1 / settings.tau_theta
    if DIAGONAL in mine.layout.spaces:
        _divide(mine.blocks, S[0, mine.entries], 1 / settings.tau_theta, factor)
        return
    B = mine.layout.to_features(tuple(_read(block, S) for block in mine.blocks))
    solution = _solve(S, B, settings)
    system.layer._failures.note(solution.failed)
    D = solution.value if factor == 1.0 else solution.value.mul_(factor)
    _write(mine.blocks, mine.layout, D)
    mine.put_back()


def _solve(S: Tensor, B: Tensor, settings: Settings) -> Solution:
    if B.numel() == 0:
        return Solution(B)
    return settings.solver.features(S, B, 1 / settings.tau_theta)


def _read(block: Block | Piece | None, S: Tensor) -> Tensor | None:
    """A block's gradient where S is and in its precision; zero where nothing reached it."""
    if block is None:
        return None
    gradient = block.gradient
    return S.new_zeros(block.shape) if gradient is None else gradient.to(S)


def _write(blocks: Sequence[Block | Piece | None], layout: Transfer, D: Tensor) -> None:
    for block, direction in zip(blocks, layout.from_features(D), strict=True):
        if block is not None and block.gradient is not None:
            assert direction is not None
            block.gradient.copy_(direction)


def _divide(blocks: Sequence[Block | Piece | None], counts: Tensor, damping: float, factor: float) -> None:
    """`factor·B / (λ + count)` for every entry of a table."""
    (block,) = blocks
    gradient = block.gradient if block is not None else None
    if gradient is None:
        return
    scale = factor / (counts + damping)
    if gradient.is_sparse:
        assert isinstance(block, Block)
        coalesced = gradient.coalesce()
        index, values = coalesced.indices(), coalesced.values()
        values = (values * scale[index[0]][:, None]).to(values.dtype)
        block.parameter.grad = torch.sparse_coo_tensor(index, values, gradient.shape, is_coalesced=True)
        return
    gradient.mul_(scale[:, None].to(gradient.device))
