"""How a layer's call becomes the system `(λI + AᵀA) D = AᵀG`. Nothing here knows a solver."""

from proxprop.transfer.affine import Affine
from proxprop.transfer.autograd import AutogradTransfer, check_linear
from proxprop.transfer.conv import ConvGeometry, ConvTransfer
from proxprop.transfer.linear import LinearTransfer
from proxprop.transfer.transfer import Parameters, Transfer

__all__ = [
    "Affine",
    "AutogradTransfer",
    "ConvGeometry",
    "ConvTransfer",
    "LinearTransfer",
    "Parameters",
    "Transfer",
    "check_linear",
]
