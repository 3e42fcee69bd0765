"""How the tests of kernels run without a GPU: under Triton's interpreter, in a process of their own."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = [
    pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess of test_interpreter.py"),
    # numpy, which the interpreter runs on, warns of what a kernel masks out
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning"
    ),
]
