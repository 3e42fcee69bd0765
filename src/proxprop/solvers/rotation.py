"""Rotate samples, so that their mean becomes one of them.

Activations after a ReLU, raw pixels and the ones column of a bias share a mean that is often far larger than what
tells samples apart. `K = AAᵀ` then holds the differences in its last digits. An orthogonal H changes neither the system
nor D: with `A' = HA` and `G' = HG` the solution is `U' = HU`, and `A'ᵀU' = AᵀU`. Here H is the Householder reflection
that maps `1/√N` to the first unit vector: row 0 of A' holds all of the mean, the others the differences to all digits.
"""

from torch import Tensor

from proxprop import device

LEAST_REST = 0.05
"""Smallest share of K's trace beside the mean's; with less, K is not accurate enough without rotation."""


def rotate(X: Tensor) -> Tensor:
    """`HX` for X `[groups, samples, columns]` with at least two samples; `H = Hᵀ = H⁻¹`.

    With `y = x − x₀` the first row becomes `√N·x₀ + Σy/√N` and every other `y − Σy/(N − √N)`: rows that are equal
    become zero, not rounding.

    Example:
        >>> import torch
        >>> rotate(torch.tensor([[[1.0], [2.0], [1.0], [2.0]]])).flatten()
        tensor([ 3.,  0., -1.,  0.])
    """
    if device.use_triton(X):
        from proxprop.kernels import rotation

        return rotation.rotate(X)
    samples, first = X.shape[-2], X[..., :1, :]
    root = samples**0.5
    rotated: Tensor = X - first
    total = rotated.sum(-2, keepdim=True)
    rotated -= total / (samples - root)
    rotated[..., :1, :] = root * first + total / root
    return rotated


def rotate_both(K: Tensor) -> Tensor:
    """`HKH` for K `[groups, samples, samples]`, where K can't be formed from rotated rows."""
    return rotate(rotate(K).mT.contiguous())


def always_rotates(samples: int, like: Tensor) -> bool:
    """Whether samples are rotated without a look at K: a GPU would have to wait for it, and a compiler can't."""
    return samples > 1 and (like.device.type != "cpu" or device.is_traced())


def mean_dominates(K: Tensor) -> bool:
    """Whether the mean's share of K's trace, `1ᵀK1/N`, leaves too few digits for the rest.

    One sample is its mean, and there is no rest. Nor would a GPU have to be asked.
    """
    samples = K.shape[-1]
    if samples == 1:
        return False
    traces, sums = K.diagonal(dim1=-2, dim2=-1).sum(-1).tolist(), K.sum((-2, -1)).tolist()
    least = (1 - LEAST_REST) * samples
    return any(total > least * trace for total, trace in zip(sums, traces, strict=True))
