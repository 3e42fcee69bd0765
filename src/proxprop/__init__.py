"""Proximal Backpropagation for PyTorch.

After `loss.backward()` every converted layer's `.grad` holds the proximal direction
`D = (I/τ_θ + AᵀA)⁻¹AᵀG` instead of the gradient `AᵀG`, and any torch optimizer goes on from there.
"""

from proxprop import diagnostics, nn
from proxprop.conversion import convert, revert
from proxprop.deferred import Attached, Running, attach
from proxprop.nn import register, unregister
from proxprop.recipe import wrap
from proxprop.replay import use_cuda_graphs
from proxprop.solvers import CG, Exact, Solver
from proxprop.step_bound import Bounded, bound
from proxprop.summarize import summary

__version__ = "0.2.0.dev0"

__all__ = [
    "CG",
    "Attached",
    "Bounded",
    "Exact",
    "Running",
    "Solver",
    "attach",
    "bound",
    "convert",
    "diagnostics",
    "nn",
    "register",
    "revert",
    "summary",
    "unregister",
    "use_cuda_graphs",
    "wrap",
]
