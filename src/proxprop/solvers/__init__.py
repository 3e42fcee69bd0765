"""Solve `(λI + AᵀA) D = AᵀG` in the cheapest space. Nothing here knows a layer.

Shapes in this package:

    A  [groups, samples, features]   rows; a bias is a last feature that is 1 in every row
    G  [groups, samples, outputs]    gradient of the loss at the layer's output
    S  [groups, features, features]  AᵀA
    K  [groups, samples, samples]    AAᵀ
    D  [groups, features, outputs]   the direction

`λ` (`damping`) is `1/τ_θ` in the paper's scaling.
"""

from proxprop.solvers.cg import CG
from proxprop.solvers.exact import Exact
from proxprop.solvers.plan import Plan, choose_plan
from proxprop.solvers.solver import (
    DIAGONAL,
    FEATURE,
    MATRIX_FREE,
    SAMPLE,
    SPACES,
    PreparedSolve,
    ProductSolve,
    Sizes,
    Solution,
    Solver,
)

__all__ = [
    "CG",
    "DIAGONAL",
    "FEATURE",
    "MATRIX_FREE",
    "SAMPLE",
    "SPACES",
    "Exact",
    "Plan",
    "PreparedSolve",
    "ProductSolve",
    "Sizes",
    "Solution",
    "Solver",
    "choose_plan",
]
