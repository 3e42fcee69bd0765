"""What a user chooses for a layer, checked once."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from proxprop.solvers import CG, Solver
from proxprop.solvers.plan import possible_spaces

Scaling = Literal["paper", "gradient"]
SCALINGS: tuple[Scaling, ...] = ("paper", "gradient")
Space = Literal["sample", "feature", "matrix_free"]

LEAST_TAU_THETA = 1e-30
"""The smallest τ_θ. λ, which is at most the number of samples times 1/τ_θ, is then within float32's range."""


@dataclass(frozen=True)
class Settings:
    """How a layer takes its proximal step.

    `proxprop.convert` says what the fields mean.

    Raises:
        TypeError: solver or tau_theta has the wrong type.
        ValueError: a value is out of range, or the solver cannot work in `space`.
    """

    solver: Solver = CG()
    tau_theta: float = 1.0
    scaling: Scaling = "paper"
    space: Space | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver should be CG(iterations) or Exact() but is {self.solver!r}")
        object.__setattr__(self, "tau_theta", _real(self.tau_theta))
        if not (self.tau_theta > 0 and math.isfinite(self.tau_theta)):
            raise ValueError(f"tau_theta should be > 0 and finite but is {self.tau_theta}")
        if self.tau_theta < LEAST_TAU_THETA:
            raise ValueError(
                f"tau_theta should be at least {LEAST_TAU_THETA:g}, because float32 holds no 1/tau_theta much larger, "
                f"but is {self.tau_theta}"
            )
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling should be one of {', '.join(SCALINGS)} but is {self.scaling!r}")
        possible_spaces(self.solver, self.space)

    def damping(self, samples: int) -> float:
        """λ in `(λI + AᵀA) D = AᵀG`."""
        return 1 / self.tau_theta if self.scaling == "paper" else samples / self.tau_theta

    def factor(self, samples: int) -> float:
        """What to multiply the solution of that system by."""
        return 1.0 if self.scaling == "paper" else self.damping(samples)


def _real(tau_theta: object) -> float:
    """Any real number as a float, also numpy's of every precision."""
    if isinstance(tau_theta, bool) or not isinstance(tau_theta, Real):
        raise TypeError(f"tau_theta should be a real number but is {tau_theta!r}")
    return float(tau_theta)
