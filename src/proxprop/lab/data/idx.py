"""IDX files (MNIST, Fashion-MNIST), plain or gzipped: 0 0 type dims, then big-endian sizes, then bytes."""

import gzip
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxprop.lab.data.limit import UNPACKED
from proxprop.lab.refusal import Refused

CLASSES = 10
UNSIGNED_BYTE = 8
STEMS = {
    "train_images": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "train_labels": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "test_images": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "test_labels": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}

Bytes = NDArray[np.uint8]


def read(folder: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Training images and labels, test images and labels; images uint8 [samples, 1, height, width]."""
    files = {role: find(folder, role) for role in STEMS}
    missing = [STEMS[role][0] for role, path in files.items() if path is None]
    if missing:
        raise Refused(f"{folder} should hold {', '.join(missing)} (plain or .gz) but does not")
    arrays = {role: read_file(path) for role, path in files.items() if path is not None}
    for part in ("train", "test"):
        _check_pair(arrays[f"{part}_images"], arrays[f"{part}_labels"], folder, part)
    images, test = arrays["train_images"][:, None], arrays["test_images"][:, None]
    return images, arrays["train_labels"], test, arrays["test_labels"]


def find(folder: Path, role: str) -> Path | None:
    """The file that plays a role, under any of its usual names, or None."""
    names = [stem + end for stem in STEMS[role] for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def present(folder: Path) -> bool:
    """Whether a folder holds all four files."""
    return all(find(folder, role) for role in STEMS)


def read_file(path: Path) -> Bytes:
    """One IDX file of unsigned bytes, checked against its own header."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTE or not 1 <= head[3] <= 4:
                raise Refused(
                    f"{path} should begin as an IDX file of unsigned bytes but begins with {head!r}"
                )
            sizes = file.read(4 * head[3])
            shape = [int.from_bytes(sizes[i : i + 4]) for i in range(0, len(sizes), 4)]
            expected = prod(shape) if len(sizes) == 4 * head[3] else -1
            if not 0 < expected <= UNPACKED:
                raise Refused(f"{path} should hold 1 byte to 2 GiB but its header says {shape}")
            content = file.read(expected + 1)  # One more than promised, and no gzip bomb is read any further.
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Refused(f"{path} is damaged: {error}; download it again") from error
    if len(content) != expected:
        came = "more" if len(content) > expected else str(len(content))
        raise Refused(f"{path} should hold {expected} bytes of data but holds {came}; download it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _check_pair(images: Bytes, labels: Bytes, folder: Path, part: str) -> None:
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise Refused(
            f"{folder}: {part} images {images.shape} and labels {labels.shape} do not belong together"
        )
    if labels.max() >= CLASSES:
        raise Refused(f"{folder}: {part} labels should be 0 to {CLASSES - 1} but one is {labels.max()}")
