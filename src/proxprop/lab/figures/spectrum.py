"""The eigenvalues of XᵀX: how ill-conditioned a least-squares step on the raw inputs is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from proxprop.lab.figures.style import FAINT, styled


def spectrum(eigenvalues: Sequence[float], title: str, tau_theta: float = 1.0) -> Any:
    """Eigenvalues from largest to smallest, and the same after 1/τ_θ is added, which is what an implicit step inverts.

    Args:
        eigenvalues: of XᵀX, in any order.
        title: what X is.
        tau_theta: the τ_θ of the second curve.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    values = np.clip(np.sort(np.asarray(eigenvalues, dtype=float))[::-1], 0.0, None)
    shifted = values + 1 / tau_theta
    positive = np.where(values > 0, values, np.nan)
    with styled():
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        ax = figure.subplots()
        rank = np.arange(1, len(values) + 1)
        ax.loglog(rank, positive, color="#0072B2", label=r"eigenvalues of $X^\top X$")
        ax.loglog(
            rank,
            shifted,
            color="#D55E00",
            linestyle="--",
            label=rf"of $I/\tau_\theta + X^\top X$, $\tau_\theta$ = {tau_theta:g}",
        )
        ax.axhline(1 / tau_theta, color=FAINT, linewidth=0.8, linestyle=":")
        ax.set_xlabel("rank")
        ax.set_title(title, parse_math=False)  # a file may be called $
        ax.legend()
    return figure
