"""Rows as sealed JSON lines: appended one by one, rewritten whole when a run is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxprop.lab.records.sealed import Damaged, naming, seal, unlinked, unseal, write_bytes

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Add one row at the end."""
    with naming(path), unlinked(path).open("a", encoding="utf-8") as file:
        file.write(seal(row) + "\n")


def rewrite(path: Path, rows: list[Row]) -> None:
    """Replace the whole file atomically."""
    write_bytes(path, "".join(seal(row) + "\n" for row in rows).encode())


def read(path: Path, check: Callable[[Row], None] = lambda row: None) -> tuple[list[Row], list[str]]:
    """The good rows, and a note for every damaged line; `check` raises Damaged for a row that makes no sense."""
    rows: list[Row] = []
    notes: list[str] = []
    if not path.is_file():
        return rows, notes
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
        try:
            row = unseal(line)
            check(row)
        except Damaged as damage:
            notes.append(f"{path.name} line {number} is damaged ({damage}) and was left out")
        else:
            rows.append(row)
    return rows, notes
