"""Section 4.1: "for the CIFAR-10 dataset the largest eigenvalue is 6.7e6, seven orders larger than the smallest"."""

import math

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims.verdict import Verdict
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.results import Results

CLOSE = 1.05  # A largest eigenvalue within 5 % is taken for the paper's.
RELEASED = "[0, 1], as released", 45000
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


def claims(results: Results) -> list[Verdict]:
    """The largest eigenvalue, the ratio, and both at once."""
    rows = results.spectrum
    if not rows:
        empty = words.NOTHING
        return [
            Verdict(
                "largest eigenvalue of XXᵀ, orders above the smallest", "6.7e6, 7", "", empty, grades.NOT_RUN
            )
        ]
    first = nearest(rows)[0]
    single = next(row for row in rows if _same(row, first) and row["precision"] == "float32")
    released = next(
        (row for row in rows if row["reading"].startswith("[0, 1], as") and row["count"] == 45000), None
    )
    double = [row for row in rows if row["precision"] == "float64"]
    close = [row for row in double if off(row) <= math.log(CLOSE)]
    both = [row for row in close if seven(row)]
    found = [
        Verdict(
            "largest eigenvalue of XXᵀ",
            f"{paper.LARGEST_EIGENVALUE:.1e}",
            "",
            said(first),
            grades.YES if close else grades.NO,
            f"{len(close)} of {len(double)} readings within {100 * (CLOSE - 1):.0f} %",
        ),
        Verdict(
            "the smallest is seven orders below, for the same reading",
            "7 orders",
            "",
            f"{orders(first)} orders; computed in single precision {orders(single)}",
            grades.YES if both else "in single precision only" if seven(single) else grades.NO,
            f"{len(both)} of {len(close)} readings with that largest eigenvalue span seven orders in double precision",
        ),
    ]
    if released:
        found.append(
            Verdict(
                "the training set as the released code has it",
                f"{paper.LARGEST_EIGENVALUE:.1e}, 7 orders",
                "",
                said(released),
                grades.YES if released in both else grades.NO,
                f"{released['largest'] / paper.LARGEST_EIGENVALUE:.2g}× the paper's largest eigenvalue",
            )
        )
    return found


def _same(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("reading", "images"))
