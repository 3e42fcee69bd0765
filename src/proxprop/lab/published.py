"""The conjugate gradient iteration of the paper's released code, to show where its curves come from.

Not a conjugate gradient method from the second step on, and kept apart from the library for that reason:

- residual and search direction are one array in the first step, so updating the residual in place changes the
  direction too: the second direction is `(1 + β₁)r₁` instead of `r₁ + β₁p₀`;
- 1e-6 is added to both denominators, so the steps shrink with the gradient;
- it stops once the worst column's squared residual is below 1e-4 of the mean initial one.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import proxprop
from proxprop.solvers import FEATURE, SAMPLE, Sizes, Solution, Solver

EPSILON = 1e-6
TOLERANCE = 1e-4


@dataclass(frozen=True)
class PublishedCG(Solver):
    """The released iteration on `(λI + AᵀA) D = AᵀG`, started at 0, in feature or sample space.

    Args:
        iterations: steps at most.
        per_output: a step length for each output, as released for linear layers; False takes one for the
            layer, as released for convolutions.

    Example:
        >>> S, B = torch.diag(torch.tensor([1.0, 3.0]))[None], torch.ones(1, 2, 1)
        >>> PublishedCG(2).features(S, B, damping=1.0).value.flatten()  # conjugate gradients give 0.5, 0.25
        tensor([0.4333, 0.2333])
    """

    iterations: int
    per_output: bool = True

    spaces: ClassVar[tuple[str, ...]] = (SAMPLE, FEATURE)

    def flops(self, sizes: Sizes, space: str) -> float:
        """As for `proxprop.CG`."""
        return proxprop.CG(self.iterations).flops(sizes, space)

    def features(self, S: Tensor, B: Tensor, damping: float) -> Solution:
        """The iteration itself."""
        return Solution(self._iterate(S, B, damping, dual=False))

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        """The same iterates through coefficients: `r = Aᵀρ` has the inner product `⟨r, r⟩ = ⟨ρ, Kρ⟩`."""
        return Solution(self._iterate(K, G, damping, dual=True))

    def _iterate(self, M: Tensor, start: Tensor, damping: float, dual: bool) -> Tensor:
        """The recurrence with operator M; a vector's dual is its image under M in sample space, itself otherwise.

        Stopping is a factor 0 on all further steps, so that no host waits and a CUDA graph can hold it.
        """
        sums = (-2,) if self.per_output else (-3, -2, -1)
        residual, M_residual = start, M @ start
        search, M_search = residual, M_residual
        squared = (residual * (M_residual if dual else residual)).sum(sums, keepdim=True)
        target = TOLERANCE * squared.mean()
        going = torch.ones_like(target)
        solution = torch.zeros_like(start)
        for step in range(1, self.iterations + 1):
            image = M_search + damping * search
            curvature = ((M_search if dual else search) * image).sum(sums, keepdim=True)
            length = squared / (curvature + EPSILON)
            solution = solution.addcmul_(going * length, search)
            if step == self.iterations:
                break
            residual = residual - length * image
            M_residual = M @ residual
            before, squared = squared, (residual * (M_residual if dual else residual)).sum(sums, keepdim=True)
            squared = squared.clamp(min=0.0)  # in sample space rounding can make it negative
            going = going * (squared.max() >= target)
            if step == 1:  # the aliasing: search was updated together with the residual
                search, M_search = residual, M_residual
            ratio = squared / (before + EPSILON)
            search, M_search = residual + ratio * search, M_residual + ratio * M_search
        return solution


def convert(model: nn.Module, iterations: int, tau_theta: float) -> nn.Module:
    """Convert as released: a step length for each output of a linear layer, one in all for a convolution."""
    proxprop.convert(model, PublishedCG(iterations), tau_theta)
    for module in model.modules():
        if isinstance(module, proxprop.nn.Conv2d):
            module.solver = PublishedCG(iterations, per_output=False)
    return model
