"""One kernel for all that happens between two products with K in sample-space conjugate gradients.

Column-local work on arrays `[groups, samples, outputs]`: two inner products and four updates. As separate torch
operations it reads and writes those arrays about twenty times a step and costs as many launches; here each array
is read and written once. A program holds a block of columns in registers, so it needs few samples.
`proxprop.solve.cg.sample_cg` is the same recurrence in plain torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 8192
"""Numbers of one array that a program holds: 32 a thread with 8 warps."""


@triton.jit
def _advance(
    RHO, K_RHO, NEXT_RHO, PI, K_PI, U, SQUARED, SCALE, NOISE, SHORTEST, damping, samples, outputs,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row < samples)[:, None] & (column < outputs)[None, :]
    at = group.to(tl.int64) * samples * outputs + row[:, None].to(tl.int64) * outputs + column[None, :]
    at_column = group * outputs + column
    in_column = column < outputs

    rho = tl.load(RHO + at, mask=inside, other=0.0)
    K_rho = tl.load(K_RHO + at, mask=inside, other=0.0)
    if FIRST:
        scale = tl.max(tl.abs(rho), axis=0)
        scale = tl.where(scale == 0, 1.0, scale)
        tl.store(SCALE + at_column, scale, mask=in_column)
        rho = rho / scale[None, :]
        K_rho = K_rho / scale[None, :]
    squared = tl.sum(rho * K_rho, axis=0)
    if not FIRST:
        noise = tl.load(NOISE + group * samples + row, mask=row < samples, other=0.0)
        squared = tl.where(squared <= tl.sum(noise[:, None] * rho * rho, axis=0), 0.0, squared)
    if FIRST:
        pi = rho
        K_pi = K_rho
    else:
        before = tl.load(SQUARED + at_column, mask=in_column, other=0.0)
        ratio = tl.where(before == 0, 0.0, squared / before)
        pi = rho + ratio[None, :] * tl.load(PI + at, mask=inside, other=0.0)
        K_pi = K_rho + ratio[None, :] * tl.load(K_PI + at, mask=inside, other=0.0)
    curvature = damping * tl.sum(pi * K_pi, axis=0) + tl.sum(K_pi * K_pi, axis=0)
    length = tl.where(curvature == 0, 1.0 / damping, squared / curvature)
    if FIRST:  # comparisons that let NaN through
        shortest = tl.load(SHORTEST + group)
        length = tl.where(length > 1.0 / damping, 1.0 / damping, length)
        length = tl.where(length < shortest, shortest, length)
    u = length[None, :] * pi
    if not FIRST:
        u += tl.load(U + at, mask=inside, other=0.0)
    if LAST:
        if not FIRST:
            scale = tl.load(SCALE + at_column, mask=in_column, other=1.0)
        u *= scale[None, :]
    tl.store(U + at, u, mask=inside)
    if not LAST:
        tl.store(NEXT_RHO + at, rho - length[None, :] * (damping * pi + K_pi), mask=inside)
        tl.store(PI + at, pi, mask=inside)
        tl.store(K_PI + at, K_pi, mask=inside)
        tl.store(SQUARED + at_column, squared, mask=in_column)


def sample_cg(K: Tensor, G: Tensor, damping: float, iterations: int, noise: Tensor) -> Tensor:
    """`proxprop.solve.cg.sample_cg` for one step length an output, each step as a product and one kernel.

    Args:
        K: `[groups, samples, samples]`, contiguous float32.
        G: `[groups, samples, outputs]`.
        damping: λ.
        iterations: how many steps.
        noise: rounding of K's diagonal `[groups, samples]`.

    Returns:
        U, in the scale of G.
    """
    G = G.contiguous()
    groups, samples, outputs = G.shape
    U, next_rho, pi, K_pi = (torch.empty_like(G) for _ in range(4))
    rho = G
    noise = noise.contiguous()
    shortest = 1 / (damping + K.diagonal(dim1=-2, dim2=-1).sum(-1))
    squared, scale = G.new_empty(groups, outputs), G.new_empty(groups, outputs)
    rows = triton.next_power_of_2(samples)
    columns = max(1, NUMBERS // rows)
    for step in range(iterations):
        K_rho = torch.bmm(K, rho)
        _advance[(triton.cdiv(outputs, columns), groups)](
            rho, K_rho, next_rho, pi, K_pi, U, squared, scale, noise, shortest, damping, samples, outputs,
            FIRST=step == 0, LAST=step == iterations - 1, ROWS=rows, COLUMNS=columns, num_warps=8,
        )  # fmt: skip
        rho = next_rho
    return U
