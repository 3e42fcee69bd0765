"""Write a figure into a file, as every other output is written: whole or not at all, never through a link."""

import io
from pathlib import Path
from typing import Any

from proxprop.lab.records.sealed import write_bytes


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a matplotlib figure in the format its suffix names, the same bytes every time.

    Args:
        figure: a matplotlib figure.
        path: a .png, .svg or .pdf in a folder that exists.
        dpi: dots per inch of a .png.
    """
    from matplotlib import rc_context

    suffix = path.suffix[1:]
    date = {"svg": "Date", "pdf": "CreationDate"}.get(suffix)
    content = io.BytesIO()
    dots = dpi if suffix == "png" else "figure"
    with rc_context({"svg.hashsalt": "proxprop"}):  # else the ids within an SVG are random
        figure.savefig(content, format=suffix, dpi=dots, metadata={date: None} if date else None)
    write_bytes(path, _in_few_colours(content) if suffix == "png" else content.getvalue())


def _in_few_colours(picture: io.BytesIO) -> bytes:
    """The same .png with 256 colours, which is a third as large; lines and letters look the same."""
    from PIL import Image  # matplotlib needs it itself

    content = io.BytesIO()
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(content, "PNG", optimize=True)
    return content.getvalue()
