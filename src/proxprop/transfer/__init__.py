"""How a layer's call becomes the system `(λI + AᵀA) D = AᵀG`. Nothing here knows a solver."""

from proxprop.transfer.affine import Affine
from proxprop.transfer.autograd import AutogradTransfer, check_linear
from proxprop.transfer.bilinear import BilinearTransfer
from proxprop.transfer.conv import ConvGeometry, ConvTransfer
from proxprop.transfer.conv_transpose import ConvTransposeTransfer
from proxprop.transfer.embedding import EmbeddingBagTransfer, EmbeddingTransfer
from proxprop.transfer.linear import LinearTransfer
from proxprop.transfer.norm import NormTransfer
from proxprop.transfer.transfer import Parameters, Transfer

__all__ = [
    "Affine",
    "AutogradTransfer",
    "BilinearTransfer",
    "ConvGeometry",
    "ConvTransfer",
    "ConvTransposeTransfer",
    "EmbeddingBagTransfer",
    "EmbeddingTransfer",
    "LinearTransfer",
    "NormTransfer",
    "Parameters",
    "Transfer",
    "check_linear",
]
