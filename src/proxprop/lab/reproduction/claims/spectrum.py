"""Section 4.1: "for the CIFAR-10 dataset the largest eigenvalue is 6.7e6, seven orders larger than the smallest"."""

import math

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.verdict import Verdict
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.results import Results

CLOSE = 1.05  # A largest eigenvalue within 5 % is taken for the paper's.
RELEASED = ("[0, 1], as released", 45000, "float64")
FITTED = (9000, 30000)  # Sizes at which a reading's largest eigenvalue comes to the paper's.
ROUNDING = 13  # Orders beyond which an eigenvalue in double precision is rounding, not data.
HALF = 0.5  # "Seven orders" is anything that rounds to seven.


def off(row: Row) -> float:
    """How far a reading's largest eigenvalue is from the paper's, as |ln ratio|."""
    return abs(math.log(row["largest"] / paper.LARGEST_EIGENVALUE))


def nearest(rows: list[Row], count: int = 1) -> list[Row]:
    """The readings whose largest eigenvalue is nearest to the paper's, nearest first, in double precision."""
    return sorted((row for row in rows if row["precision"] == "float64"), key=off)[:count]


def said(row: Row) -> str:
    """A reading for people."""
    return f"{row['reading']}, {row['images']} images: {words.number(row['largest'])}, {orders(row)} orders"


def orders(row: Row) -> str:
    """Orders of magnitude between the ends of the spectrum; ∞ where the smallest eigenvalue is 0 to rounding.

    >>> orders({"orders": 7.04}), orders({"orders": 15.5})
    ('7.0', '∞')
    """
    return "∞" if row["orders"] is None or row["orders"] > ROUNDING else f"{row['orders']:.1f}"


def seven(row: Row) -> bool:
    """Whether a reading's spectrum spans seven orders of magnitude."""
    return row["orders"] is not None and abs(row["orders"] - paper.EIGENVALUE_ORDERS) <= HALF


def natural(rows: list[Row]) -> list[Row]:
    """The readings of sets that anyone would take: a batch, a file, a part of the dataset."""
    return [row for row in rows if row["count"] not in FITTED]


def claims(results: Results) -> list[Verdict]:
    """The largest eigenvalue, the same with as many images as it takes, the ratio, and the released training set."""
    rows = results.spectrum
    if not rows:
        said_ = f"{paper.LARGEST_EIGENVALUE:.1e}"
        return [Verdict("largest eigenvalue of XXᵀ", said_, "", words.NOTHING, grades.NOT_RUN)]
    fitted = [row for row in rows if row not in natural(rows)]
    found = [_largest(natural(rows), "largest eigenvalue of XXᵀ", "")]
    if fitted:
        counts = " or ".join(f"{count:,}" for count in sorted(FITTED))
        found.append(_largest(fitted, f"... with {counts} images, numbers chosen to fit", "by a fit"))
    return [*found, _ratio(rows), *_released(rows)]


def _largest(rows: list[Row], claim: str, yes: str) -> Verdict:
    first, double = nearest(rows)[0], [row for row in rows if row["precision"] == "float64"]
    close = [row for row in double if off(row) <= math.log(CLOSE)]
    return Verdict(
        claim,
        f"{paper.LARGEST_EIGENVALUE:.1e}",
        "",
        said(first),
        (yes or grades.YES) if close else grades.NO,
        f"{len(close)} of {len(double)} readings within {100 * (CLOSE - 1):.0f} %",
    )


def _ratio(rows: list[Row]) -> Verdict:
    first = nearest(natural(rows))[0]
    single = next(row for row in rows if _same(row, first) and row["precision"] == "float32")
    spans = [row for row in natural(rows) if row["precision"] == "float64" and seven(row)]
    return Verdict(
        "the smallest eigenvalue is seven orders below, for the nearest reading",
        f"{paper.EIGENVALUE_ORDERS} orders",
        "",
        f"{orders(first)} orders; computed in single precision {orders(single)}",
        grades.YES if seven(first) else "in single precision only" if seven(single) else grades.NO,
        f"{len(spans)} of {len(natural(rows)) // 2} readings span seven orders in double precision",
    )


def _released(rows: list[Row]) -> list[Verdict]:
    found = [row for row in rows if (row["reading"], row["count"], row["precision"]) == RELEASED]
    return [
        Verdict(
            "the training set as the released code has it",
            f"{paper.LARGEST_EIGENVALUE:.1e}, {paper.EIGENVALUE_ORDERS} orders",
            "",
            said(row),
            grades.holds(off(row) <= math.log(CLOSE), seven(row)),
            f"{row['largest'] / paper.LARGEST_EIGENVALUE:.2g}× the paper's largest eigenvalue",
        )
        for row in found
    ]


def _same(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("reading", "images"))
