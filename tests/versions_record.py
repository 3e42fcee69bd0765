"""Run the tests of `make test` and add a row to results/versions.json: `python tests/versions_record.py [options]`.

`nox -s record` does it on every Python there is. A row stays until the same Python and torch are tried again.
Options go to pytest, `-n 2 --dist loadfile` among them.
"""

import json
import os
import platform
import sys

import pytest
import torch

from gpu_record import ROOT, Outcomes, commit

RECORD = ROOT / "results" / "versions.json"
ABOUT_IT = "tests/test_package.py::test_classifiers_name_the_pythons_that_passed_and_ci_tries_them"
"""A test of what the record says, which can't be right before the record is made."""


def row(outcomes: Outcomes, arguments: list[str], tried: str) -> dict[str, object]:
    """What was tried, at which commit, and how its tests ended."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "commit": tried,
        "command": " ".join(["pytest", "-m", "'not slow'", *arguments]),
        **{outcome: outcomes.counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": outcomes.failures,
    }


def merged(rows: list[dict[str, object]], new: dict[str, object]) -> list[dict[str, object]]:
    """The rows with a new one, which takes the place of an older one with the same versions; in order of versions."""
    kept = {(old["python"], old["torch"]): old for old in [*rows, new]}
    return sorted(kept.values(), key=lambda each: (_numbers(each["python"]), _numbers(each["torch"])))


def _numbers(version: object) -> list[int]:
    """A version without its local part, for comparing.

    >>> _numbers("2.13.0+cpu")
    [2, 13, 0]
    """
    return [int(part) for part in str(version).partition("+")[0].split(".")]


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    outcomes, tried = Outcomes(), commit()
    status = pytest.main(["-q", "-m", "not slow", "--deselect", ABOUT_IT, *arguments], plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print("the run did not end by itself, so nothing is recorded", file=sys.stderr)
        return int(status)
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.is_file() else []
    RECORD.write_text(json.dumps({"rows": merged(rows, row(outcomes, arguments, tried))}, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
