"""Records that accumulate: one table for each task, rewritten whole after every run, never with fewer rows."""

import csv
import fcntl
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxprop.lab.peers.record import COLUMNS, Run, parsed
from proxprop.lab.records.sealed import unlinked, write_bytes
from proxprop.lab.refusal import Refused

TARGETS = ("task", "target", "rule", "commit")
TIMES = ("task", "method", "way", "ms", "low", "high", "megabytes", "rounds", "load", "command", "commit", "torch",
         "device", "threads", "time")  # fmt: skip


class Store:
    """The folder of the records, read from or added to.

    Args:
        folder: made when the first record is added.

    Example:
        >>> Store(Path("there/is/none")).runs("digits")
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def runs(self, task: str) -> list[Run]:
        """All runs of a task, in the order in which they were run.

        Raises:
            Refused: a row can't be read.
        """
        path = self._runs(task)
        return [parsed(row, f"{path} row {number}") for number, row in enumerate(read(path), start=1)]

    def all(self, tasks: Iterable[str]) -> list[Run]:
        """All runs of these tasks."""
        return [run for task in tasks for run in self.runs(task)]

    def add(self, run: Run) -> None:
        """Add a run, unless the same one is there."""
        known = self.runs(run.task)
        if run.key not in {other.key for other in known}:
            rows = [other.row() for other in (*known, run)]
            self._write(self._runs(run.task), COLUMNS, rows)

    def targets(self) -> dict[str, float]:
        """The targets that were fixed.

        Raises:
            Refused: a row can't be read.
        """
        path = self.folder / "targets.csv"
        try:
            return {row["task"]: float(row["target"]) for row in read(path)}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"{path} is not a table of targets: {error!r}") from error

    def fix_target(self, task: str, target: float, rule: str, commit: str) -> None:
        """Fix a target once and for all."""
        if task not in self.targets():
            rows = read(self.folder / "targets.csv")
            row = {"task": task, "target": f"{target:g}", "rule": rule, "commit": commit}
            self._write(self.folder / "targets.csv", TARGETS, [*rows, row])

    def times(self) -> list[dict[str, str]]:
        """One row for each task, method and way."""
        return read(self.folder / "times.csv")

    def add_times(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Add times; newer ones of the same task, method and way take the place of older ones."""
        path = self.folder / "times.csv"
        try:
            kept = {(row["task"], row["method"], row["way"]): row for row in [*self.times(), *rows]}
            self._write(path, TIMES, list(kept.values()))
        except (KeyError, ValueError) as error:
            raise Refused(f"{path} is not a table of times: {error!r}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within, no other process adds records.

        Raises:
            Refused: another process does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with unlinked(self.folder / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Refused(f"another process is adding records to {self.folder}; wait for it") from None
            yield

    def _runs(self, task: str) -> Path:
        return self.folder / f"{task}.csv"

    def _write(self, path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table atomically, so that a kill leaves the old one or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_bytes(path, text.getvalue().encode())


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no file.

    Raises:
        Refused: it is no table in UTF-8, or a row has too few or too many cells.
    """
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"{path} is not a readable .csv in UTF-8: {error}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise Refused(f"{path} row {number} should have as many cells as the first line, but has not")
    return rows
