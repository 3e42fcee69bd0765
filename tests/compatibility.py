"""Write docs/compatibility.md from the tests that prove it: `python tests/compatibility.py > docs/compatibility.md`.

A test claims a row with `@pytest.mark.compatibility(feature, section=..., status=..., note=..., mode=...)`.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = ("Layers", "Ways of training", "Models", "Input")
MODES = ("immediate", "deferred")
STATUSES = {
    "works": "works",
    "approximate": "approximate",
    "refused": "refused with a reason",
    "explicit": "explicit with a reason",
}
ABSENT = "does not apply"

INTRODUCTION = """\
# What works with what

The tests named in a row prove it. `python tests/compatibility.py > docs/compatibility.md` writes this file from them, and
a test fails if the two differ.

- **works**: the directions are right, checked against an independent computation or against the same run without the
  feature.
- **approximate**: a documented approximation. The note says how it differs from the exact direction.
- **refused with a reason**: an error says what was expected, what was given and what to do instead.
- **explicit with a reason**: the parameters keep BackProp's gradient, and `proxprop.summary` says why.

Immediate mode solves inside `backward`; deferred mode (`proxprop.attach`) solves when the optimizer steps.
"""


@dataclass(frozen=True)
class Claim:
    """One marker on one test."""

    test: str
    feature: str
    section: str = "Ways of training"
    status: str = "works"
    note: str = ""
    mode: str = "immediate"

    def __post_init__(self) -> None:
        for value, accepted in [
            (self.section, SECTIONS),
            (self.status, tuple(STATUSES)),
            (self.mode, MODES),
        ]:
            if value not in accepted:
                raise ValueError(f"{self.test}: should be one of {', '.join(accepted)} but is {value!r}")
        if self.status != "works" and not self.note:
            raise ValueError(f"{self.test}: {self.status!r} should come with a note that gives the reason")


class Claims:
    """A pytest plugin that gathers the markers of everything collected, also of what will be deselected."""

    def __init__(self) -> None:
        self.found: list[Claim] = []
        self.whole_suite = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Read the markers; parametrized tests count once for each feature."""
        claims = (
            Claim(item.nodeid.split("[")[0], *marker.args, **marker.kwargs)
            for item in items
            for marker in item.iter_markers("compatibility")
        )
        self.found = list(dict.fromkeys(claims))
        named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        self.whole_suite = not (named or config.getoption("ignore") or config.getoption("lf", False))


def collect() -> list[Claim]:
    """The claims of the whole suite, in the order of files and lines."""
    claims, output = Claims(), io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")], plugins=[claims]
        )
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests could not be collected:\n{output.getvalue()}")
    return claims.found


def document(claims: Iterable[Claim]) -> str:
    """The whole file."""
    claims = list(claims)
    parts = [INTRODUCTION]
    for section in SECTIONS:
        rows = group(claim for claim in claims if claim.section == section)
        if rows:
            header = ["feature", "immediate mode", "deferred mode", "note", "proved by"]
            lines = [header, ["---"] * len(header), *(cells(row) for row in rows.values())]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            parts.append(f"## {section}\n\n{table}\n")
    return "\n".join(parts)


def group(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """Claims by feature, in the order they came."""
    rows: dict[str, list[Claim]] = {}
    for claim in claims:
        rows.setdefault(claim.feature, []).append(claim)
    return rows


def cells(row: list[Claim]) -> list[str]:
    """One line of the table from all claims of a feature."""
    notes = dict.fromkeys(claim.note for claim in row if claim.note)
    proofs = dict.fromkeys(proof(claim.test) for claim in row)
    return [row[0].feature, *(status(row, mode) for mode in MODES), "; ".join(notes), "<br>".join(proofs)]


def status(row: list[Claim], mode: str) -> str:
    """What the tests of one mode say; they must not contradict one another."""
    said = {claim.status for claim in row if claim.mode == mode}
    if len(said) > 1:
        tests = ", ".join(claim.test for claim in row)
        raise ValueError(f"{row[0].feature!r} is claimed as {' and '.join(sorted(said))}: {tests}")
    return STATUSES[said.pop()] if said else ABSENT


def proof(test: str) -> str:
    """A link to the test's file, under the test's name."""
    path, _, name = test.partition("::")
    return f"[`{name}`](../{path})"


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.stdout.write(document(collect()))
