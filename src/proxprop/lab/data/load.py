"""From a name to tensors on the training device: training, validation and test samples."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proxprop.lab.data import cifar10, folders, idx, own
from proxprop.lab.refusal import Refused, install, one_of

NAMES = ("digits", "cifar10", "mnist", "fashion-mnist")
HELD_OUT = {"digits": 200, "cifar10": 5000, "mnist": 5000, "fashion-mnist": 5000}
DIGITS_TEST = 297


@dataclass(frozen=True)
class Split:
    """Samples: inputs float32 [samples, ...], labels int64 [samples]."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        """The same samples on another device."""
        return Split(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A dataset in three parts; validation is the end of the training samples, as in the paper's code."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    def to(self, device: torch.device) -> "Dataset":
        """The whole dataset on another device."""
        train, validation, test = (part.to(device) for part in (self.train, self.validation, self.test))
        return Dataset(self.name, train, validation, test, self.classes)


def load(name: str, data_dir: str | None = None, validation: int | None = None) -> Dataset:
    """Read a dataset.

    Args:
        name: digits, cifar10, mnist, fashion-mnist, or a path to an .npz or .safetensors.
        data_dir: where its files are; None searches.
        validation: training samples held out at the end; None takes the dataset's own number.
    """
    if Path(name).suffix in own.SUFFIXES:
        whole, test = _own(Path(name))
    elif _known(name) == "digits":
        whole, test = _digits()
    else:
        read = cifar10.read if name == "cifar10" else idx.read
        images, labels, test_images, test_labels = read(folders.require(name, data_dir))
        whole, test = _pixels(images, labels), _pixels(test_images, test_labels)
    held = HELD_OUT.get(name, len(whole) // 10) if validation is None else validation
    if not 0 <= held < len(whole):
        raise Refused(f"validation should be at most {len(whole) - 1} of {name}'s samples but is {held}")
    cut = len(whole) - held
    train, rest = (Split(whole.inputs[part], whole.labels[part]) for part in (slice(cut), slice(cut, None)))
    classes = int(max(part.labels.max() for part in (whole, test))) + 1
    return Dataset(Path(name).name, train, rest, test, classes)


def fingerprint(name: str) -> str | None:
    """The SHA-256 of the user's own file; None for a dataset that is known by its name, or a file that is not there."""
    path = Path(name)
    if path.suffix not in own.SUFFIXES or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known(name: str) -> str:
    """A dataset's name; for any other file, say which kinds are read."""
    if name not in NAMES and Path(name).suffix:
        raise Refused(
            f"data should be one of {', '.join(NAMES)}, or a file that ends in {' or '.join(own.SUFFIXES)}, "
            f"but is '{name}'"
        )
    return one_of("data", name, NAMES)


def _pixels(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Split:
    """Bytes to [0, 1], as the paper's code has it."""
    return Split(torch.from_numpy(images.astype(np.float32) / 255), torch.from_numpy(labels.astype(np.int64)))


def _digits() -> tuple[Split, Split]:
    """The 1797 images of 8×8 inside scikit-learn, in one fixed random order; the last 297 are the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Refused(f"data digits ships inside scikit-learn: {install('lab')}") from error
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    inputs = torch.from_numpy(digits.images[order].astype(np.float32) / 16)[:, None]
    labels = torch.from_numpy(digits.target[order].astype(np.int64))
    cut = len(labels) - DIGITS_TEST
    return Split(inputs[:cut], labels[:cut]), Split(inputs[cut:], labels[cut:])


def _own(path: Path) -> tuple[Split, Split]:
    """The user's tensors in a fixed random order; without a test part, a sixth of them is the test."""
    tensors = own.read(path)
    inputs, labels = tensors["inputs"], tensors["labels"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[order], labels[order]
    if "test_inputs" in tensors:
        if tensors["test_inputs"].shape[1:] != inputs.shape[1:]:
            raise Refused(f"{path}: test_inputs should have the shape of inputs, {list(inputs.shape[1:])}")
        return Split(inputs, labels), Split(tensors["test_inputs"], tensors["test_labels"])
    cut = len(labels) - len(labels) // 6
    if cut in (0, len(labels)):
        raise Refused(f"{path} should hold at least 6 samples, or a test part, but holds {len(labels)}")
    return Split(inputs[:cut], labels[:cut]), Split(inputs[cut:], labels[cut:])
