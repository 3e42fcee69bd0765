"""What a measurement is told where the command line's packages are missing."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from proxprop.lab.config import Config


def parse(description: str | None, arguments: Sequence[str] | None) -> tuple[Config, Path]:
    """The data and device to measure with, and the file to write.

    >>> config, out = parse("", ["--data", "digits", "--out", "a.csv"])
    >>> config.data, config.device, str(out)
    ('digits', 'cpu', 'a.csv')
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    return Config(data=given.data, data_dir=given.data_dir, device=given.device), given.out
