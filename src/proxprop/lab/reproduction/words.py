"""How measured numbers are written in the document."""

import math

from proxprop.lab.reproduction.measured import Seeds

NOTHING = "–"


def loss(ours: Seeds, seeds: int) -> str:
    """A loss with its spread; how many seeds, where they are not all there or did not all end alike.

    >>> loss(Seeds((0.50, 0.60)), 2), loss(Seeds((), 3), 3), loss(Seeds((0.5,), 1), 3)
    ('0.55 ± 0.071', 'diverged', '0.5, 1 diverged (2 of 3 seeds)')
    """
    return _shown(ours, seeds, "", 1.0, 3, 2)


def percent(ours: Seeds, seeds: int) -> str:
    """An accuracy with its spread.

    >>> percent(Seeds((0.554, 0.558)), 3)
    '55.6 ± 0.28 % (2 of 3 seeds)'
    """
    return _shown(ours, seeds, " %", 100.0, 3, 2)


def times(ours: Seeds, seeds: int) -> str:
    """A ratio.

    >>> times(Seeds((1.251,)), 1)
    '1.25×'
    """
    return _shown(ours, seeds, "×", 1.0, 3, 2)


def number(value: float | None, digits: int = 3) -> str:
    """One number, or a dash.

    >>> number(0.0028566), number(None), number(6.7e6, 2)
    ('0.00286', '–', '6.7e+06')
    """
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def _shown(ours: Seeds, seeds: int, unit: str, scale: float, digits: int, fewer: int) -> str:
    if not ours.count:
        return NOTHING
    some = f" ({ours.count} of {seeds} seeds)" if ours.count != seeds else ""
    if not ours.values:
        return f"diverged{some}"
    kept = Seeds(ours.values)
    spread = f" ± {scale * kept.spread:.{fewer}g}" if kept.count > 1 else ""
    lost = f", {ours.diverged} diverged" if ours.lost else ""
    return f"{scale * kept.mean:.{digits}g}{spread}{unit}{lost}{some}"
