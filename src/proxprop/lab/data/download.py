"""Fetch a dataset where there is internet: checked by SHA-256, unpacked member by member."""

import hashlib
import os
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from proxprop.lab.data.limit import UNPACKED
from proxprop.lab.records.sealed import created, naming
from proxprop.lab.refusal import Refused, one_of

Progress = Callable[[str, int, int], None]
CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file: where it is, how large, and its SHA-256."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rsplit("/", 1)[-1]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_IMAGES, _LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_TEST_IMAGES, _TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
SOURCES = {
    "cifar10": [
        Source(_CIFAR, 170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
    ],
    "mnist": [
        Source(_MNIST + _IMAGES, 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        Source(_MNIST + _LABELS, 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        Source(
            _MNIST + _TEST_IMAGES, 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        Source(
            _MNIST + _TEST_LABELS, 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    ],
    "fashion-mnist": [
        Source(
            _FASHION + _IMAGES, 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
        ),
        Source(_FASHION + _LABELS, 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        Source(
            _FASHION + _TEST_IMAGES,
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Source(
            _FASHION + _TEST_LABELS, 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    ],
}


def download(name: str, root: Path, progress: Progress = lambda name, done, total: None) -> None:
    """Fetch every file of a dataset into `root`/<name>, unpack archives, leave nothing half done.

    Args:
        name: cifar10, mnist or fashion-mnist.
        root: the folder that `proxprop.lab.data.folders` will search.
        progress: called with the file's name, bytes so far, bytes in all.
    """
    one_of("a dataset to download", name, SOURCES)
    folder = root / name
    for source in SOURCES[name]:
        target = folder / source.name
        if not (target.is_file() and _digest(target) == source.sha256):
            _fetch(source, target, progress)
        if target.suffixes[-2:] == [".tar", ".gz"]:
            unpack(target, folder)
            target.unlink()


def _fetch(source: Source, target: Path, progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(target.suffix + ".part")
    try:
        with naming(target), created(partial) as file:
            done = 0
            for chunk in _received(source, target):
                done += len(chunk)
                if done > source.size:
                    break
                file.write(chunk)
                progress(source.name, done, source.size)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if (came := _digest(partial)) != source.sha256:
        partial.unlink()
        raise Refused(f"{source.url} should have SHA-256 {source.sha256} but has {came}; nothing was kept")
    os.replace(partial, target)


def _received(source: Source, target: Path) -> Iterator[bytes]:
    """What comes over the internet, piece by piece."""
    try:
        with urllib.request.urlopen(source.url, timeout=30) as response:
            while chunk := response.read(CHUNK):
                yield chunk
    except (OSError, HTTPException) as error:
        raise Refused(_no_internet(source, target, error)) from error


def _no_internet(source: Source, target: Path, error: Exception) -> str:
    return (
        f"{source.url} could not be downloaded ({error}). This machine may have no internet. Fetch the file "
        f"on another one and put it, unpacked if it is a .tar.gz, into {target.parent}, or name the folder "
        "that holds it with --data-dir or PROXPROP_DATA; `proxprop train --data digits` needs no download."
    )


def unpack(archive: Path, folder: Path, limit: int = UNPACKED) -> None:
    """Unpack plain files and folders of a tar into `folder`.

    Every member is looked at before the first is written: no links, devices, absolute or climbing paths,
    and no more than `limit` bytes together.

    Raises:
        Refused: the archive is damaged or holds any such member.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                _check_member(member, archive)
            if (size := sum(member.size for member in members)) > limit:
                raise Refused(f"{archive} should unpack to at most {limit} bytes but would to {size}")
            tar.extractall(folder, members, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise Refused(f"{archive} cannot be unpacked: {error}") from error


def _check_member(member: tarfile.TarInfo, archive: Path) -> None:
    path = Path(member.name)
    if not (member.isfile() or member.isdir()):
        raise Refused(f"{archive}: {member.name} should be a plain file or folder but is a link or a device")
    if path.is_absolute() or ".." in path.parts:
        raise Refused(f"{archive}: {member.name} points outside the folder it is unpacked into")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
