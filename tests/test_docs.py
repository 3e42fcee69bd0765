"""What the documents say is what the records and the code say."""

import ast
import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from proxprop.lab.paper import curves

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def ratio(network: str, method: str, precision: str = "fp32", record: str = "h200") -> str:
    rows = json.loads((ROOT / "results" / "bench" / f"{record}.json").read_text())["rows"]
    (found,) = [
        r["ratio"]
        for r in rows
        if (r["network"], r["method"], r["precision"]) == (network, method, precision)
    ]
    return f"{found:.2f}"


def snippets() -> list[tuple[str, str]]:
    """Every fenced Python block of every page, with a name."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        found += [(f"{page.stem}-{number}", block) for number, block in enumerate(blocks)]
    return found


PASTED = dict(snippets())


@pytest.mark.parametrize("name", PASTED)
def test_a_snippet_runs_as_pasted(name: str, tmp_path: Path) -> None:
    """Each by itself, in a process and a folder of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PASTED[name]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if name == "README-0":
        assert "Linear  16,640" in done.stdout
    if name == "deferred-1":
        assert done.stdout in (ROOT / "docs" / "deferred.md").read_text()


def fragments() -> dict[str, str]:
    """Blocks of Python that no reader could paste alone, because they name no language: a call to put somewhere."""
    found = {}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, (language, block) in enumerate(FENCE.findall(page.read_text())):
            if not language and called(block):
                found[f"{page.stem}-{number}"] = block
    return found


def called(text: str) -> set[str]:
    """The names of what a piece of Python calls; nothing where it is no Python."""
    try:
        code = ast.parse(text)
    except SyntaxError:
        return set()
    calls = [node.func for node in ast.walk(code) if isinstance(node, ast.Call)]
    return {ast.unparse(function).rpartition(".")[2] for function in calls}


FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FRAGMENTS = fragments()
SHOWN_ONLY = {"log"}
"""Weights & Biases is no dependency: its `log` takes any dict of numbers."""


@pytest.mark.parametrize("name", FRAGMENTS)
def test_what_a_fragment_calls_is_called_by_an_example_or_a_test(name: str) -> None:
    scripts = [path for folder in ("examples", "tests", "src") for path in (ROOT / folder).rglob("*.py")]
    known = set().union(*(called(path.read_text()) for path in scripts if path.name != "test_docs.py"))
    assert called(FRAGMENTS[name]) <= known | SHOWN_ONLY


def test_every_block_of_code_names_a_language_that_is_run_or_is_no_python() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    languages = {language for page in pages for language, _ in FENCE.findall(page.read_text())}
    directives = {language for language in languages if language.startswith("{")}
    assert {language.partition("}")[0] for language in directives} <= {
        "{code-cell",
        "{toctree",
        "{image",
        "{include",
        "{literalinclude",
    }
    assert languages - directives <= {"", "python", "sh", "toml"}


CAPTURED = "h200-rotation"


