"""Triton's interpreter must be chosen before Triton is imported, so the tests of kernels run in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.interpreter import INTERPRETED

FOLDER = Path(__file__).parent
FILES = [
    "test_averaging.py",
    "test_sample_cg.py",
    "test_feature_cg.py",
    "test_cholesky.py",
    "test_rotation.py",
    "test_split.py",
    "test_stacked_terms.py",
    "test_symmetric_square.py",
]


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_kernels_equal_their_plain_twins() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    files = [str(FOLDER / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout


def test_every_file_of_kernel_tests_is_interpreted_or_exempt() -> None:
    others = {"test_interpreter.py", "test_compile.py", "test_launch.py"}
    assert {path.name for path in FOLDER.glob("test_*.py")} == {*FILES, *others}
