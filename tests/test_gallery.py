"""The pages of the gallery have the form that sphinx-gallery reads. Running them is slow, and `make site` does it too."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
PAGES = {page.stem: page for page in sorted(GALLERY.glob("plot_*.py"))}

page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def calls(code: ast.Module) -> list[str]:
    """What the code calls, as it writes it."""
    return [ast.unparse(node.func) for node in ast.walk(code) if isinstance(node, ast.Call)]


def test_the_gallery_has_a_title_and_pages() -> None:
    title, underline = (GALLERY / "GALLERY_HEADER.rst").read_text().splitlines()[:2]
    assert title == "Gallery"
    assert underline == "=" * len(title)
    assert len(PAGES) >= 9


@page
def test_a_page_starts_with_a_title_and_says_what_one_learns(page: Path) -> None:
    docstring = ast.get_docstring(compiled(page))
    assert docstring is not None
    title, underline, empty, *text = docstring.splitlines()
    assert underline == "=" * len(title)
    assert not empty
    assert 3 <= len(re.findall(r"\.\s", " ".join(text) + " ")) <= 6


@page
def test_a_page_has_cells_a_figure_and_checks_of_what_it_says(page: Path) -> None:
    code = compiled(page)
    assert len(re.findall(r"^# %%$", page.read_text(), re.MULTILINE)) >= 3
    assert {"plt.subplots", "plt.figure"} & set(calls(code))
    assert "plt.show" in calls(code)
    assert any(isinstance(node, ast.Assert) for node in ast.walk(code))


@page
def test_a_page_has_a_fixed_seed_and_the_style_of_the_lab(page: Path) -> None:
    assert "plt.rcParams.update" in calls(compiled(page))
    assert re.search(r"manual_seed\(\w+\)", page.read_text())


@pytest.mark.slow
@page
def test_a_page_runs_from_the_root(page: Path) -> None:
    environment = os.environ | {"MPLBACKEND": "Agg"}
    run = subprocess.run(
        [sys.executable, page], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr


def compiled(page: Path) -> ast.Module:
    """The page as code; a syntax error fails here."""
    return ast.parse(page.read_text(), page.name)
