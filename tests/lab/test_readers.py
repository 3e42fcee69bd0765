"""Readers of dataset files: right files are read, wrong ones are named."""

import gzip
import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from proxprop.lab.data import cifar10, folders, idx, load, own
from proxprop.lab.data.load import Split
from proxprop.lab.refusal import Refused

BATCH = 4


def cifar_rows(seed):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 10, BATCH).astype(np.uint8), generator.integers(
        0, 256, (BATCH, 3072)
    ).astype(np.uint8)


def write_binary(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(cifar10.TRAIN + cifar10.TEST):
        labels, pixels = cifar_rows(seed)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())
    return folder


def write_python(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(cifar10.TRAIN + cifar10.TEST):
        labels, pixels = cifar_rows(seed)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, 2))
    return folder


def write_idx(path, array, kind=8):
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    opened = gzip.open if path.suffix == ".gz" else open
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "wb") as file:
        file.write(head + array.astype(np.uint8).tobytes())


def write_mnist(folder, end="", samples=12):
    generator = np.random.default_rng(0)
    for start, count in (("train", samples), ("t10k", 6)):
        write_idx(folder / f"{start}-images-idx3-ubyte{end}", generator.integers(0, 256, (count, 5, 4)))
        write_idx(folder / f"{start}-labels-idx1-ubyte{end}", np.arange(count) % 10)
    return folder


def test_both_cifar_layouts_say_the_same(tmp_path):
    binary = cifar10.read(write_binary(tmp_path / "bin"), batch=BATCH)
    python = cifar10.read(write_python(tmp_path / "py"), batch=BATCH)
    for one, other in zip(binary, python, strict=True):
        np.testing.assert_array_equal(one, other)
    labels, pixels = cifar_rows(5)
    np.testing.assert_array_equal(binary[2].reshape(BATCH, -1), pixels)
    np.testing.assert_array_equal(binary[3], labels)
    assert binary[0].shape == (5 * BATCH, 3, 32, 32)


def test_a_cut_binary_file_is_named(tmp_path):
    folder = write_binary(tmp_path)
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Refused, match=r"data_batch_3.bin should have 12292 bytes but has 12291"):
        cifar10.read(folder, batch=BATCH)


def test_a_label_out_of_range_is_named(tmp_path):
    folder = write_binary(tmp_path)
    path = folder / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(Refused, match=r"test_batch.bin: labels should be 0 to 9 but one is 10"):
        cifar10.read(folder, batch=BATCH)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({b"labels": [0] * BATCH}, "data should be uint8 of shape"),
        (
            {b"data": np.zeros((BATCH, 3071), np.uint8), b"labels": [0] * BATCH},
            "data should be uint8 of shape",
        ),
        ({b"data": np.zeros((BATCH, 3072), np.uint8)}, "labels should be a list of 4 numbers"),
        ({b"data": np.zeros((BATCH, 3072), np.uint8), b"labels": [0, 1, 2, "3"]}, "labels should be 0 to 9"),
    ],
)
def test_a_wrong_python_batch_is_named(tmp_path, entries, message):
    folder = write_python(tmp_path)
    (folder / "data_batch_1").write_bytes(pickle.dumps(entries, 2))
    with pytest.raises(Refused, match=message):
        cifar10.read(folder, batch=BATCH)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_is_read_plain_and_gzipped(tmp_path, end):
    images, labels, test, test_labels = idx.read(write_mnist(tmp_path, end))
    assert images.shape == (12, 1, 5, 4)
    assert test.shape == (6, 1, 5, 4)
    assert labels.tolist() == [*range(10), 0, 1]
    assert test_labels.tolist() == list(range(6))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_idx_roundtrip(tmp_path_factory, shape, data):
    size = int(np.prod(shape))
    array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).reshape(shape)
    path = tmp_path_factory.mktemp("idx") / "a.gz"
    write_idx(path, array)
    np.testing.assert_array_equal(idx.read_file(path), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "should begin as an IDX file"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00", "should begin as an IDX file of unsigned bytes"),
        (b"\x00\x00\x08\x01\x00\x00", "header says"),
        (b"\x00\x00\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", "should hold 1 byte to 2 GiB"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x03ab", "should hold 3 bytes of data but holds 2"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x03abcd", "should hold 3 bytes of data but holds more"),
    ],
)
def test_a_wrong_idx_file_is_named(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(Refused, match=message):
        idx.read_file(path)


def test_damaged_gzip_is_named(tmp_path):
    path = tmp_path / "a.gz"
    write_idx(path, np.zeros(2000))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Refused, match="is damaged"):
        idx.read_file(path)


