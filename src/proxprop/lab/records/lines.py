"""Rows as sealed JSON lines: appended one by one, rewritten whole when a run is resumed."""

from pathlib import Path
from typing import Any

from proxprop.lab.records.sealed import Damaged, naming, seal, unseal, write_bytes

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Add one row at the end."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(seal(row) + "\n")


def rewrite(path: Path, rows: list[Row]) -> None:
    """Replace the whole file atomically."""
    write_bytes(path, "".join(seal(row) + "\n" for row in rows).encode())


def read(path: Path) -> tuple[list[Row], list[str]]:
    """The good rows, and a note for every damaged line."""
    rows: list[Row] = []
    notes: list[str] = []
    if not path.is_file():
        return rows, notes
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
        try:
            rows.append(unseal(line))
        except Damaged as damage:
            notes.append(f"{path.name} line {number} is damaged ({damage}) and was left out")
    return rows, notes
