"""The Python layout is read and never executed."""

import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxprop.lab.data import pickled
from proxprop.lab.refusal import Refused

# As Python 2 and the NumPy of its day wrote CIFAR-10: protocol 2, byte strings, numpy.core.
PYTHON2 = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
    b"U\x01b\x87Rq\x05(K\x01K\x01K\x06\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff"
    b"\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x01\x02\xfd\xfe\xfftbU\x06labelsq\x08]q\x09(K\x03K\x09eu."
)


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path, call=os.mkdir):
        self.path, self.call = str(path), call

    def __reduce__(self):
        return self.call, (self.path,)


def test_python2_is_read():
    entries = pickled.read(PYTHON2, "batch")
    assert entries["labels"] == [3, 9]
    np.testing.assert_array_equal(entries["data"], np.array([[0, 1, 2, 253, 254, 255]], dtype=np.uint8))


@given(
    pixels=st.lists(st.binary(min_size=12, max_size=12), min_size=1, max_size=5),
    protocol=st.sampled_from([2, 3, 4]),
    data=st.data(),
)
def test_what_was_pickled_is_read_back(pixels, protocol, data):
    array = np.frombuffer(b"".join(pixels), dtype=np.uint8).reshape(len(pixels), 12)
    labels = data.draw(st.lists(st.integers(0, 300), min_size=len(pixels), max_size=len(pixels)))
    entries = pickled.read(pickle.dumps({b"data": array, "labels": labels, "name": b"x"}, protocol), "batch")
    np.testing.assert_array_equal(entries["data"], array)
    assert entries["labels"] == labels
    assert entries["name"] == b"x"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.mkdir, os.system, eval, subprocess.check_output, Path.mkdir])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"data": x}, lambda x: [{"labels": [x]}]])
def test_hostile_pickles_are_refused_and_do_nothing(tmp_path, protocol, call, wrap):
    target = tmp_path / "executed"
    content = pickle.dumps(wrap(Hostile(target, call)), protocol)
    with pytest.raises(Refused, match=r"names .* which no dataset needs|opcode .* is not one of those"):
        pickled.read(content, "batch")
    assert not target.exists()


HAND_MADE = [
    (b"cos\nsystem\n(S'true'\ntR.", "names os.system"),
    (b"\x80\x02cnumpy\ndtype\n(lp0\nb.", "opcode|state set|call|dictionary"),
    (b"(S'os'\nS'system'\ni__builtin__\neval\n.", "opcode INST"),
    (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "names posix.system"),
    (b"\x80\x02}cnumpy\nndarray\nb.", "a state set on something that is not an array"),
    (b"\x80\x02]K\x01R.", "a call of something that is not a name"),
    (b"\x80\x02\x82\x01.", "opcode EXT1"),
    (b"\x80\x02}Q.", "opcode BINPERSID"),
    (b"\x80\x02", "is not a readable pickle"),
    (b"", "is not a readable pickle"),
    (b"\x80\x02K\x01.", "should hold a dictionary but holds int"),
    (b"\x80\x02}K\x01K\x02s.", "a key should be text"),
    (b"\x80\x02u.", "is not a readable pickle"),
]


@pytest.mark.parametrize(("content", "message"), HAND_MADE)
def test_damaged_or_strange_pickles_are_refused(content, message):
    with pytest.raises(Refused, match=message):
        pickled.read(content, "batch")


@pytest.mark.parametrize(
    "array",
    [np.zeros(3, np.float64), np.zeros((2, 2), np.uint8, order="F")[:, :], np.array([{}], dtype=object)],
)
def test_only_plain_bytes_are_arrays(array):
    if array.dtype == np.uint8:
        array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    with pytest.raises(Refused, match="an array cannot be read"):
        pickled.read(pickle.dumps({"data": array}, 2), "batch")


@given(cut=st.integers(0, len(PYTHON2) - 1))
def test_a_cut_file_is_refused(cut):
    with pytest.raises(Refused, match="batch"):
        pickled.read(PYTHON2[:cut], "batch")


@given(st.binary(max_size=60))
def test_noise_never_gets_past_the_reader(noise):
    try:
        entries = pickled.read(b"\x80\x02" + noise, "batch")
    except Refused:
        return
    assert all(isinstance(key, str) for key in entries)