def test_images_and_labels_must_belong_together(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(11))
    with pytest.raises(Refused, match="do not belong together"):
        idx.read(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.full(12, 10))
    with pytest.raises(Refused, match="labels should be 0 to 9 but one is 10"):
        idx.read(tmp_path)


def test_digits_are_split_without_overlap_and_in_range():
    digits = load("digits")
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1300, 200, 297)
    assert digits.shape == (1, 8, 8)
    assert digits.classes == 10
    assert float(digits.train.inputs.min()) == 0.0
    assert float(digits.train.inputs.max()) == 1.0


def test_mnist_is_found_scaled_and_split(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXPROP_DATA", str(tmp_path))
    write_mnist(tmp_path / "MNIST" / "raw", samples=12)
    dataset = load("mnist", validation=3)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [9, 3, 6]
    assert dataset.validation.labels.tolist() == [9, 0, 1]
    assert float(dataset.train.inputs.max()) <= 1.0
    with pytest.raises(Refused, match="fashion-mnist was not found"):
        load("fashion-mnist")
    with pytest.raises(Refused, match="validation should be at most 11"):
        load("mnist", validation=12)


def test_a_named_folder_is_searched_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_mnist(tmp_path / "cache" / "proxprop" / "mnist")
    assert folders.find("mnist") == tmp_path / "cache" / "proxprop" / "mnist"
    assert folders.find("mnist", str(tmp_path / "elsewhere")) is None
    write_mnist(tmp_path / "elsewhere")
    assert folders.find("fashion-mnist", str(tmp_path / "elsewhere")) == tmp_path / "elsewhere"


def test_an_unknown_dataset_suggests_a_known_one():
    with pytest.raises(
        Refused, match=r"data should be one of digits, .* but is 'cifra10'; did you mean 'cifar10'?"
    ):
        load("cifra10")


def test_own_tensors_in_both_formats(tmp_path, blobs):
    tensors = own.read(blobs)
    save_file(tensors, tmp_path / "blobs.safetensors")
    again = own.read(tmp_path / "blobs.safetensors")
    assert torch.equal(tensors["inputs"], again["inputs"])
    one, other = load(str(blobs)), load(str(tmp_path / "blobs.safetensors"))
    assert torch.equal(one.test.inputs, other.test.inputs)
    assert [len(part) for part in (one.train, one.validation, one.test)] == [45, 5, 10]


GOOD = {"inputs": np.zeros((7, 2), np.float32), "labels": np.arange(7)}
WRONG = [
    ({"inputs": GOOD["inputs"]}, r"should hold inputs and labels.* but holds \['inputs'\]"),
    (GOOD | {"extra": np.zeros(1)}, "but holds .*'extra'"),
    (GOOD | {"test_inputs": GOOD["inputs"]}, "should hold inputs and labels"),
    (GOOD | {"labels": np.arange(6)}, "inputs should be .* with 6 samples"),
    (GOOD | {"inputs": np.zeros((7, 0))}, "at least one number in each"),
    (GOOD | {"labels": np.zeros(7)}, "labels should be integers"),
    (GOOD | {"labels": np.arange(7) - 1}, "labels should be 0 to 999999 but one is -1"),
    (GOOD | {"labels": np.arange(7) * 10**12}, "labels should be 0 to 999999 but one is 6000000000000"),
    (
        GOOD | {"test_inputs": GOOD["inputs"], "test_labels": GOOD["labels"] + 10**12},
        "test_labels should be 0 to",
    ),
    (GOOD | {"inputs": np.full((7, 2), np.nan)}, "inputs should be finite"),
    (GOOD | {"inputs": np.full((7, 2), 1j)}, "inputs should be real numbers but are torch.complex128"),
    (GOOD | {"labels": np.arange(7) * 1j}, "labels should be integers"),
    (GOOD | {"inputs": np.array([{}] * 7, dtype=object)}, "is not a readable .npz of plain numbers"),
    (
        GOOD | {"test_inputs": np.zeros((2, 3)), "test_labels": np.zeros(2, int)},
        "test_inputs should have the shape",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG)
def test_wrong_own_tensors_are_named(tmp_path, arrays, message):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(Refused, match=message):
        load(str(path))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_that_are_not_what_they_say(tmp_path, suffix):
    path = tmp_path / f"own{suffix}"
    with pytest.raises(Refused, match="there is no file"):
        load(str(path))
    path.write_bytes(b"nothing of the sort")
    with pytest.raises(Refused, match="is not a readable"):
        load(str(path))


def damaged(content: bytes) -> bytes:
    """The archive with a block of a kind that deflate does not have at the start of its first member."""
    where = 30 + int.from_bytes(content[26:28], "little") + int.from_bytes(content[28:30], "little")
    return content[:where] + b"\xff" + content[where + 1 :]


def encrypted(content: bytes) -> bytes:
    """The archive with the flag of encryption set in its directory."""
    where = content.index(b"PK\x01\x02") + 8
    return content[:where] + b"\x01" + content[where + 1 :]


def strange(content: bytes) -> bytes:
    """The archive with a compression that nobody knows."""
    where = content.index(b"PK\x01\x02") + 10
    return content[:where] + b"\x63" + content[where + 1 :]


@pytest.mark.parametrize("spoil", [damaged, encrypted, strange])
def test_an_archive_that_cannot_be_unpacked_is_named(tmp_path, spoil):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, **GOOD)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Refused, match=r"is not a readable \.npz of plain numbers"):
        load(str(path))


