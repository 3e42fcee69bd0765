"""The site says what the records say, and the look at a built site finds what is wrong with it."""

from pathlib import Path

import check_site
import modules_described
import numbers_from_records
import pytest

import proxprop

PAGE = '<html><head><link rel="stylesheet" href="a.css"></head><body id="top">{}</body></html>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages without a fault."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.css").write_text("img { background: url(picture.png) }")
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(
        PAGE.format(
            '<img src="picture.png"><a href="folder/b.html#far%20down"></a><a href="https://x.org/y"></a>'
        )
    )
    (tmp_path / "folder" / "b.html").write_text(
        '<a href="../index.html#top" id="far down"></a><a href=".."></a>'
    )
    return tmp_path


def test_a_site_without_a_fault(site: Path) -> None:
    assert list(check_site.problems(site, machine=["/somewhere"], names=["top"])) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="gone.html"></a>', "index.html: gone.html leads nowhere"),
        ('<img src="gone.png">', "index.html: gone.png leads nowhere"),
        ('<a href="#gone"></a>', "index.html: #gone has no such anchor"),
        ('<a href="folder/b.html#gone"></a>', "index.html: folder/b.html#gone has no such anchor"),
        ('<script src="https://x.org/a.js"></script>', "index.html: fetches https://x.org/a.js"),
        ('<img src="//x.org/a.png">', "index.html: fetches //x.org/a.png"),
        ("made in /somewhere/else", "index.html: names /somewhere"),
        (
            '<dt class="field-odd">Type<span class="colon">:</span></dt>\n<dd class="field-odd"><p>The largest</p></dd>',
            "index.html: took the start of a docstring for a type: 'The largest'",
        ),
        (
            '<dt class="field-even">Return type<span class="colon">:</span></dt>\n<dd class="field-even"><p>A handle</p></dd>',
            "index.html: took the start of a docstring for a type: 'A handle'",
        ),
    ],
)
def test_a_fault_is_named(site: Path, body: str, problem: str) -> None:
    (site / "index.html").write_text(PAGE.format(body))
    assert list(check_site.problems(site, machine=["/somewhere"])) == [problem]


def test_a_style_that_fetches_is_named(site: Path) -> None:
    (site / "a.css").write_text("@font-face { src: url('https://x.org/font.woff') }")
    assert list(check_site.problems(site)) == ["a.css: fetches https://x.org/font.woff"]


def test_a_name_that_no_page_describes_is_named(site: Path) -> None:
    assert list(check_site.problems(site, names=["top", "proxprop.convert"])) == [
        "proxprop.convert is public, and no page describes it"
    ]


def test_no_page_is_a_fault(tmp_path: Path) -> None:
    assert len(list(check_site.problems(tmp_path))) == 1


def test_every_public_name_is_looked_for() -> None:
    wanted = modules_described.anchors()
    assert {f"proxprop.{name}" for name in proxprop.__all__} <= wanted | {
        a.removeprefix("module-") for a in wanted
    }
    assert {"proxprop.nn.Linear", "proxprop.diagnostics.observe", "proxprop.solvers.Plan"} <= wanted
    assert not any(name.endswith("Tensor") for name in wanted)


def test_pages_show_the_numbers_that_the_readme_shows() -> None:
    found = numbers_from_records.found()
    text = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"With correct conjugate gradients it is {found['fig1_cg_loss']}" in text
    accuracies = [found[f"fig1_{name}_test"] for name in ("cg", "published", "backprop")]
    assert "is {} instead of {} (BackProp {})".format(*accuracies) in text
    assert (
        f"ends at {found['gpt_running']} nats a byte of held-out text instead of {found['gpt_adamw']}" in text
    )
    assert f"takes {found['running_gpt_10']} times as long" in text
    (ways,) = (line for line in found["table_ways"].splitlines() if line.startswith("| ResNet-18"))
    assert ways.split(" | ")[1:3] == ["1.62", "2.07"]
    assert "1.62, 2.07" in text


def test_a_table_of_records_has_a_cell_for_every_setting() -> None:
    table = numbers_from_records.found()["table_tau_theta"].splitlines()
    assert len(table) == 2 + 7
    assert table[-1] == "| 100 | 0.161 (53.6 %) | diverged |"
