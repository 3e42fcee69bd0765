"""Where datasets may lie: the option, then the environment variable, then the usual places."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from proxprop.lab.data import cifar10, idx
from proxprop.lab.refusal import Refused

VARIABLE = "PROXPROP_DATA"
PRESENT: dict[str, Callable[[Path], bool]] = {
    "cifar10": cifar10.present,
    "mnist": idx.present,
    "fashion-mnist": idx.present,
}
INSIDE = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10/cifar-10-batches-bin"),
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
}


def cache() -> Path:
    """Where downloads go unless a folder is named: proxprop in the user's cache folder.

    Raises:
        Refused: the user has no home folder, as in a container that was given a bare number for its user.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proxprop"
    except RuntimeError as error:
        raise Refused("there is no home folder to keep data in; name a folder with --data-dir") from error


def roots(data_dir: str | None = None) -> list[Path]:
    """The folders that are searched, in order. A folder that was named is searched alone."""
    if data_dir is not None:
        return [Path(data_dir)]
    named = os.environ.get(VARIABLE)
    found = ([Path(named)] if named else []) + [Path("data")]
    with suppress(Refused):
        found.append(cache())
    return found


def find(name: str, data_dir: str | None = None) -> Path | None:
    """The folder that holds a dataset's files, or None."""
    return next((folder for folder in candidates(name, data_dir) if PRESENT[name](folder)), None)


def candidates(name: str, data_dir: str | None = None) -> Iterator[Path]:
    """Every folder in which a dataset's files are looked for."""
    for root in roots(data_dir):
        yield from (root / inside for inside in INSIDE[name])
        if data_dir is not None or name == "cifar10":  # MNIST's file names are Fashion-MNIST's too.
            yield root


def require(name: str, data_dir: str | None = None) -> Path:
    """The folder that holds a dataset's files.

    Raises:
        Refused: nothing found; says where it looked and what to do.
    """
    folder = find(name, data_dir)
    if folder is None:
        looked = ", ".join(str(root) for root in roots(data_dir))
        raise Refused(
            f"{name} was not found (looked in {looked}). Add --download to fetch it, or put its files "
            f"into one of these, or name yours with --data-dir or {VARIABLE}; `proxprop doctor` tells more."
        )
    return folder
