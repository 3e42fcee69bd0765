"""What the package says of itself agrees; `make package` builds it and tries it (tests/package_check.py)."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import proxprop

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_the_build_needs_hatchling_alone_and_the_core_torch_alone() -> None:
    assert [re.match(r"[\w-]+", need)[0] for need in PROJECT["build-system"]["requires"]] == ["hatchling"]
    assert [re.match(r"[\w-]+", need)[0] for need in PROJECT["project"]["dependencies"]] == ["torch"]


def test_importing_the_core_imports_no_extra() -> None:
    others = {
        "accelerate",
        "lightning",
        "matplotlib",
        "pytorch_lightning",
        "sklearn",
        "transformers",
        "typer",
    }
    code = f"import sys, proxprop.integrations; print(*{others!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_package_is_typed() -> None:
    assert (Path(proxprop.__file__).parent / "py.typed").exists()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [proxprop.__version__]
    assert re.findall(r"family-names: (\w+)", text) == ["Frerix", "Möllenhoff", "Moeller", "Cremers"]
    assert "https://arxiv.org/abs/1706.04638" in text


def test_classifiers_name_the_pythons_that_passed_and_ci_tries_them() -> None:
    """results/versions.json says which were tried; noxfile.py and the workflow list the same Pythons."""
    versions = r"\d\.\d\d"
    classified = set(re.findall(f"Python :: ({versions})", "\n".join(PROJECT["project"]["classifiers"])))
    tried = json.loads((ROOT / "results" / "versions.json").read_text())["rows"]
    assert classified == {re.match(versions, row["python"])[0] for row in tried if not row["failed"]}
    (listed,) = re.findall(r"^PYTHONS = (.*)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    matrices = re.findall(r"python: (\[.*\])", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert len(matrices) == 2
    assert {*matrices} == {listed}
    assert classified <= set(re.findall(versions, listed))


def test_every_stamp_of_the_makefile_is_an_extra_and_every_package_is_pinned() -> None:
    stamps = set(re.findall(r"\.venv/\.(\w+)", (ROOT / "Makefile").read_text()))
    assert {"lab", "dev", "package"} <= stamps <= EXTRAS.keys()
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    needed = {re.match(r"[\w-]+", need)[0] for extra in EXTRAS.values() for need in extra}
    assert needed - {"proxprop", "triton"} <= {*pinned}


def test_the_demo_installs_no_trainer() -> None:
    assert not any(
        name in need for need in EXTRAS["lab"] for name in ("transformers", "lightning", "mypy", "onnx")
    )
