"""What is searched, written down before it was run: log-uniform ranges, the same number of trials for all.

A method's trials are points of a scrambled Sobol sequence that is seeded by the method's name alone, so that trial k is
the same setting in every task, and more trials go on where fewer ended.
"""

import math
import zlib
from dataclasses import dataclass, fields
from typing import Any

from torch.quasirandom import SobolEngine

Range = tuple[float, float]

SCHEDULES = ("cosine", "linear")
WARMUP: Range = (0.01, 0.2)
ADAPTIVE: Range = (1e-4, 3e-2)
"""Learning rates of everything whose step has AdamW's size, Muon's included."""


@dataclass(frozen=True)
class Space:
    """The ranges of one method.

    Args:
        lr: the learning rate.
        weight_decay: decoupled, or for SGD added to the direction.
        warmup: the part of the steps in which the rate goes up.
        schedules: how it comes down to zero after that.
        tau_theta: τ_θ of an immediate step, under `scaling="gradient"`.
        damping: ρ of a running S, or the damping of K-FAC.
    """

    lr: Range
    weight_decay: Range = (1e-4, 1.0)
    warmup: Range = WARMUP
    schedules: tuple[str, ...] = SCHEDULES
    tau_theta: Range | None = None
    damping: Range | None = None


COUPLED: Range = (1e-7, 1e-3)
TAU_THETA: Range = (0.3, 300.0)
DAMPING: Range = (0.01, 3.0)

SPACES: dict[str, Space] = {
    "sgd": Space((1e-3, 10.0), COUPLED),
    "adamw": Space(ADAPTIVE),
    "schedule-free": Space((3e-4, 1e-1), schedules=("constant",)),
    "muon": Space(ADAPTIVE),
    "soap": Space(ADAPTIVE),
    "shampoo": Space(ADAPTIVE),
    "ikfac": Space((1e-4, 1.0), COUPLED, damping=(1e-5, 1e-1)),
    "exact+sgd": Space((1e-2, 100.0), COUPLED, tau_theta=TAU_THETA),
    "cg3+sgd": Space((1e-2, 100.0), COUPLED, tau_theta=TAU_THETA),
    "exact+adamw": Space(ADAPTIVE, tau_theta=TAU_THETA),
    "cg3+adamw": Space(ADAPTIVE, tau_theta=TAU_THETA),
    "running+sgd": Space((1e-3, 10.0), COUPLED, damping=DAMPING),
    "running+adamw": Space(ADAPTIVE, damping=DAMPING),
    "running+muon": Space(ADAPTIVE, damping=DAMPING),
    "exact+soap": Space(ADAPTIVE, tau_theta=TAU_THETA),
    "cg3+soap": Space(ADAPTIVE, tau_theta=TAU_THETA),
    "running+soap": Space(ADAPTIVE, damping=DAMPING),
    "root+sgd": Space((1e-3, 10.0), COUPLED, damping=DAMPING),
    "root+adamw": Space(ADAPTIVE, damping=DAMPING),
    "root+muon": Space(ADAPTIVE, damping=DAMPING),
    "root+soap": Space(ADAPTIVE, damping=DAMPING),
}
"""Those under SOAP were added when results of the others had been seen, and before any run of their own. A root of S
came last, after runs without a record in the seven tasks that are not held out; it has the ranges of S itself."""


@dataclass(frozen=True)
class Setting:
    """One point of a space."""

    lr: float
    weight_decay: float
    warmup: float
    schedule: str
    tau_theta: float | None = None
    damping: float | None = None

    def rate(self, step: int, steps: int) -> float:
        """The learning rate's factor at a step: up along a line, then down to zero.

        >>> [round(Setting(1, 0, 0.2, "linear").rate(step, 10), 2) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.12]
        """
        warming = max(round(self.warmup * steps), 1)
        if step < warming:
            return (step + 1) / warming
        left = 1 - (step - warming) / max(steps - warming, 1)
        if self.schedule == "constant":
            return 1.0
        return left if self.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)

    def columns(self) -> dict[str, Any]:
        """Its values by name, in the order in which they are written."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def setting(method: str, trial: int) -> Setting:
    """A method's setting in a trial.

    >>> setting("adamw", 3) == setting("adamw", 3), setting("adamw", 3) == setting("muon", 3)
    (True, False)
    """
    space = SPACES[method]
    sobol = SobolEngine(6, scramble=True, seed=zlib.crc32(method.encode()))
    point = [float(u) for u in sobol.draw(trial + 1)[trial]]
    ranges = (space.lr, space.weight_decay, space.warmup, space.tau_theta, space.damping)
    lr, weight_decay, warmup, tau_theta, damping = (
        _between(u, r) for u, r in zip((point[0], *point[2:]), ranges, strict=True)
    )
    schedule = space.schedules[min(int(point[1] * len(space.schedules)), len(space.schedules) - 1)]
    assert lr is not None
    assert weight_decay is not None
    assert warmup is not None
    return Setting(lr, weight_decay, warmup, schedule, tau_theta, damping)


def _between(u: float, ends: Range | None) -> float | None:
    """A point of a range on a logarithmic scale, to four digits; None where there is no range."""
    if ends is None:
        return None
    low, high = map(math.log, ends)
    return float(f"{math.exp(low + u * (high - low)):.4g}")
