"""Propositions 4 and 5 and the step-size argument of Section 4.1, along real training runs."""

from collections.abc import Iterable

from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.verdict import Verdict
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.results import Results

RIGHT_ANGLE = 90.0


def of(rows: Iterable[Row], solver: str, precision: str | None = None) -> list[Row]:
    """The rows of one family of solvers: cg, exact, published or explicit."""
    found = [row for row in rows if row["solver"].partition(":")[0] == solver]
    return [row for row in found if precision in (None, row["precision"])]


def claims(results: Results) -> list[Verdict]:
    """The angle for exact and approximate solutions, the energy under implicit and under explicit steps."""
    rows = results.propositions
    return [
        _angle(rows, "Proposition 4: the exact direction encloses less than 90° with the gradient", "exact"),
        _angle(rows, "Proposition 5: so does the CG direction after any number of iterations", "cg"),
        _energy(rows, "a proximal step decreases the penalty energy for any τ_θ: the exact one", "exact"),
        _energy(rows, "... and the one by conjugate gradients", "cg"),
        _explicit_below(rows),
        _explicit_beyond(rows),
    ]


def _angle(rows: list[Row], claim: str, solver: str) -> Verdict:
    return _below(claim, "< 90°", *_ours_and_theirs(rows, solver), "angle", RIGHT_ANGLE, "°")


def _energy(rows: list[Row], claim: str, solver: str) -> Verdict:
    return _below(claim, "after / before < 1", *_ours_and_theirs(rows, solver), "energy", 1.0)


def _ours_and_theirs(rows: list[Row], solver: str) -> tuple[list[Row], list[Row]]:
    return of(rows, solver), of(rows, "published") if solver == "cg" else []


def _below(
    claim: str, paper: str, mine: list[Row], theirs: list[Row], column: str, bound: float, unit: str = ""
) -> Verdict:
    """That a quantity stays below a bound everywhere: its largest value, and where that was."""
    shown = _largest(theirs, column, unit), _largest(mine, column, unit)
    return Verdict(claim, paper, *shown, _all_below(mine, column, bound), _where(mine, column))


def limit(row: Row) -> float:
    """τ_θ in units of 2/λ, λ the largest eigenvalue: beyond 1 an explicit step may increase the energy."""
    return float(row["tau_theta"] * row["largest_eigenvalue"] / 2)


def _explicit_below(rows: list[Row]) -> Verdict:
    small = [row for row in of(rows, "explicit", "float64") if limit(row) < 1]
    claim = "an explicit step decreases it below τ_θ = 2/λ"
    return _below(claim, "after / before < 1", small, [], "energy", 1.0)


def _explicit_beyond(rows: list[Row]) -> Verdict:
    large = [row for row in of(rows, "explicit", "float64") if limit(row) > 1]
    worse = [row for row in large if row["energy"] is None or row["energy"] > 1]
    shown = (
        f"{len(worse)} of {len(large)} increase it; largest {_largest(large, 'energy', '')}"
        if large
        else words.NOTHING
    )
    verdict = grades.holds(bool(worse)) if large else grades.NOT_RUN
    return Verdict(
        "beyond 2/λ an explicit step may increase it without bound", "no guarantee", "", shown, verdict
    )


def _largest(rows: list[Row], column: str, unit: str) -> str:
    known = [row[column] for row in rows if row[column] is not None]
    return f"{_digits(max(known))}{unit}" if known else ("" if not rows else words.NOTHING)


def _digits(value: float) -> str:
    """Digits enough to see on which side of 1 or 90 a number is.

    >>> _digits(0.99999912), _digits(89.1234), _digits(3.2e9)
    ('0.9999991', '89.12', '3.2e+09')
    """
    if 0.999 < value < 1:
        return f"{value:.7f}"
    return f"{value:.4g}"


def _all_below(rows: list[Row], column: str, bound: float) -> str:
    known = [row[column] for row in rows if row["layer"] != "all" or column == "angle"]
    if not known:
        return grades.NOT_RUN
    return grades.holds(*(value is not None and value < bound for value in known))


def _where(rows: list[Row], column: str) -> str:
    """Where the extreme was measured, and over how many measurements."""
    known = [row for row in rows if row[column] is not None]
    if not known:
        return ""
    top = max(known, key=lambda row: float(row[column]))
    where = f"layer {top['layer']}" if top["layer"] != "all" else "all layers together"
    trained = f"epoch {top['epoch']} of {top['trained_with']}" if top["epoch"] else "before training"
    step = f"{top['solver']}, τ_θ = {top['tau_theta']:g}, {top['precision']}"
    return f"largest of {len(known)}: {where}, {trained}, {step}"
