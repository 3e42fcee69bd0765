"""Run the tests of kernels without a GPU: under Triton's interpreter, in a separate process."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = [
    pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_interpreter.py"),
    # the interpreter runs on numpy, which warns of entries that a kernel masks out
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning"
    ),
]
