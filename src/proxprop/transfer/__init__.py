"""How a layer's call becomes the system `(λI + AᵀA) D = AᵀG`. Nothing here knows a solver.

A layer describes its call by a `LayerCall`, which makes the `Transfer` in backward. Every transfer is made from the
same three arguments (inputs, a tensor like the output, shapes of parameters) and from options of its own.
"""

from proxprop.transfer.affine import Affine
from proxprop.transfer.autograd import AutogradTransfer, check_linear, generic_call
from proxprop.transfer.bilinear import BilinearTransfer
from proxprop.transfer.call import LayerCall
from proxprop.transfer.conv import ConvTransfer
from proxprop.transfer.conv_geometry import ConvGeometry
from proxprop.transfer.conv_transpose import ConvTransposeTransfer
from proxprop.transfer.embedding import EmbeddingBagTransfer, EmbeddingTransfer
from proxprop.transfer.linear import LinearTransfer
from proxprop.transfer.norm import NormTransfer
from proxprop.transfer.transfer import Layout, Parameters, Products, Shapes, Transfer

__all__ = [
    "Affine",
    "AutogradTransfer",
    "BilinearTransfer",
    "ConvGeometry",
    "ConvTransfer",
    "ConvTransposeTransfer",
    "EmbeddingBagTransfer",
    "EmbeddingTransfer",
    "LayerCall",
    "Layout",
    "LinearTransfer",
    "NormTransfer",
    "Parameters",
    "Products",
    "Shapes",
    "Transfer",
    "check_linear",
    "generic_call",
]
