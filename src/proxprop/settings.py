"""What a user chooses for a layer, checked once."""

import math
from dataclasses import dataclass
from typing import Literal

from proxprop.solvers import CG, Solver
from proxprop.solvers.plan import possible_spaces

Scaling = Literal["paper", "gradient"]
SCALINGS: tuple[Scaling, ...] = ("paper", "gradient")


@dataclass(frozen=True)
class Settings:
    """How a layer takes its proximal step.

    Args:
        solver: `CG(iterations)` or `Exact()`.
        tau_theta: τ_θ > 0, the proximal step size. Larger values trust the quadratic model of the layer
            further from the current parameters.
        scaling: length of the direction, for N samples (batch × positions).
            "paper": `D = (I/τ_θ + S)⁻¹ AᵀG`, Proposition 2; a learning rate near 1 is a starting point.
            "gradient": `D = (I + τ_θ·S/N)⁻¹ AᵀG`, which tends to the gradient as τ_θ → 0, so that BackProp's
            learning rate is a starting point, and in which the batch size drops out.
        space: "sample", "feature" or "matrix_free" to pin where the system is solved; None lets the cost model
            choose. It changes the cost, never the answer.

    Raises:
        TypeError: solver or tau_theta has the wrong type.
        ValueError: a value is out of range, or the solver cannot work in `space`.
    """

    solver: Solver = CG()
    tau_theta: float = 1.0
    scaling: Scaling = "paper"
    space: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver should be CG(iterations) or Exact() but is {self.solver!r}")
        if isinstance(self.tau_theta, bool) or not isinstance(self.tau_theta, int | float):
            raise TypeError(f"tau_theta should be a number but is {self.tau_theta!r}")
        if not (self.tau_theta > 0 and math.isfinite(self.tau_theta)):
            raise ValueError(f"tau_theta should be > 0 and finite but is {self.tau_theta}")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling should be one of {', '.join(SCALINGS)} but is {self.scaling!r}")
        possible_spaces(self.solver, self.space)

    def damping(self, samples: int) -> float:
        """λ in `(λI + AᵀA) D = AᵀG`."""
        return 1 / self.tau_theta if self.scaling == "paper" else samples / self.tau_theta

    def factor(self, samples: int) -> float:
        """What to multiply the solution of that system by."""
        return 1.0 if self.scaling == "paper" else self.damping(samples)
