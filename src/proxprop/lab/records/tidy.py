"""Records as one table: a row for every epoch of every run, for spreadsheets, pandas and version control."""

import csv
import io
from collections.abc import Iterable, Iterator

from proxprop.lab.records.read import Record

SETTINGS = (
    "data",
    "model",
    "optimizer",
    "lr",
    "solver",
    "tau_theta",
    "batch_size",
    "precision",
    "seed",
    "threads",
)
MEASURED = ("epoch", "seconds", "loss", "train_accuracy", "validation_accuracy", "test_accuracy")
MADE_BY = ("proxprop", "commit", "torch", "device")


def tidy(records: Iterable[Record]) -> str:
    """The records as comma-separated values with a header.

    `loss` is the full-batch training loss and `seconds` training time without evaluation; what was not finite is
    empty. Settings and the environment are repeated in every row, so that any row can be run again.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*SETTINGS, "hidden", "status", *MEASURED, *MADE_BY])
    for record in records:
        table.writerows(_rows(record))
    return text.getvalue()


def _rows(record: Record) -> Iterator[list[object]]:
    hidden = "-".join(map(str, record.config.hidden or ()))
    settings = [getattr(record.config, name) for name in SETTINGS]
    made_by = [record.environment.get(name) for name in MADE_BY]
    for row in record.epochs:
        yield [*settings, hidden, record.status, *(row.get(name) for name in MEASURED), *made_by]
