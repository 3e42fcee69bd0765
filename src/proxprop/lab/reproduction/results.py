"""Everything the document and the figures are made from: the CSV files of one folder, read back."""

from dataclasses import dataclass, field
from pathlib import Path

from proxprop.lab.reproduction.files import Row, read_csv

TABLES = ("fig1", "table1", "fig2", "spectrum", "propositions", "beyond", "runs")


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
        return Results(**{name: read_csv(folder / f"{name}.csv") for name in TABLES})

    @property
    def seeds(self) -> int:
        """How many seeds every run was asked for, those that are still missing included."""
        return len({row["seed"] for row in self.runs})
