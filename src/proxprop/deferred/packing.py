"""Symmetric matrices as they are sent: packed triangles, in buckets.

S is symmetric, so only `features·(features + 1)/2` numbers a group are sent. The triangle is folded into two
rectangles (LAPACK's rectangular full packed format), which takes block copies and no table of indices: with
`p = ⌈features/2⌉`, `q = ⌊features/2⌋` and

    S = [ P  R ]    P [p, p], R [p, q], Q [q, q],
        [ Rᵀ Q ]

R is one rectangle, and the upper triangle of P above the lower triangle of Q is the other, `[q + 1, p]`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""Most bytes sent in one call, unless one matrix alone has more; DDP's default."""


def packed_size(shape: Sequence[int]) -> int:
    """How many numbers of a tensor of this shape are sent: triangles of `[groups, n, n]`, else all.

    Example:
        >>> packed_size((2, 3, 3)), packed_size((2, 3))
        (12, 6)
    """
    if _is_symmetric(shape):
        groups, features, _ = shape
        return groups * (features * (features + 1) // 2)
    return torch.Size(shape).numel()


def pack(S: Tensor, out: Tensor) -> None:
    """Write the upper triangles of S `[groups, features, features]` into `out`; any other tensor as it is.

    Args:
        S: symmetric matrices, or a tensor that has no symmetry, such as a diagonal `[groups, features]`.
        out: `[packed_size(S.shape)]`, overwritten.

    Example:
        >>> S = torch.tensor([[[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]]])
        >>> out = torch.empty(packed_size(S.shape))
        >>> pack(S, out)
        >>> out
        tensor([3., 5., 1., 2., 6., 4.])
    """
    if not _is_symmetric(S.shape):
        out.copy_(S.reshape(-1))
        return
    p, q = _halves(S.shape[-1])
    R, PQ = _rectangles(out, S.shape)
    R.copy_(S[:, :p, p:])
    PQ[:, p:] = 0
    PQ[:, :p] = S[:, :p, :p].triu()
    PQ[:, 1:, :q] += S[:, p:, p:].tril()


def unpack(packed: Tensor, S: Tensor) -> None:
    """Write what `pack` made of it back into S, both triangles.

    Example:
        >>> S = torch.empty(1, 2, 2)
        >>> unpack(torch.tensor([2.0, 1.0, 3.0]), S)
        >>> S
        tensor([[[1., 2.],
                 [2., 3.]]])
    """
    if not _is_symmetric(S.shape):
        S.copy_(packed.view(S.shape))
        return
    p, q = _halves(S.shape[-1])
    R, PQ = _rectangles(packed, S.shape)
    S[:, :p, p:] = R
    S[:, p:, :p] = R.mT
    upper, lower = PQ[:, :p].triu(), PQ[:, 1:, :q].tril()
    S[:, :p, :p] = upper + upper.triu(1).mT
    S[:, p:, p:] = lower + lower.tril(-1).mT


def _is_symmetric(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2]


def _halves(features: int) -> tuple[int, int]:
    return features - features // 2, features // 2


def _rectangles(packed: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """R `[groups, p, q]` and P's upper triangle above Q's lower one `[groups, q + 1, p]`, as views."""
    groups, (p, q) = shape[0], _halves(shape[-1])
    first, second = packed.split([groups * p * q, groups * (q + 1) * p])
    return first.view(groups, p, q), second.view(groups, q + 1, p)


def buckets(tensors: Sequence[Tensor], owners: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of tensors that are sent together: to one rank, of one type and device, under `limit` bytes.

    Buckets come in the order of their last tensors, which is the order in which they are complete. They depend on
    owners, shapes and types only, so that every rank comes to the same division.

    Example:
        >>> buckets([torch.zeros(10)] * 4, owners=[0, 1, 0, 0], limit=100)
        [[1], [0, 2], [3]]
    """
    found: list[list[int]] = []
    last: dict[object, list[int]] = {}
    room: dict[object, int] = {}
    for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
        key = owner, tensor.dtype, tensor.device
        size = packed_size(tensor.shape) * tensor.element_size()
        if key not in last or size > room[key]:
            found.append([])
            last[key], room[key] = found[-1], limit
        last[key].append(index)
        room[key] -= size
    return sorted(found, key=lambda bucket: bucket[-1])