def test_the_readmes_ratios_are_the_records() -> None:
    text = " ".join(README.split())
    mlp = f"{ratio('mlp-500', 'cg1', record=CAPTURED)} (cg1), {ratio('mlp-500', 'cg3', record=CAPTURED)} (cg3) and {ratio('mlp-500', 'exact', record=CAPTURED)} (exact)"
    assert f"the paper's MLP costs {mlp} times BackProp" in text
    convnet = f"{ratio('convnet-500', 'cg3', record=CAPTURED)} (cg3) and {ratio('convnet-500', 'exact', record=CAPTURED)} (exact)"
    assert f"its ConvNet {convnet}" in text
    assert f"costs {ratio('mlp-wide-256', 'cg3')} (cg3)" in text
    assert f"a narrow one (128) {ratio('mlp-narrow-2048', 'cg3')}" in text
    tf32 = f"{ratio('mlp-500', 'cg3', 'tf32', CAPTURED)} (cg3) and {ratio('mlp-500', 'exact', 'tf32', CAPTURED)} (exact)"
    bf16 = " and ".join(ratio("mlp-500", method, "bf16", "h200-bf16") for method in ("cg3", "exact"))
    assert f"In TF32, where BackProp's own products are fast, the MLP costs {tf32}; in bf16 {bf16}" in text
    methods = "cg1", "cg3", "cg10", "exact"
    cpu = [f"{ratio('mlp-500', method, record='cpu-calm')} ({method})" for method in methods]
    assert f"the paper's MLP costs {', '.join(cpu[:-1])} and {cpu[-1]}, with quartiles" in text
    convnet = " and ".join(
        f"{ratio('convnet-500', method, record='cpu-calm')} ({method})" for method in ("cg3", "exact")
    )
    assert f"within a tenth, and its ConvNet {convnet}" in text
    small = [f"{ratio('digits-100', method, record='cpu-calm')} ({method})" for method in ("cg3", "exact")]
    assert f"ms with BackProp, costs {' and '.join(small)}" in text


def test_the_readmes_verdict_is_the_peers_pages() -> None:
    page = " ".join((ROOT / "docs" / "peers.md").read_text().split())
    text = " ".join(README.split())
    verdict = re.search(r"the best ProxProp wins \d+, ties \d+ and loses \d+ of \d+ small tasks", page)
    assert verdict is not None
    assert verdict[0] in text
    lost = re.findall(r"\) \| (\w+) [\de.-]+ \([\d.]+\) \| [^|]* \| loses", page)
    assert (len(lost), lost.count("SOAP")) == (5, 4)
    assert "loses 4 of 7 small tasks, three of the four to SOAP" in text
    held = re.search(r"tasks that were held out it (wins \d+, ties \d+ and loses \d+) of 5", page)
    assert held is not None
    assert f"until all methods were fixed it {held[1]}, to SOAP" in text
    best = re.search(r"\| one for all .*? failed of \d+ trials \| [|\s-]*\| ([^|]+) \|", page)
    assert best is not None
    assert best[1] == "running √S + Muon"
    assert "Muon fed with it did best with one setting for all twelve tasks" in text
    start = " ".join((ROOT / "docs" / "start.md").read_text().split())
    assert "lower than the best ProxProp in four of the twelve small tasks" in start


def test_the_readmes_advice_is_the_peers_pages() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    advice = dict(re.findall(r"^- You use \*\*(\w+).*?\*\*: (.*)\.$", page, re.MULTILINE))
    lines = dict(re.findall(r"^- \*\*(SGD|AdamW|Muon|SOAP)\*\*: (.*(?:\n  .*)*)$", README, re.MULTILINE))
    assert list(lines) == list(advice)
    for name, said in lines.items():
        assert said.startswith(("try", "stay"))
        assert advice[name].split(". ")[-1].lower() == said.partition(" (")[0].lower()
        counts = re.findall(
            r"(`Exact\(\)`|`CG\(3\)`|a running √?S) \(?(\d+ better, \d+ worse)", " ".join(said.split())
        )
        assert counts
        for direction, count in counts:
            assert f"{direction} {count}" in advice[name]
    (pinn,) = re.findall(r"^- Your loss holds \*\*derivatives.*$", page, re.MULTILINE)
    assert pinn.endswith(
        "a running S 0 better, 6 worse (0, 3); a running √S 4 better, 1 worse (1, 0). Try a running √S."
    )
    assert "try a running √S (4 better, 1 worse). S itself is 0 better, 6 worse" in " ".join(README.split())


WAYS = [
    ("mlp-fp32", "mlp-500", "fp32", "the paper's MLP"),
    ("resnet", "resnet18-last-128", "bf16", "ResNet-18"),
    ("gpt", "gpt2-8x1024", "bf16", "GPT-2 small"),
    ("autoencoder", "autoencoder-1000", "tf32", "autoencoder"),
]


