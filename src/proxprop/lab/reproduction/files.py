"""Tidy CSV files: written from rows, read back as rows of text and numbers."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from proxprop.lab.records.sealed import write_bytes
from proxprop.lab.refusal import Refused

Row = dict[str, Any]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write rows under a header; None is empty, numbers keep all their digits."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.getvalue().encode())


def read_csv(path: Path, columns: Sequence[str] = ()) -> list[Row]:
    """The rows of a file; what reads as a number is one, what is empty is None, no file is no rows.

    Args:
        path: the file.
        columns: what it should have, in any order and among others.

    Raises:
        Refused: it is not in UTF-8, lacks a column, or a row has more or fewer cells than the header.
    """
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # some programs begin UTF-8 with a mark
            table = csv.DictReader(file)
            header, rows = table.fieldnames or (), list(table)
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} is not a readable .csv in UTF-8: {error}") from error
    if any(None in row or None in row.values() for row in rows):
        raise Refused(f"{path} has a row with more or fewer cells than its header")
    if lacking := [name for name in columns if name not in header]:
        raise Refused(f"{path} should have the columns {', '.join(columns)} but lacks {', '.join(lacking)}")
    return [{key: value(text) for key, text in row.items()} for row in rows]


def value(text: str) -> Any:
    """One cell.

    >>> [value(text) for text in ("", "0.05", "3", "cg:3", "nan")]
    [None, 0.05, 3, 'cg:3', 'nan']
    """
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        return text
    return int(number) if text.lstrip("-").isdigit() else number
