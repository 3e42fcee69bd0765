"""Proximal Backpropagation for PyTorch.

After `loss.backward()` every converted layer's `.grad` holds the proximal direction
`D = (I/τ_θ + AᵀA)⁻¹AᵀG` instead of the gradient `AᵀG`, and any torch optimizer goes on from there.
"""

from proxprop import diagnostics, nn
from proxprop.convert import convert, revert
from proxprop.deferred import Running, attach, detach, solve
from proxprop.nn import register
from proxprop.settings import Settings
from proxprop.solvers import CG, Exact
from proxprop.summary import summary

__version__ = "0.1.0"

__all__ = [
    "CG",
    "Exact",
    "Running",
    "Settings",
    "attach",
    "convert",
    "detach",
    "diagnostics",
    "nn",
    "register",
    "revert",
    "solve",
    "summary",
]
