"""The record of tried versions keeps one row for each, in order, and names what failed."""

import json

import versions_record
from gpu_record import Outcomes


def test_a_row_takes_the_place_of_the_one_with_the_same_versions() -> None:
    old = [{"python": "3.9.1", "torch": "2.13.0+cpu", "passed": 1}, {"python": "3.11.7", "torch": "2.9.0"}]
    new = {"python": "3.9.1", "torch": "2.13.0+cpu", "passed": 2}
    between = {"python": "3.11.7", "torch": "2.13.0"}
    assert versions_record.merged([*old, between], new) == [new, old[1], between]


def test_a_row_says_what_was_run_and_what_failed() -> None:
    outcomes = Outcomes()
    outcomes.counts.update(passed=3, failed=1)
    outcomes.failures.append("tests/test_x.py::test_y")
    row = versions_record.row(outcomes, ["-n", "2"], "abc")
    assert (row["passed"], row["failed"], row["skipped"]) == (3, 1, 0)
    assert row["failures"] == ["tests/test_x.py::test_y"]
    assert row["command"] == "pytest -m 'not slow' -n 2"


def test_rows_of_the_record_are_in_order_and_have_the_same_columns() -> None:
    rows = json.loads(versions_record.RECORD.read_text())["rows"]
    for row in rows:
        assert rows == versions_record.merged(rows, row)
        assert list(row) == list(versions_record.row(Outcomes(), [], "abc"))


def test_the_test_about_the_record_exists() -> None:
    path, _, name = versions_record.ABOUT_IT.partition("::")
    assert f"def {name}(" in (versions_record.ROOT / path).read_text()
