"""Write the reproduction: tables from records, then figures and REPRODUCTION.md from the tables."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxprop.lab import experiments
from proxprop.lab.config import Config
from proxprop.lab.records import Record
from proxprop.lab.records.run import LOCK, locked
from proxprop.lab.records.sealed import unlinked, write_bytes
from proxprop.lab.refusal import Refused
from proxprop.lab.reproduction import tables
from proxprop.lab.reproduction.document import document
from proxprop.lab.reproduction.files import read_csv, write_csv
from proxprop.lab.reproduction.results import TABLES, Results

DOCUMENT = "REPRODUCTION.md"
DONE = ("finished", "diverged")


def refuse_fewer(
    records: Sequence[Record], runs: Mapping[str, Sequence[Config]], planned: Sequence[str], out: Path
) -> None:
    """Refuse to replace the `runs.csv` of a folder by one that holds fewer runs of any experiment.

    Args:
        records: every run that was found.
        runs: each experiment's runs.
        planned: experiments whose missing runs will be there by the time the tables are written.
        out: the folder that would be written into.

    Raises:
        Refused: an experiment has more runs in `runs.csv` than would be written.
    """
    lying = Counter(
        name
        for row in read_csv(out / "runs.csv", tables.RUNS)
        if row["status"] in DONE
        for name in str(row["experiments"]).split()
    )
    coming = {name: len(runs[name]) if name in planned else _done(runs[name], records) for name in runs}
    fewer = [
        f"{name} {coming.get(name, 0)} of {count}"
        for name, count in lying.items()
        if coming.get(name, 0) < count
    ]
    if fewer:
        raise Refused(
            f"{out / 'runs.csv'} holds more runs than would be written ({', '.join(fewer)}); "
            "name the folder that holds all of them by --runs, or another folder by --out"
        )


def _done(configs: Sequence[Config], records: Sequence[Record]) -> int:
    """How many of an experiment's runs have a record that came to its end."""
    return sum(record is not None and record.status in DONE for _, record in tables.pairs(configs, records))


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder that starts with the tables of `out`; its files replace those of `out` if nothing fails within.

    What can fail (drawing, a full disk) fails before the first file of `out` is touched.

    Raises:
        Refused: another process is at it.
    """
    fresh = unlinked(out / ".new")
    with locked(fresh):
        try:
            for left in _files(fresh):
                left.unlink()
            for name in TABLES:
                if (table := out / f"{name}.csv").is_file():
                    shutil.copyfile(table, fresh / table.name)
            yield fresh
            for path in _files(fresh):
                os.replace(path, out / path.name)
        finally:
            shutil.rmtree(fresh)


def _files(fresh: Path) -> list[Path]:
    return [path for path in sorted(fresh.iterdir()) if path.name != LOCK]


def write_tables(records: Sequence[Record], runs: Mapping[str, Sequence[Config]], out: Path) -> None:
    """Write fig1.csv, table1.csv, fig2.csv, beyond.csv, runs.csv and environment.json.

    Args:
        records: every run that was found.
        runs: each experiment's runs; one of which none was found is left out.
        out: the folder.
    """
    pairs = {name: tables.pairs(configs, records) for name, configs in runs.items()}
    pairs = {name: part for name, part in pairs.items() if any(record for _, record in part)}
    for name in experiments.PAPER:
        if name in pairs:
            write_csv(out / f"{name}.csv", tables.CURVES, tables.curve_rows(pairs[name]))
    beyond = [row for n in experiments.BEYOND for row in tables.curve_rows(pairs.get(n, []), experiment=n)]
    if beyond:
        write_csv(out / "beyond.csv", ("experiment", *tables.CURVES), beyond)
    write_csv(out / "runs.csv", tables.RUNS, tables.run_rows(pairs))
    used = [record for part in pairs.values() for _, record in part if record]
    found = tables.environments({record.folder: record for record in used}.values())
    write_bytes(out / "environment.json", (json.dumps({"environments": found}, indent=1) + "\n").encode())


def write_document(out: Path) -> Path:
    """Write the figures and REPRODUCTION.md from the CSV files of a folder; returns the document's path."""
    from proxprop.lab.figures.reproduction import figures
    from proxprop.lab.figures.save import save
    from proxprop.lab.figures.style import styled

    results = Results.read(out)
    drawn = figures(results)
    with styled():
        for name, figure in drawn.items():
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once, for both files
            save(figure, out / f"{name}.svg")
            save(figure, out / f"{name}.png", dpi=110)
    path = out / DOCUMENT
    write_bytes(path, document(results).encode())
    return path