@pytest.mark.parametrize(("name", "network", "precision", "title"), WAYS)
def test_the_readmes_table_of_ways_is_the_records(
    name: str, network: str, precision: str, title: str
) -> None:
    rows = json.loads((ROOT / "results" / "bench" / f"h200-ways-{name}.json").read_text())["rows"]
    ratios = {(r["way"], r["method"]): f"{r['ratio']:.2f}" for r in rows}
    assert {(r["network"], r["precision"]) for r in rows} == {(network, precision)}
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {title}"))
    cells = line.strip("| ").split(" | ")[1:]
    expected = [
        [ratios.get((way, method), "–") for method in ("cg3", "exact")] for way in ("eager", "compile")
    ]
    assert [cell.split(", ") for cell in cells] == [e if set(e) != {"–"} else ["–"] for e in expected]


def test_what_the_readme_says_of_memory_is_in_the_records() -> None:
    most = {
        name: max(
            r["memory"] or 0
            for r in json.loads((ROOT / "results" / "bench" / f"h200-ways-{name}.json").read_text())["rows"]
        )
        for name in ("mlp-fp32", "autoencoder")
    }
    text = " ".join(README.split())
    assert (
        f"up to {most['mlp-fp32']:.2f} times BackProp's peak for the MLP and {most['autoencoder']:.2f} times"
        in text
    )


def after(epoch: int, solver: str, column: str) -> float:
    with (ROOT / "results" / "paper" / "fig1.csv").open() as file:
        found = [
            float(row[column])
            for row in csv.DictReader(file)
            if (row["solver"], row["epoch"]) == (solver, str(epoch))
        ]
    assert len(found) == 3
    return fmean(found)


def test_what_the_readme_says_of_the_paper_is_in_the_tables() -> None:
    text = " ".join(README.split())
    paper = dict(zip(*curves()["exact_vs_inexact_prox_mlp_plot", "ProxProp (cg3)"], strict=True))[10]
    assert f"ten epochs is {after(10, 'published:3', 'train_loss'):.3f} (paper {paper:.3f})" in text
    assert f"With correct conjugate gradients it is {after(10, 'cg:3', 'train_loss'):.3f}" in text
    right, released, plain = (
        f"{100 * after(50, solver, 'test_accuracy'):.1f} %" for solver in ("cg:3", "published:3", "backprop")
    )
    assert f"after 50 epochs is {right} instead of {released} (BackProp {plain})" in text


def test_what_the_readme_says_of_running_averages_is_in_the_records() -> None:
    text, page = " ".join(README.split()), (ROOT / "docs" / "running.md").read_text()
    muon, gpt = (line for line in page.splitlines() if line.startswith("Each at its best learning rate"))
    alone, _, averaged = map(float, re.findall(r": ([\d.]+) ±", muon))
    assert f"loss is {averaged:.5f} with it and {alone:.4f} without" in text
    alone, *averaged = map(float, re.findall(r": ([\d.]+) ±", gpt))
    assert f"ends at {min(averaged):.3f} nats a byte of held-out text instead of {alone:.3f}" in text
    (every,) = re.findall(r"\| a running S, ρ = 0.3 \| ([\d.]+) \|", page)
    (tenth,) = re.findall(r"\| a running S, ρ = 0.3, S of one step in 10 \| ([\d.]+) \|\n", page)
    assert f"took {float(tenth):.1f} times as long with S from one step in ten" in text
    assert f"{float(every):.1f} times with S from every step" in text


@pytest.mark.parametrize(
    ("script", "page"),
    [("report.py", "performance.md"), ("running.py", "running.md"), ("bounds.py write", "bounds.md")],
)
def test_a_page_is_made_from_the_records(script: str, page: str) -> None:
    made = subprocess.run(
        [sys.executable, *f"benchmarks/{script}".split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (ROOT / "docs" / page).read_text() == made, "run `make docs`"
