"""Write a report: one HTML file, and every figure beside it for slides and papers where asked for."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from proxprop.lab import figures
from proxprop.lab.analysis import Task, tasks
from proxprop.lab.records import Record
from proxprop.lab.records.sealed import write_bytes
from proxprop.lab.records.tidy import tidy
from proxprop.lab.refusal import Refused
from proxprop.lab.report import html
from proxprop.lab.report.sections import rerun_section, task_sections


def write_report(
    records: Sequence[Record],
    out: Path,
    title: str,
    rerun: str | None = None,
    formats: Sequence[str] = (),
) -> Path:
    """Write `report.html` into a folder, and beside it `records.csv`: every epoch of every run.

    Args:
        records: from `records.find`.
        out: the folder, made when it does not exist.
        title: the page's title.
        rerun: the command that made the records, if there is one.
        formats: also write each figure by itself: png, svg, pdf.

    Returns:
        The report's path.
    """
    found = tasks(records)
    sections = [task_sections(task, f"t{index}") for index, task in enumerate(found)]
    body = "\n".join([*sections, rerun_section(records, rerun)])
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "report.html"
        write_bytes(path, html.page(title, body).encode(errors="replace"))  # a folder's name may be no text
        write_bytes(out / "records.csv", tidy(records).encode(errors="replace"))
    except OSError as error:
        raise Refused(f"cannot write the report into {out}: {error.strerror}") from error
    for name, figure in named_figures(found) if formats else ():
        for suffix in formats:
            figures.save(figure, out / f"{name}.{suffix}")
    return path


def named_figures(found: Sequence[Task]) -> Iterator[tuple[str, Any]]:
    """Every figure of a report with a file name; numbered where there are several tasks."""
    for index, task in enumerate(found):
        start = f"{index}-" if len(found) > 1 else ""
        for optimizer in task.optimizers():
            yield f"{start}curves-{optimizer}", figures.curves(task, optimizer)
            if any(len(arm.rates) > 1 for arm in task.of(optimizer)):
                yield f"{start}rates-{optimizer}", figures.robustness(task, optimizer)
            if (drawn := figures.angle(task, optimizer)) is not None:
                yield f"{start}angle-{optimizer}", drawn
