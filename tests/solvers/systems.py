"""Random systems, and their directions straight from a solver, in whichever space."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from proxprop.solvers import FEATURE, SAMPLE, Solver

sizes = st.tuples(st.integers(1, 3), st.integers(1, 24), st.integers(1, 24), st.integers(1, 5))
"""Groups, samples, features, outputs."""


def problem(
    sizes: tuple[int, int, int, int], seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A and G."""
    groups, samples, features, outputs = sizes
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, samples, features, generator=generator, dtype=torch.float64)
    G = torch.randn(groups, samples, outputs, generator=generator, dtype=torch.float64)
    return A.to(dtype), G.to(dtype)


def solve_in(space: str, solver: Solver, A: Tensor, G: Tensor, damping: float) -> Tensor:
    """D."""
    if space == SAMPLE:
        return A.mT @ solver.samples(A @ A.mT, G, damping).value
    if space == FEATURE:
        return solver.features(A.mT @ A, A.mT @ G, damping).value
    return solver.matrix_free(lambda V: A.mT @ (A @ V), A.mT @ G, damping).value
