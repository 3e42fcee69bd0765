"""The inverse square root of a matrix as a weighted sum of inverses.

For eigenvalues x in [low, high] the rational function

    x^(-1/2) ≈ Σ_j w_j / (x + s_j),    s_j ≥ 0, w_j > 0,

is the best of its degree (Zolotarev). Its poles and weights are elliptic functions; see Hale, Higham and Trefethen,
*Computing A^α, log(A), and related matrix functions by contour integrals*, SIAM J. Numer. Anal. 46 (2008), section 4.
The error falls by a factor that depends on the logarithm of high/low alone: four inverses give 0.6 % where the ratio is
10,000. An eigendecomposition takes longer than that many inverses, and no GPU does one in products.
"""

import math
from functools import lru_cache

ACCURACY = 0.01
"""Largest relative error in any eigenvalue. The direction errs by at most as much, and no step length is as exact."""

SMALLEST = 1e-12
"""Eigenvalues that are a smaller part of the largest are rounding."""


@lru_cache(maxsize=64)
def resolvents(low: float, high: float) -> tuple[tuple[float, float], ...]:
    """Shifts and weights of so few inverses that the inverse root is accurate between two eigenvalues.

    Args:
        low: the smallest eigenvalue, above zero.
        high: the largest.

    Returns:
        Pairs `(s, w)` with `x^(-1/2) ≈ Σ w / (x + s)` for every x between the two.

    Example:
        >>> pairs = resolvents(0.3, 3000.0)
        >>> len(pairs), round(sum(weight / (4.0 + shift) for shift, weight in pairs), 2)
        (4, 0.5)
    """
    low, count = max(low, SMALLEST * high), 1
    while True:
        pairs = _zolotarev(low, high, count)
        if abs(sum(weight / (low + shift) for shift, weight in pairs) * math.sqrt(low) - 1) <= ACCURACY:
            return pairs  # the error is largest at the ends, and the same at both
        count += 1


def _zolotarev(low: float, high: float, count: int) -> tuple[tuple[float, float], ...]:
    """Shifts and weights of so many inverses."""
    parameter = 1 - low / high
    period = _quarter_period(parameter)
    found = []
    for index in range(count):
        sn, cn, dn = _jacobi((index + 0.5) * period / count, parameter)
        weight = 2 * period * math.sqrt(low) / (math.pi * count) * dn / cn**2
        found.append((low * (sn / cn) ** 2, weight))
    return tuple(found)


def _means(parameter: float) -> tuple[list[float], list[float]]:
    """Arithmetic means and half differences of the arithmetic-geometric mean of 1 and `√(1 - parameter)`."""
    a, b, c = [1.0], math.sqrt(1 - parameter), [math.sqrt(parameter)]
    while c[-1] > 1e-15:
        mean, half = (a[-1] + b) / 2, (a[-1] - b) / 2
        b = math.sqrt(a[-1] * b)
        a.append(mean)
        c.append(half)
    return a, c


def _quarter_period(parameter: float) -> float:
    """The complete elliptic integral K."""
    return math.pi / 2 / _means(parameter)[0][-1]


def _jacobi(u: float, parameter: float) -> tuple[float, float, float]:
    """Jacobi's elliptic functions sn, cn and dn, by descending Landen transformations.

    Example:
        >>> [round(value, 4) for value in _jacobi(0.5, 0.0)]  # sin, cos and 1
        [0.4794, 0.8776, 1.0]
    """
    a, c = _means(parameter)
    phase = 2 ** (len(a) - 1) * a[-1] * u
    for mean, half in zip(reversed(a[1:]), reversed(c[1:]), strict=True):
        phase = (phase + math.asin(half * math.sin(phase) / mean)) / 2
    sn = math.sin(phase)
    return sn, math.cos(phase), math.sqrt(1 - parameter * sn**2)
