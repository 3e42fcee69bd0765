"""What commands print: tables, in rich where the terminal allows."""

import sys
from collections.abc import Callable

from proxprop.lab.report.tables import Table


def say(text: str) -> None:
    """Print one line."""
    print(text, flush=True)


def show(table: Table, title: str) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=Text(title), title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="left" if index == 0 or index in table.words else "right")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    width = None if sys.stdout.isatty() else 140
    Console(width=width, highlight=False).print(drawn)


def download_progress() -> Callable[[str, int, int], None]:
    """A line that counts up in a terminal; silent elsewhere."""

    def tell(name: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rdownloading {name}: {done / 1e6:.1f} of {total / 1e6:.1f} MB", end=end, file=sys.stderr)

    return tell
