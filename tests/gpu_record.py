"""Run every test that needs a GPU and write results/gpu-tests.json: `python tests/gpu_record.py [options of pytest]`.

`--processes N` shares the tests among so many processes, and `--seconds S` begins no test after so many: the record then
says how many were not run. It needs torch, pytest, hypothesis and numpy. The package may be a checkout that is not
installed. Where there is no git, the commit comes from the environment variable COMMIT.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
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
    """A pytest plugin that counts how tests ended, and names those that failed.

    Args:
        share: runs every `count`-th test, beginning with this one.
        count: how many processes share the tests.
        seconds: no test begins after so many.
    """

    def __init__(self, share: int = 0, count: int = 1, seconds: float = math.inf) -> None:
        self.share, self.count, self.until = share, count, time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the other tests to other processes."""
        items[:] = items[self.share :: self.count]

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out what begins too late."""
        if time.monotonic() < self.until:
            return None
        self.counts["not run"] += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once; a failure of its fixtures is one of its own."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that can't be imported fails, and one that skips itself is skipped; one process says so."""
        if report.outcome == "passed" or self.share:
            return
        self.counts[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def add(self, part: dict[str, object]) -> None:
        """Count what another process ran."""
        self.counts.update(part["counts"])
        self.failures += part["failures"]


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
        **{outcome: outcomes.counts[outcome] for outcome in ("passed", "failed", "skipped", "not run")},
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
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--share", type=int)
    parser.add_argument("--part", type=Path)
    options, given = parser.parse_known_args(arguments)
    if options.share is not None:
        outcomes = Outcomes(options.share, options.processes, options.seconds)
        return run_share(outcomes, options.part, given)
    outcomes, status = run_all(options.processes, options.seconds, given)
    RECORD.write_text(json.dumps(record(outcomes, arguments), indent=1) + "\n")
    return status


def run_share(outcomes: Outcomes, part: Path, given: list[str]) -> int:
    """Run one process's share of the tests, and write down what came of it."""
    quiet = [option for message in TORCH_WARNS for option in ("-W", f"ignore:{message}:UserWarning")]
    status = pytest.main(["-q", "-m", "", *quiet, *TESTS, *given], plugins=[outcomes])
    part.write_text(json.dumps({"counts": outcomes.counts, "failures": outcomes.failures}))
    return int(status)


def run_all(count: int, seconds: float, given: list[str]) -> tuple[Outcomes, int]:
    """Run all tests in so many processes, which share the cores. One that ended without a word counts as a failure."""
    outcomes, status = Outcomes(), 0
    cores = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"OMP_NUM_THREADS": cores, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{share}.json" for share in range(count)]
        shared = ["--processes", str(count), "--seconds", str(seconds)]
        options = [[*shared, "--share", str(s), "--part", str(p)] for s, p in enumerate(parts)]
        running = [
            subprocess.Popen([sys.executable, __file__, *own, *given], env=environment) for own in options
        ]
        for share, (process, part) in enumerate(zip(running, parts, strict=True)):
            status = max(status, process.wait())
            if part.exists():
                outcomes.add(json.loads(part.read_text()))
            else:
                outcomes.counts["failed"] += 1
                outcomes.failures.append(f"process {share} ended with {process.returncode}")
    return outcomes, status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
