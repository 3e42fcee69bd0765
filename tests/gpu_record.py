"""Run every test that needs a GPU and write results/gpu-tests.json: `python tests/gpu_record.py [options of pytest]`.

It needs torch, pytest, hypothesis and numpy. The package may be a checkout that is not installed. Where there is no
git, the commit comes from the environment variable COMMIT.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "gpu-tests.json"
TESTS = [
    "tests/test_gpu.py",
    "tests/test_gpu_compile.py",
    "tests/test_replay.py",
    "tests/test_side_streams.py",
    "tests/test_counting.py",
    "tests/deferred/test_cuda.py",
    "tests/lab/test_peers_cuda.py",
    "tests/solvers/test_matmul.py",
    "tests/kernels",
]
"""The files with tests that run on a GPU alone, and the kernels', which Triton compiles there."""


TORCH_WARNS = ["The AccumulateGrad node's stream does not match", "Synchronization debug mode is a prototype"]
"""Warnings of torch 2.11 about graphs of single passes and about its own debug mode."""


class Outcomes:
    """A pytest plugin that counts how tests ended, and names those that failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once; a failure of its fixtures is one of its own."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that can't be imported fails, and one that skips itself is skipped."""
        if report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)


def commit() -> str:
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return triton.__version__


def record(outcomes: Outcomes, arguments: list[str]) -> dict[str, object]:
    return {
        "command": " ".join(["python tests/gpu_record.py", *arguments]),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        **{outcome: outcomes.counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": outcomes.failures,
    }


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("torch sees no GPU here, and a record without one would say nothing", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    source = str(ROOT / "src")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    outcomes = Outcomes()
    quiet = [option for message in TORCH_WARNS for option in ("-W", f"ignore:{message}:UserWarning")]
    status = pytest.main(["-q", "-m", "", *quiet, *TESTS, *arguments], plugins=[outcomes])
    RECORD.write_text(json.dumps(record(outcomes, arguments), indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
