"""Every tuned constant says what it limits, and names a record that exists or says that it was not tuned."""

import ast
import re
from pathlib import Path

import pytest

from proxprop import tuning

ROOT = Path(__file__).parents[1]


def sentences() -> dict[str, str]:
    """What stands below each constant."""
    body = ast.parse(Path(tuning.__file__).read_text()).body
    found = {}
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[statement.targets[0].id] = below.value.value if said else ""
    return found


@pytest.mark.parametrize("constant", [name for name in dir(tuning) if name.isupper()])
def test_a_constant_names_the_record_it_was_tuned_by(constant: str) -> None:
    said = sentences()[constant]
    records = re.findall(r"[\w-]+\.json", said)
    assert bool(records) != ("Not tuned" in said)
    assert all((ROOT / "results" / "bench" / record).exists() for record in records)
