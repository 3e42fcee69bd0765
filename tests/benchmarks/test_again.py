"""Records that are measured again by the command they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from again import ROOT, measure, parts

QUICK = "benchmarks/step.py --device cpu --networks digits-100 --methods cg1 --rounds 1"


def record(path: Path, command: str) -> Path:
    path.write_text(json.dumps({"command": command, "rows": []}))
    return path


def test_variables_in_front_of_a_command_are_set() -> None:
    assert parts("A=1 B='x y' step.py -n 3") == (["step.py", "-n", "3"], {"A": "1", "B": "x y"})


def test_a_record_is_replaced_by_what_its_command_measures(tmp_path: Path) -> None:
    path = record(tmp_path / "quick.json", QUICK)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "again.py"), str(path)], env=env, check=False
    )
    assert done.returncode == 0
    found = json.loads(path.read_text())
    assert found["rows"]
    assert found["command"] == QUICK
    assert [each.name for each in tmp_path.iterdir()] == ["quick.json"]


def test_a_record_outlives_a_command_that_fails(tmp_path: Path) -> None:
    path = record(tmp_path / "bad.json", QUICK + " --no-such-option")
    before = path.read_text()
    assert not measure(path)
    assert path.read_text() == before


def test_only_benchmarks_are_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"should be one of step\.py, ablation\.py"):
        measure(record(tmp_path / "bad.json", "rm -r /"))
