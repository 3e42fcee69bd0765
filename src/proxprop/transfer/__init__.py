"""How a layer's call becomes the system `(λI + AᵀA) D = AᵀG`. Nothing here knows a solver.

A layer describes its call by a `LayerCall`, which makes the `Transfer` once the tensors are there.
"""

from proxprop.transfer.affine import Affine
from proxprop.transfer.autograd import AutogradCall, AutogradTransfer, check_linear
from proxprop.transfer.bilinear import BilinearCall, BilinearTransfer
from proxprop.transfer.conv import ConvCall, ConvTransfer
from proxprop.transfer.conv_geometry import ConvGeometry
from proxprop.transfer.conv_transpose import ConvTransposeCall, ConvTransposeTransfer
from proxprop.transfer.embedding import (
    EmbeddingBagCall,
    EmbeddingBagTransfer,
    EmbeddingCall,
    EmbeddingTransfer,
)
from proxprop.transfer.linear import LinearCall, LinearTransfer
from proxprop.transfer.norm import NormCall, NormTransfer
from proxprop.transfer.transfer import LayerCall, Parameters, Products, Shapes, Transfer

__all__ = [
    "Affine",
    "AutogradCall",
    "AutogradTransfer",
    "BilinearCall",
    "BilinearTransfer",
    "ConvCall",
    "ConvGeometry",
    "ConvTransfer",
    "ConvTransposeCall",
    "ConvTransposeTransfer",
    "EmbeddingBagCall",
    "EmbeddingBagTransfer",
    "EmbeddingCall",
    "EmbeddingTransfer",
    "LayerCall",
    "LinearCall",
    "LinearTransfer",
    "NormCall",
    "NormTransfer",
    "Parameters",
    "Products",
    "Shapes",
    "Transfer",
    "check_linear",
]
