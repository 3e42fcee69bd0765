"""CIFAR-10 in its two official layouts: cifar-10-batches-bin and cifar-10-batches-py."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxprop.lab.data import pickled
from proxprop.lab.refusal import Refused

CLASSES, IMAGE, BATCH = 10, (3, 32, 32), 10_000
PIXELS = 3 * 32 * 32
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = ["test_batch"]

Bytes = NDArray[np.uint8]


def read(folder: Path, batch: int = BATCH) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Training images, training labels, test images, test labels; images uint8 [samples, 3, 32, 32].

    Args:
        folder: cifar-10-batches-bin or cifar-10-batches-py.
        batch: samples each file must hold.
    """
    one = _binary if (folder / "test_batch.bin").is_file() else _python
    parts = [[one(folder, name, batch) for name in names] for names in (TRAIN, TEST)]
    (train, train_labels), (test, test_labels) = (
        map(np.concatenate, zip(*part, strict=True)) for part in parts
    )
    return train, train_labels, test, test_labels


def present(folder: Path) -> bool:
    """Whether a folder holds every file of one of the two layouts."""
    return any(all((folder / (name + end)).is_file() for name in TRAIN + TEST) for end in (".bin", ""))


def _binary(folder: Path, name: str, batch: int) -> tuple[Bytes, Bytes]:
    """Rows of one label byte and 3072 pixel bytes."""
    path = folder / f"{name}.bin"
    expected = batch * (PIXELS + 1)
    size = path.stat().st_size
    if size != expected:
        raise Refused(f"{path} should have {expected} bytes but has {size}; it is damaged, download it again")
    rows = np.fromfile(path, dtype=np.uint8).reshape(batch, PIXELS + 1)
    return rows[:, 1:].reshape(batch, *IMAGE), _labels(rows[:, 0].tolist(), batch, path)


def _python(folder: Path, name: str, batch: int) -> tuple[Bytes, Bytes]:
    path = folder / name
    entries = pickled.read(path.read_bytes(), str(path))
    pixels = entries.get("data")
    if not (isinstance(pixels, np.ndarray) and pixels.shape == (batch, PIXELS)):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise Refused(f"{path}: data should be uint8 of shape {(batch, PIXELS)} but is {shape}")
    return pixels.reshape(batch, *IMAGE), _labels(entries.get("labels"), batch, path)


def _labels(labels: object, batch: int, path: Path) -> Bytes:
    if not (isinstance(labels, list) and len(labels) == batch):
        raise Refused(f"{path}: labels should be a list of {batch} numbers")
    wrong = [label for label in labels if not (type(label) is int and 0 <= label < CLASSES)]
    if wrong:
        raise Refused(f"{path}: labels should be 0 to {CLASSES - 1} but one is {wrong[0]!r}")
    return np.array(labels, dtype=np.uint8)
