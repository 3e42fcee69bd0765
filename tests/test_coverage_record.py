"""The script that measures which lines and branches the tests cover."""

import coverage_record


def summary(lines: int, all_lines: int, branches: int, all_branches: int) -> dict:
    counts = zip(coverage_record.COUNTS, (lines, all_lines, branches, all_branches), strict=True)
    return {"summary": dict(counts)}


def test_percentages_are_by_room_and_over_all() -> None:
    files = {
        "src/proxprop/nn/linear.py": summary(8, 10, 1, 2),
        "src/proxprop/nn/conv.py": summary(10, 10, 2, 2),
        "src/proxprop/device.py": summary(0, 20, 0, 0),
    }
    assert coverage_record.by_room(files) == {
        "all": {"lines": 45.0, "branches": 75.0},
        "device.py": {"lines": 0.0, "branches": 100.0},
        "nn": {"lines": 90.0, "branches": 75.0},
    }


def test_outcomes_are_read_from_the_last_line() -> None:
    line = "2 failed, 4100 passed, 37 skipped, 1 warning in 250.12s (0:04:10)"
    assert coverage_record.outcomes(line) == {"failed": 2, "passed": 4100, "skipped": 37}
