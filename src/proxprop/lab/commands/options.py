"""Options that several commands share, and how they become a Config: defaults, then a TOML file, then the options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from proxprop.lab.commands.console import download_progress, say
from proxprop.lab.config import Config, from_mapping, from_toml
from proxprop.lab.data import folders
from proxprop.lab.data.download import download
from proxprop.lab.data.load import NAMES
from proxprop.lab.refusal import Refused

Data = Annotated[
    str | None, typer.Option(help=f"{', '.join(NAMES)}, or your own .npz or .safetensors [digits].")
]
DataDir = Annotated[
    str | None, typer.Option(help=f"Folder with the dataset; else ${folders.VARIABLE}, ./data, the cache.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps [cpu].")]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch the dataset if it is not there (checked by SHA-256).")
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training samples [10].")]
MOST = 9999
"""Seeds and trials that anyone could wait for."""

Seeds = Annotated[int, typer.Option(min=1, max=MOST, help="Seeds per run; the tables then show a spread.")]
Out = Annotated[Path, typer.Option(help="Folder for runs and report.")]


def config_from(
    file: Path | None, given: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> Config:
    """A Config from a stored one, a TOML file and the options that were given; each wins over those before it."""
    values = from_toml(file) if file is not None else {}
    merged = dict(stored or {}) | {key.replace("-", "_"): value for key, value in values.items()}
    from_mapping(merged, str(file) if file else "options")
    return from_mapping(merged | {key: value for key, value in given.items() if value is not None}, "options")


def widths(text: str | None) -> list[int] | None:
    """The widths in `--hidden 4000,1000,4000`.

    >>> widths("4000,1000,4000")
    [4000, 1000, 4000]
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.replace("-", ",").split(",")]
    except ValueError as error:
        raise Refused(f"--hidden should be widths like 4000,1000,4000 but is '{text}'") from error


def fetch(config: Config) -> None:
    """Download the dataset a Config names, unless it is already there."""
    name = config.data
    if name not in folders.INSIDE or folders.find(name, config.data_dir) is not None:
        return
    root = Path(config.data_dir) if config.data_dir else folders.cache()
    say(f"Downloading {name} into {root}.")
    download(name, root, download_progress())
