"""Everything the document and the figures are made from: the CSV files of one folder, read back."""

from dataclasses import dataclass, field
from pathlib import Path

from proxprop.lab.reproduction import propositions, spectrum
from proxprop.lab.reproduction.files import Row, read_csv
from proxprop.lab.reproduction.tables import CURVES, RUNS

TABLES = {
    **dict.fromkeys(("fig1", "table1", "fig2"), CURVES),
    "spectrum": spectrum.COLUMNS,
    "propositions": propositions.COLUMNS,
    "beyond": ("experiment", *CURVES),
    "runs": RUNS,
}
"""The columns of every table, by its name."""


@dataclass(frozen=True)
class Results:
    """The rows of every table; those of a file that is not there are empty."""

    fig1: list[Row] = field(default_factory=list)
    table1: list[Row] = field(default_factory=list)
    fig2: list[Row] = field(default_factory=list)
    spectrum: list[Row] = field(default_factory=list)
    propositions: list[Row] = field(default_factory=list)
    beyond: list[Row] = field(default_factory=list)
    runs: list[Row] = field(default_factory=list)

    @staticmethod
    def read(folder: Path) -> "Results":
        """Read all of a folder's CSV files."""
        return Results(
            **{name: read_csv(folder / f"{name}.csv", columns) for name, columns in TABLES.items()}
        )

    @property
    def seeds(self) -> int:
        """How many seeds every run was asked for, those that are still missing included."""
        return len({row["seed"] for row in self.runs})
