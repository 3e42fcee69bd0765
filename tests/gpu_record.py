"""Run every test that needs a GPU and write results/gpu-tests.json: `python tests/gpu_record.py [options of pytest]`.

It needs torch, pytest, hypothesis and numpy. The package may be a checkout that is not installed. Where there is no
git, the commit comes from the environment variable COMMIT.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
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
    "tests/solvers/test_matmul.py",
    "tests/kernels",
]
"""The files with tests that run on a GPU alone, and the kernels', which Triton compiles there."""


TORCH_WARNS = ["The AccumulateGrad node's stream does not match", "Synchronization debug mode is a prototype"]
"""Warnings of torch 2.11 about graphs of single passes and about its own debug mode."""


PROCESSES = 6
"""Tests wait for the host, not for the GPU, so that several processes share them out."""


class Outcomes:
    """A pytest plugin that takes a share of the tests, counts how they ended, and names those that failed.

    Args:
        share: which of the shares, counted from 0; files that can't be collected are the first one's.
        shares: how many there are.
    """

    def __init__(self, share: int = 0, shares: int = 1) -> None:
        self.share, self.shares = share, shares
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the tests of other shares to them."""
        items[:] = items[self.share :: self.shares]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once; a failure of its fixtures is one of its own."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that can't be imported fails, and one that skips itself is skipped."""
        if self.share or report.outcome == "passed":
            return
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


def run_share(share: int, arguments: list[str]) -> dict[str, object]:
    """How a share of the tests ended."""
    outcomes = Outcomes(share, PROCESSES)
    quiet = [option for message in TORCH_WARNS for option in ("-W", f"ignore:{message}:UserWarning")]
    pytest.main(["-q", "-m", "", "-p", "no:cacheprovider", *quiet, *TESTS, *arguments], plugins=[outcomes])
    return {"counts": outcomes.counts, "failures": outcomes.failures}


def run_all(arguments: list[str]) -> Outcomes:
    """How all tests ended, each share in a process of its own."""
    total = Outcomes()
    with tempfile.TemporaryDirectory() as folder:
        found = [Path(folder) / str(share) for share in range(PROCESSES)]
        commands = [
            [sys.executable, __file__, SHARE, str(k), str(path), *arguments] for k, path in enumerate(found)
        ]
        for process in [subprocess.Popen(command) for command in commands]:
            process.wait()
        for path in found:
            if not path.exists():
                total.counts["failed"] += 1
                total.failures.append(f"process {path.name} ended without a result")
                continue
            ended = json.loads(path.read_text())
            total.counts.update(ended["counts"])
            total.failures += ended["failures"]
    return total


SHARE = "--share"


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("torch sees no GPU here, and a record without one would say nothing", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    source = str(ROOT / "src")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    if arguments[:1] == [SHARE]:
        _, share, path, *rest = arguments
        Path(path).write_text(json.dumps(run_share(int(share), rest)))
        return 0
    outcomes = run_all(arguments)
    RECORD.write_text(json.dumps(record(outcomes, arguments), indent=1) + "\n")
    return int(bool(outcomes.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
