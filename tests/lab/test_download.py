"""Downloads: checked before they are kept, unpacked with care, explained when they fail."""

import hashlib
import http.client
import io
import random
import tarfile
import urllib.error

import pytest

from proxprop.lab.data import download
from proxprop.lab.data.download import Source
from proxprop.lab.refusal import Refused


def tar_with(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    return path


def source(path, size=None):
    content = path.read_bytes()
    return Source(path.as_uri(), size or len(content), hashlib.sha256(content).hexdigest())


def test_an_archive_is_fetched_checked_and_unpacked(tmp_path, monkeypatch):
    archive = tar_with(tmp_path / "set.tar.gz", [("set/a.bin", b"abc", tarfile.REGTYPE)])
    monkeypatch.setitem(download.SOURCES, "cifar10", [source(archive)])
    seen = []
    download.download(
        "cifar10", tmp_path / "root", lambda name, done, total: seen.append((name, done, total))
    )
    assert (tmp_path / "root" / "cifar10" / "set" / "a.bin").read_bytes() == b"abc"
    size = archive.stat().st_size
    assert seen == [("set.tar.gz", size, size)]
    assert not (tmp_path / "root" / "cifar10" / "set.tar.gz").exists()


def test_a_download_does_not_follow_a_link(tmp_path, monkeypatch):
    archive = tar_with(tmp_path / "set.tar.gz", [("set/a.bin", b"abc", tarfile.REGTYPE)])
    monkeypatch.setitem(download.SOURCES, "cifar10", [source(archive)])
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "root" / "cifar10").mkdir(parents=True)
    (tmp_path / "root" / "cifar10" / "set.tar.gz.part").symlink_to(mine)
    download.download("cifar10", tmp_path / "root")
    assert mine.read_text() == "mine"


def test_what_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    file = tmp_path / "images.gz"
    file.write_bytes(b"images")
    monkeypatch.setitem(download.SOURCES, "mnist", [source(file)])
    download.download("mnist", tmp_path / "root")
    file.unlink()
    download.download("mnist", tmp_path / "root")
    assert (tmp_path / "root" / "mnist" / "images.gz").read_bytes() == b"images"


@pytest.mark.parametrize("content", [b"something else", b"something else and much longer than promised"])
def test_a_wrong_checksum_keeps_nothing(tmp_path, monkeypatch, content):
    file = tmp_path / "images.gz"
    file.write_bytes(b"what was promised")
    promised = source(file)
    file.write_bytes(content)
    monkeypatch.setitem(download.SOURCES, "mnist", [promised])
    with pytest.raises(Refused, match=r"should have SHA-256 .* nothing was kept"):
        download.download("mnist", tmp_path / "root")
    assert list((tmp_path / "root" / "mnist").iterdir()) == []


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("Name or service not known"), http.client.BadStatusLine("<html>")]
)
def test_without_internet_it_says_what_to_do(tmp_path, monkeypatch, error):
    def unreachable(url, timeout):
        raise error

    monkeypatch.setattr(download.urllib.request, "urlopen", unreachable)
    with pytest.raises(
        Refused, match=r"may have no internet. Fetch the file on another one .*--data-dir"
    ) as caught:
        download.download("cifar10", tmp_path)
    assert "\n" not in str(caught.value)
    assert "cifar-10-binary.tar.gz" in str(caught.value)


def test_a_place_that_cannot_be_written_is_no_matter_of_the_internet(tmp_path, monkeypatch):
    file = tmp_path / "images.gz"
    file.write_bytes(b"images")
    monkeypatch.setitem(download.SOURCES, "mnist", [source(file)])
    with pytest.raises(OSError, match=f"Not a directory: '{file / 'mnist'}'$"):
        download.download("mnist", file)

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/root/mnist/images.gz'$"):
        download.download("mnist", tmp_path / "root", progress=full)
    assert list((tmp_path / "root" / "mnist").iterdir()) == []


def test_an_unknown_name():
    with pytest.raises(Refused, match="did you mean 'mnist'"):
        download.download("mnits", None)


EVIL = [
    ("../outside", tarfile.REGTYPE, "points outside"),
    ("a/../../outside", tarfile.REGTYPE, "points outside"),
    ("/absolute", tarfile.REGTYPE, "points outside"),
    ("link", tarfile.SYMTYPE, "is a link or a device"),
    ("hard", tarfile.LNKTYPE, "is a link or a device"),
    ("pipe", tarfile.FIFOTYPE, "is a link or a device"),
    ("device", tarfile.CHRTYPE, "is a link or a device"),
]


@pytest.mark.parametrize(("name", "kind", "message"), EVIL)
def test_a_bad_member_stops_everything(tmp_path, name, kind, message):
    content = b"x" if kind == tarfile.REGTYPE else b""
    archive = tar_with(tmp_path / "a.tar.gz", [("good", b"fine", tarfile.REGTYPE), (name, content, kind)])
    with pytest.raises(Refused, match=message):
        download.unpack(archive, tmp_path / "to")
    assert not (tmp_path / "to" / "good").exists()
    assert not (tmp_path / "outside").exists()


def test_a_bomb_is_not_unpacked(tmp_path):
    archive = tar_with(tmp_path / "a.tar.gz", [("zeros", bytes(5000), tarfile.REGTYPE)])
    with pytest.raises(Refused, match="should unpack to at most 4000 bytes but would to 5000"):
        download.unpack(archive, tmp_path / "to", limit=4000)
    assert not (tmp_path / "to").exists()


def test_a_cut_archive(tmp_path):
    archive = tar_with(tmp_path / "a.tar.gz", [("file", random.Random(0).randbytes(9000), tarfile.REGTYPE)])
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(Refused, match="cannot be unpacked"):
        download.unpack(archive, tmp_path / "to")
