"""Measure which lines and branches `make test` covers and write results/coverage.json: `make coverage`.

Options of pytest may follow `python tests/coverage_record.py`. Lines that run only in other processes (ranks, Triton's
interpreter) count as not covered, and so do lines that need a GPU where there is none. Where there is no git, the
commit comes from the environment variable COMMIT.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from gpu_record import ROOT, commit

RECORD = ROOT / "results" / "coverage.json"
COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def room(file: str) -> str:
    """The folder of src/proxprop that a file is in, or the file itself."""
    return Path(file).relative_to("src/proxprop").parts[0]


def by_room(files: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Percentages of lines and branches for each room and for all.

    Args:
        files: of coverage's JSON report.
    """
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for file, found in files.items():
        for name in (room(file), "all"):
            totals[name] = [n + found["summary"][c] for n, c in zip(totals[name], COUNTS, strict=True)]
    return {name: percentages(*totals[name]) for name in sorted(totals)}


def percentages(lines: int, all_lines: int, branches: int, all_branches: int) -> dict[str, float]:
    return {
        "lines": round(100 * lines / all_lines, 1) if all_lines else 100.0,
        "branches": round(100 * branches / all_branches, 1) if all_branches else 100.0,
    }


def outcomes(summary: str) -> dict[str, int]:
    """Numbers of tests from the last line that pytest prints."""
    words = summary.replace(",", "").split()
    return {
        word: int(words[at - 1]) for at, word in enumerate(words) if word in ("passed", "failed", "skipped")
    }


def main(arguments: list[str]) -> int:
    measured = commit()  # before the tests, which take minutes
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        processes = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        measure = ["--cov=src/proxprop", "--cov-branch", f"--cov-report=json:{report}"]
        command = [sys.executable, "-m", "pytest", "-q", *processes, *measure, "-m", "not slow", *arguments]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(Path(folder) / "data")}
        start = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True)
        seconds = time.monotonic() - start
        print(done.stdout[-4000:])
        if not report.exists():
            return done.returncode or 1
        rooms = by_room(json.loads(report.read_text())["files"])
    last = done.stdout.strip().splitlines()[-1]
    record = {
        "command": " ".join(["python tests/coverage_record.py", *arguments]),
        "commit": measured,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "cores": os.cpu_count(),
        "seconds": round(seconds),
        **outcomes(last),
        "percent": rooms,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
