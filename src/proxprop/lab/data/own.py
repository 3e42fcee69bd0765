"""The user's own tensors in .npz or .safetensors.

`inputs` and `labels`, and if you like `test_inputs` and `test_labels`.
"""

import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from proxprop.lab.config import WIDEST
from proxprop.lab.data.limit import UNPACKED
from proxprop.lab.refusal import Refused

SUFFIXES = (".npz", ".safetensors")
# What zipfile and NumPy raise for a damaged, encrypted or unknown archive, and for a header that promises too much.
UNREADABLE = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
REQUIRED, OPTIONAL = {"inputs", "labels"}, {"test_inputs", "test_labels"}


def read(path: Path) -> dict[str, Tensor]:
    """The file's tensors, checked: inputs float32 [samples, ...], labels int64 [samples]."""
    if not path.is_file():
        raise Refused(f"there is no file {path}; expected a dataset's name or a {' or '.join(SUFFIXES)} file")
    tensors = _npz(path) if path.suffix == ".npz" else _safetensors(path)
    names = set(tensors)
    if not (names >= REQUIRED and names <= REQUIRED | OPTIONAL and len(names & OPTIONAL) in (0, 2)):
        raise Refused(
            f"{path} should hold inputs and labels, and if you like test_inputs and test_labels, "
            f"but holds {sorted(names)}"
        )
    checked = _checked(tensors, path, "")
    return checked if "test_inputs" not in tensors else checked | _checked(tensors, path, "test_")


def _npz(path: Path) -> dict[str, Tensor]:
    try:
        _check_growth(path)
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.ascontiguousarray(archive[name])) for name in archive.files}
    except Refused:
        raise
    except UNREADABLE as error:
        raise Refused(f"{path} is not a readable .npz of plain numbers: {error}") from error


def _check_growth(path: Path) -> None:
    """Refuse an archive that would unpack to more than the limit; one that is not compressed has its own size."""
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    limit = max(UNPACKED, path.stat().st_size)
    if size > limit:
        raise Refused(f"{path} should unpack to at most {limit} bytes but would to {size}")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path} is not a readable .safetensors: {error}") from error


def _checked(tensors: dict[str, Tensor], path: Path, part: str) -> dict[str, Tensor]:
    inputs, labels = tensors[f"{part}inputs"], tensors[f"{part}labels"]
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.ndim != 1 or not whole:
        raise Refused(
            f"{path}: {part}labels should be integers [samples] but are {labels.dtype} {list(labels.shape)}"
        )
    if inputs.ndim < 2 or len(inputs) != len(labels) or inputs.numel() == 0:
        raise Refused(
            f"{path}: {part}inputs should be [samples, ...] with {len(labels)} samples, at least one, and at least one "
            f"number in each, but are {list(inputs.shape)}"
        )
    if inputs.is_complex():
        raise Refused(f"{path}: {part}inputs should be real numbers but are {inputs.dtype}")
    inputs, labels = inputs.float(), labels.long()
    if not bool(inputs.isfinite().all()):
        raise Refused(f"{path}: {part}inputs should be finite but hold NaN or infinity")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < WIDEST:
            raise Refused(f"{path}: {part}labels should be 0 to {WIDEST - 1} but one is {label}")
    return {f"{part}inputs": inputs, f"{part}labels": labels}
