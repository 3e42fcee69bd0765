"""Write the reproduction: tables from records, then figures and REPRODUCTION.md from the tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxprop.lab import experiments
from proxprop.lab.config import Config
from proxprop.lab.records import Record
from proxprop.lab.records.sealed import write_bytes
from proxprop.lab.reproduction import tables
from proxprop.lab.reproduction.document import document
from proxprop.lab.reproduction.files import write_csv
from proxprop.lab.reproduction.results import Results

DOCUMENT = "REPRODUCTION.md"


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
