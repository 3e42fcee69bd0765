"""`proxprop report`: figures and report from records alone."""

from pathlib import Path
from typing import Annotated

import typer

from proxprop.lab import records
from proxprop.lab.analysis import tasks
from proxprop.lab.commands.console import say, show
from proxprop.lab.refusal import one_of
from proxprop.lab.report import write_report
from proxprop.lab.report.tables import final_table


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold such folders.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and the figures.")] = Path("out/report"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "Runs compared",
    formats: Annotated[str, typer.Option(help="Figures by themselves too: png, svg, pdf.")] = "png",
) -> None:
    """Draw figures and a report from records.

    Nothing is trained and no dataset is needed.

    \b
    Examples:
        proxprop report runs --out out/report
        proxprop report out/compare/runs runs/mine --out out/both --formats pdf,svg
    """
    chosen = [one_of("format", name, ("png", "svg", "pdf")) for name in formats.split(",") if name]
    found = records.find(runs, tell=say)
    path = write_report(found, out, title, formats=chosen)
    for task in tasks(found):
        show(final_table(task), task.title)
    for record in found:
        for note in record.notes:
            say(f"note: {record.folder}: {note}")
    say(f"Report: {path.resolve()}")
