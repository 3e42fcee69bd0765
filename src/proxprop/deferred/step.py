"""Solve one accumulated system, and put the direction where the gradient was."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
    layout, settings = system.layout, system.layer._settings
    blocks = [block if block is not None and block.trained else None for block in system.blocks]
    if settings.scaling == "gradient":
        assert samples is not None
        S = S.div_(samples.clamp(min=1.0))
    factor = 1.0 if settings.scaling == "paper" else 1 / settings.tau_theta
    if DIAGONAL in layout.spaces:
        _divide(blocks, S[0], 1 / settings.tau_theta, factor)
        return
    B = layout.to_features(tuple(_read(block, S.dtype) for block in blocks))
    solution = _solve(S, B, settings)
    system.layer._failures.note(solution.failed)
    D = solution.value if factor == 1.0 else solution.value.mul_(factor)
    _write(blocks, layout, D)


def _solve(S: Tensor, B: Tensor, settings: Settings) -> Solution:
    if S.shape[-1] == 0:
        return Solution(B)
    return settings.solver.features(S, B, 1 / settings.tau_theta)


def _read(block: Block | None, dtype: torch.dtype) -> Tensor | None:
    """A block's gradient in the precision to solve in; zero where nothing reached it."""
    if block is None:
        return None
    gradient = block.gradient
    if gradient is None:
        return torch.zeros(block.shape, dtype=dtype, device=block.parameter.device)
    return gradient.to(dtype)


def _write(blocks: Sequence[Block | None], layout: Transfer, D: Tensor) -> None:
    for block, direction in zip(blocks, layout.from_features(D), strict=True):
        if block is not None and block.gradient is not None:
            assert direction is not None
            block.gradient.copy_(direction)


def _divide(blocks: Sequence[Block | None], counts: Tensor, damping: float, factor: float) -> None:
    """`factor·B / (λ + count)` for every entry of a table."""
    (block,) = blocks
    gradient = block.parameter.grad if block is not None else None
    if gradient is None:
        return
    scale = factor / (counts + damping)
    if gradient.is_sparse:
        assert block is not None
        coalesced = gradient.coalesce()
        index, values = coalesced.indices(), coalesced.values()
        values = (values * scale[index[0]][:, None]).to(values.dtype)
        block.parameter.grad = torch.sparse_coo_tensor(index, values, gradient.shape, is_coalesced=True)
        return
    gradient.mul_(scale[:, None])
