"""docs/compatibility.md says what the tests say."""

import subprocess
import sys

import pytest

from compatibility import ROOT, Claim, Claims, cells, document


def test_the_document_is_the_one_the_tests_write(claims: Claims) -> None:
    committed = (ROOT / "docs" / "compatibility.md").read_text()
    written = document(claims.found) if claims.whole_suite else written_by_a_process()
    assert committed == written, "run: python tests/compatibility.py > docs/compatibility.md"


def written_by_a_process() -> str:
    """Where this run has not collected every test."""
    command = [sys.executable, str(ROOT / "tests" / "compatibility.py")]
    written = subprocess.run(command, capture_output=True, text=True)
    assert written.returncode == 0, written.stderr
    return written.stdout


def test_claims_of_one_feature_share_a_row() -> None:
    claims = [
        Claim("tests/a.py::test_one", "Tied weights", status="approximate", note="an upper bound"),
        Claim("tests/b.py::test_two", "Tied weights", status="works", mode="deferred"),
    ]
    assert cells(claims) == [
        "Tied weights",
        "approximate",
        "works",
        "an upper bound",
        "[`test_one`](../tests/a.py)<br>[`test_two`](../tests/b.py)",
    ]
    assert "| Tied weights | approximate | works |" in document(claims)


def test_claims_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(ValueError, match=r"should be one of works, .* but is 'fine'"):
        Claim("tests/a.py::test_one", "X", status="fine")
    with pytest.raises(ValueError, match=r"'refused' should come with a note"):
        Claim("tests/a.py::test_one", "X", status="refused")
    contradicting = [
        Claim("tests/a.py::test_one", "X"),
        Claim("tests/a.py::test_two", "X", status="refused", note="no"),
    ]
    with pytest.raises(ValueError, match=r"'X' is claimed as refused and works"):
        cells(contradicting)
