"""JSON that carries its own checksum, written whole or not at all."""

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

SEAL = "crc32"
UNFINISHED = ".tmp"


class Damaged(ValueError):
    """Something read back is not what was written."""


def seal(values: dict[str, Any]) -> str:
    """One line of JSON with a checksum of the rest.

    >>> seal({"loss": 0.5})
    '{"loss": 0.5, "crc32": "45ef8da5"}'
    """
    return json.dumps(values | {SEAL: _checksum(values)}, allow_nan=False)


def unseal(line: str) -> dict[str, Any]:
    """The values of a sealed line.

    Raises:
        Damaged: it is cut off, changed, or was never sealed.
    """
    try:
        values = json.loads(line)
        intact = isinstance(values, dict) and values.pop(SEAL, None) == _checksum(values)
    except (ValueError, RecursionError) as error:  # not JSON, or a number that damage made infinite
        raise Damaged(f"not what was written: {error}") from error
    if not intact:
        raise Damaged("its checksum does not fit")
    return cast(dict[str, Any], values)


def write(path: Path, values: dict[str, Any]) -> None:
    """Write a sealed file atomically."""
    write_bytes(path, (seal(values) + "\n").encode())


def read(path: Path, check: Callable[[dict[str, Any]], None] = lambda values: None) -> dict[str, Any]:
    """Read a sealed file; `check` raises Damaged for values that make no sense.

    Raises:
        Damaged: the file is missing, not what was written, or makes no sense.
    """
    try:
        values = unseal(path.read_text("utf-8"))
        check(values)
        return values
    except (OSError, UnicodeDecodeError, Damaged) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one: temporary, fsync, rename, fsync.

    Several processes may write the same file at once: each has a temporary one of its own, and the last one wins.

    Raises:
        OSError: it could not be written, on a full disk for instance; nothing of it is left, and the error names it.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with naming(path):
            with created(temporary) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within, an error names this file: one of writing names none, one of opening perhaps a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def created(path: Path) -> IO[bytes]:
    """A new file in place of whatever stands there; a link is removed, never written through."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def unlinked(path: Path) -> Path:
    """The same path, where a file may now be opened to go on with it: a link that stood there is removed."""
    if path.is_symlink():
        path.unlink()
    return path


def _checksum(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"
