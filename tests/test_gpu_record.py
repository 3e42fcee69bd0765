"""The record of a run on a GPU counts every test once and leaves no file out."""

from pathlib import Path

import pytest

import gpu_record
from gpu_record import ROOT, TESTS, Outcomes

EXAMPLE = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skips(): pass
@pytest.fixture
def broken(): raise ValueError
def test_fixture_breaks(broken): pass
"""


def test_no_file_is_left_out() -> None:
    asking = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "cuda.is_available()" in path.read_text() and path != Path(__file__)
    }
    assert asking == {path for path in TESTS if path.endswith(".py")}
    assert all((ROOT / path).exists() for path in TESTS)


def test_every_test_counts_once(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "test_no_module.py").write_text("import no_such_module")
    (tmp_path / "test_elsewhere.py").write_text(
        "import pytest\npytest.skip('needs a GPU', allow_module_level=True)"
    )
    outcomes = Outcomes()
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--rootdir={tmp_path}"]
    pytest.main([*options, "-c", "/dev/null", str(tmp_path)], plugins=[outcomes])
    assert outcomes.counts == {"passed": 1, "failed": 3, "skipped": 2}
    assert len(outcomes.failures) == 3


def test_processes_share_all_tests(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(EXAMPLE)
    (tmp_path / "test_lacking.py").write_text("import no_such_module")
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--rootdir={tmp_path}"]
    every = Outcomes()
    for share in range(3):
        outcomes = Outcomes(share, 3)
        pytest.main([*options, "-c", "/dev/null", str(tmp_path)], plugins=[outcomes])
        every.add({"counts": dict(outcomes.counts), "failures": outcomes.failures})
    assert every.counts == {"passed": 1, "failed": 3, "skipped": 1}
    assert len(every.failures) == 3


def test_what_begins_too_late_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text(EXAMPLE)
    outcomes = Outcomes(seconds=0.0)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    pytest.main([*options, "-c", "/dev/null", str(tmp_path)], plugins=[outcomes])
    assert outcomes.counts == {"not run": 4}


def test_the_record_names_commit_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc")
    outcomes = Outcomes()
    outcomes.counts.update(passed=2, skipped=1)
    found = gpu_record.record(outcomes, ["-x"])
    assert found["command"] == "python tests/gpu_record.py -x"
    assert (found["commit"], found["passed"], found["failed"], found["skipped"]) == ("abc", 2, 0, 1)
    assert found["torch"]


def test_no_git_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    assert gpu_record.commit() == "unknown"
