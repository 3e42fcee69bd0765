"""Rotate samples in one launch; `proxprop.solvers.rotation` has the mathematics and the plain twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxprop import tuning
from proxprop.kernels.launch import launches, on_its_device


@triton.jit
def rotated(x, row, samples, root):
    """Rotate whole columns `[rows, columns]`; rows beyond the samples are undefined."""
    is_first = row[:, None] == 0
    first = tl.sum(tl.where(is_first, x, 0.0), axis=0)
    y = tl.where((row < samples)[:, None], x - first[None, :], 0.0)
    total = tl.sum(y, axis=0)
    top = root * first + total / root
    return tl.where(is_first, top[None, :], y - (total / (samples - root))[None, :])


@triton.jit
def _rotate(
    X, OUT, samples, columns, group_stride, stride, root, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate a few columns of any length: sum over all rows, then shift the rows."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    X += group * group_stride + column
    OUT += group * samples * columns + column
    first = tl.load(X, mask=there, other=0.0)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, samples, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < samples)[:, None] & there[None, :]
        x = tl.load(X[None, :] + row[:, None].to(tl.int64) * stride, mask=inside, other=0.0)
        total += tl.sum(tl.where(inside, x - first[None, :], 0.0), axis=0)
    top, mean = root * first + total / root, total / (samples - root)
    for start in range(0, samples, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < samples)[:, None] & there[None, :]
        x = tl.load(X[None, :] + row[:, None].to(tl.int64) * stride, mask=inside, other=0.0)
        x = tl.where(row[:, None] == 0, top[None, :], x - first[None, :] - mean[None, :])
        tl.store(OUT[None, :] + row[:, None].to(tl.int64) * columns, x, mask=inside)


@on_its_device
def rotate(X: Tensor) -> Tensor:
    """`HX` for X `[groups, samples, columns]`, float32."""
    if X.stride(-1) != 1:
        X = X.contiguous()
    groups, samples, columns = X.shape
    out = torch.empty(X.shape, dtype=X.dtype, device=X.device)
    whole = samples <= tuning.ROTATION_WHOLE_ROWS
    rows = triton.next_power_of_2(samples) if whole else tuning.ROTATION_ROWS
    launch = launches("rotation.rotate", [X])
    launch(
        _rotate, (triton.cdiv(columns, tuning.ROTATION_COLUMNS), groups),
        X, out, samples, columns, X.stride(0), X.stride(1), samples**0.5,
        ROWS=rows, COLUMNS=tuning.ROTATION_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out
