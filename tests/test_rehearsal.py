"""A rehearsed release changes what a real one has to: the version in both files, and the changelog's headings."""

import datetime
import re
import shutil
from pathlib import Path

import pytest

import rehearsal

FILES = "src/proxprop/__init__.py", "CITATION.cff", "CHANGELOG.md"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of this checkout that name a version."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(rehearsal.ROOT / name, tmp_path / name)
    return tmp_path


def test_a_version_is_put_into_both_files_and_nothing_else_changes(checkout: Path) -> None:
    before = {name: (checkout / name).read_text() for name in FILES}
    old = rehearsal.version_of(checkout)
    rehearsal.set_version(checkout, "12.3.4")
    assert rehearsal.version_of(checkout) == "12.3.4"
    for name in FILES:
        lines = zip(before[name].splitlines(), (checkout / name).read_text().splitlines(), strict=True)
        changed = [(a, b) for a, b in lines if a != b]
        assert [a.replace(old, "12.3.4") for a, _ in changed] == [b for _, b in changed]
        assert len(changed) == (name != "CHANGELOG.md")


def test_what_was_unreleased_gets_the_version_and_a_new_section_begins(checkout: Path) -> None:
    path = checkout / "CHANGELOG.md"
    before = path.read_text()
    rehearsal.name_changes(checkout, "12.3.4", datetime.date(2030, 1, 2))
    after = path.read_text()
    assert re.findall(r"^## (.*)$", after, re.MULTILINE)[:2] == ["[Unreleased]", "[12.3.4] - 2030-01-02"]
    assert after.replace("## [12.3.4] - 2030-01-02\n\n", "") == before


def test_a_file_without_a_version_is_not_passed_over(checkout: Path) -> None:
    (checkout / "CITATION.cff").write_text("title: no version\n")
    with pytest.raises(
        AssertionError, match=r"CITATION.cff should name its version once, and does so 0 times"
    ):
        rehearsal.set_version(checkout, "1.0")
