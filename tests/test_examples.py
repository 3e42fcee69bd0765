"""The examples that need one process; those for torchrun are in test_distributed.py."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_gpt_trains_with_every_method(tmp_path):
    small = {
        "steps": 6,
        "layers": 1,
        "width": 16,
        "heads": 2,
        "positions": 16,
        "samples": 4,
        "batches": 1,
    }
    options = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "examples/gpt.py",
        "--device",
        "cpu",
        *options,
        *("--seeds", "0"),
        *(
            "--methods",
            "1e-3",
            "2e-3",
            "2e-3:0.1",
            "2e-3:0.3:9",
            "2e-3:0.3::5",
            "muon/2e-3",
            "muon/2e-3:0.3::5",
        ),
        "--json",
        str(tmp_path / "gpt.json"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    rows = json.loads((tmp_path / "gpt.json").read_text())["rows"]
    assert [row["damping"] for row in rows] == [None, None, 0.1, 0.3, 0.3, None, 0.3]
    assert [(row["rows"], row["update_every"]) for row in rows[2:5]] == [(None, 1), (9, 1), (None, 5)]
    assert [row["optimizer"] for row in rows] == ["adamw"] * 5 + ["muon"] * 2
    assert len({row["text"] for row in rows}) == 1
    assert all(math.isfinite(row["validation_loss"]) for row in rows)
    assert len({row["validation_loss"] for row in rows}) == len(rows) == 7


@pytest.mark.parametrize(
    ("name", "reached"), [("with_trainer", 3.0), ("with_lightning", 1.5), ("with_accelerate", 1.5)]
)
def test_an_integration_learns_in_under_40_lines(name: str, reached: float, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"\d+\.\d+", done.stdout)[-1]) < reached
