"""Records that are measured again by the command they name."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from again import ROOT, is_of, measure, parts

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


@pytest.mark.parametrize(
    ("measured", "now", "same"),
    [("abc123", "abc123def", True), ("abc123def", "abc123", True), ("abc123", "def", False), ("", "abc", False), ("abc", "", False)],
)  # fmt: skip
def test_a_record_of_the_present_commit_is_known(tmp_path: Path, measured: str, now: str, same: bool) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"environment": {"commit": measured}}))
    assert is_of(now, path) is same


def test_records_of_the_present_commit_are_skipped_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"command": "rm -r /", "environment": {"commit": "abc"}}))
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COMMIT": "abc"}
    again = [sys.executable, str(ROOT / "benchmarks" / "again.py"), str(path)]
    assert subprocess.run(again, env=env, check=False).returncode == 0
    refused = subprocess.run([*again, "--anyway"], env=env, capture_output=True, text=True, check=False)
    assert refused.returncode
    assert "its command should be one of" in refused.stderr


def test_only_benchmarks_are_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"should be one of step\.py, ablation\.py"):
        measure(record(tmp_path / "bad.json", "rm -r /"))


def gpu_records() -> list[Path]:
    told = subprocess.run(
        ["make", "--dry-run", "gpu-records"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / word for word in told.stdout.split() if word.endswith(".json")]


@pytest.mark.parametrize("path", gpu_records(), ids=lambda path: path.stem)
def test_what_a_gpu_measured_names_a_command_that_is_still_understood(path: Path, monkeypatch) -> None:
    command, _ = parts(json.loads(path.read_text())["command"])
    monkeypatch.setattr(sys, "argv", command)
    importlib.import_module(Path(command[0]).stem).parse()