@pytest.mark.parametrize("samples", [10**15, 10**25])
def test_an_array_whose_header_promises_too_much_is_named(tmp_path, samples):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f4", "fortran_order": False, "shape": (samples, 2)}
    )
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", head.getvalue() + bytes(8))
    with pytest.raises(Refused, match=r"is not a readable \.npz of plain numbers"):
        load(str(path))


def test_an_array_whose_header_does_not_end_is_named(tmp_path):
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "inputs.npy", b"\x93NUMPY\x01\x00" + (300).to_bytes(2, "little") + b"[" * 299 + b"\n"
        )
    with pytest.raises(Refused, match=r"is not a readable \.npz of plain numbers"):
        load(str(path))


def test_a_bomb_of_an_archive_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "UNPACKED", 4000)
    path = tmp_path / "own.npz"
    np.savez_compressed(path, inputs=np.zeros((1000, 2), np.float32), labels=np.zeros(1000, int))
    with pytest.raises(Refused, match="should unpack to at most 4000 bytes but would to 16"):
        load(str(path))
    np.savez(path, inputs=np.zeros((1000, 2), np.float32), labels=np.zeros(1000, int))
    assert len(load(str(path)).train) == 751  # what is not compressed may be as large as it is


def test_too_few_samples_to_split(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, inputs=np.zeros((5, 2)), labels=np.zeros(5, int))
    with pytest.raises(Refused, match="should hold at least 6 samples"):
        load(str(path))


def test_a_split_moves_as_a_whole():
    split = Split(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)).to(torch.device("meta"))
    assert split.inputs.device.type == split.labels.device.type == "meta"
