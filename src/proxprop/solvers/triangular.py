"""The inverse of a triangular matrix by halves, so that nearly all of its work is products.

    [A 0]⁻¹   [   A⁻¹       0 ]
    [B C]   = [−C⁻¹BA⁻¹    C⁻¹]

Substitution for the columns of the identity takes a GPU several times as long as products of as many FLOPs. So only
small blocks on the diagonal are inverted by substitution, all of them at once, and pairs of blocks are joined until one
is left. The error is that of substitution. No product is rounded to TF32, even where the caller allows it.
"""

import torch
from torch import Tensor

from proxprop import device, tuning
from proxprop.solvers.matmul import transposed_product


def inverse_of_triangle(L: Tensor) -> Tensor:
    """`L⁻¹` for lower triangular L `[groups, size, size]`.

    Example:
        >>> inverse_of_triangle(torch.tensor([[[2.0, 0.0], [1.0, 1.0]]]))
        tensor([[[ 0.5000,  0.0000],
                 [-0.5000,  1.0000]]])
    """
    size = L.shape[-1]
    return _padded_inverse(L)[:, :size, :size]


def inverse_of_product(L: Tensor) -> Tensor:
    """`(LLᵀ)⁻¹ = L⁻ᵀL⁻¹` for lower triangular L `[groups, size, size]`."""
    size, R = L.shape[-1], _padded_inverse(L)
    with device.float32_products("ieee", R):
        X = transposed_product(R[0])[None] if len(R) == 1 else R.mT @ R
    return X[:, :size, :size]


def _padded_inverse(L: Tensor) -> Tensor:
    """`L⁻¹` with an identity behind it, up to a size that is halved down to small blocks and suits tensor cores."""
    size, blocks = L.shape[-1], 1
    while size > blocks * tuning.TRIANGLE_MOST_ROWS:
        blocks *= 2
    width = device.round_up(-(-size // blocks), tuning.CHOLESKY_UNIT)
    X = L.new_zeros(len(L), blocks * width, blocks * width)
    X[:, :size, :size] = L
    X.diagonal(dim1=-2, dim2=-1)[:, size:] = 1.0
    with device.float32_products("ieee", L):
        corners = _diagonal_blocks(X, width)
        identity = torch.eye(width, dtype=L.dtype, device=L.device).expand_as(corners)
        corners.copy_(torch.linalg.solve_triangular(corners, identity, upper=False))
        while width < X.shape[-1]:
            _join(X, width)
            width *= 2
    return X


def _diagonal_blocks(X: Tensor, width: int) -> Tensor:
    """The blocks on the diagonal of contiguous X, as a view `[groups, blocks, width, width]`."""
    groups, size, _ = X.shape
    return X.as_strided((groups, size // width, width, width), (size * size, width * (size + 1), size, 1))


def _join(X: Tensor, width: int) -> None:
    """Invert diagonal blocks twice as wide, in place: their own diagonal blocks are inverted already."""
    pairs = _diagonal_blocks(X, 2 * width)
    A, B, C = pairs[..., :width, :width], pairs[..., width:, :width], pairs[..., width:, width:]
    B.copy_((C @ (B @ A)).neg_())
