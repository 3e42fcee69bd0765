"""What pages say in words of the tables beside them is what the records say."""

import json
import re
from pathlib import Path

import numbers_from_records
import pytest

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())
FOUND = numbers_from_records.found()
Column = dict[float, float]


def columns(name: str) -> dict[str, Column]:
    """A table of losses by solver and setting; infinite where a seed diverged."""
    header, _, *lines = [line.strip("| ").split(" | ") for line in FOUND[name].splitlines()]
    return {
        solver: {
            float(line[0]): float("inf") if line[place] == "diverged" else float(line[place].split()[0])
            for line in lines
        }
        for place, solver in enumerate(header[1:], start=1)
    }


def best(column: Column) -> float:
    return min(column, key=lambda setting: column[setting])


def test_tau_theta_is_worth_no_search_with_cg_and_has_two_sides_with_exact() -> None:
    table = columns("table_tau_theta")
    cg = [loss for _, loss in sorted(table["`CG(3)`"].items())]
    exact = [loss for _, loss in sorted(table["`Exact()`"].items())]
    assert cg == sorted(cg, reverse=True)
    assert exact[0] > min(exact) < exact[-1] == float("inf")


def test_where_adams_and_sgds_best_rates_lie() -> None:
    adam, sgd = columns("table_adam"), columns("table_sgd")
    assert best(adam["`CG(3)`"]) == 0.001 > best(adam["`Exact()`"])
    assert best(sgd["`CG(3)`"]) == max(sgd["`CG(3)`"])


def test_both_solvers_are_ahead_at_every_batch_size() -> None:
    table = columns("table_batches")
    for size, plain in table["BackProp"].items():
        assert max(table["`CG(3)`"][size], table["`Exact()`"][size]) < plain


@pytest.mark.parametrize(("name", "rate"), [("table_nesterov", "0.01"), ("table_adam", "0.0001")])
def test_the_readme_says_where_backprops_best_rate_lay_at_the_end(name: str, rate: str) -> None:
    column = columns(name)["BackProp"]
    assert best(column) == min(column) == float(rate)
    assert f"({rate})" in README[README.index("BackProp's best rate is the smallest of its grid") :]


def test_the_readme_says_where_the_best_rates_of_running_averages_lay() -> None:
    muon = columns("table_muon")["BackProp"]
    assert sorted(muon).index(best(muon)) == 1
    assert "each at its best of three learning rates, the middle one" in README
    page = (ROOT / "docs" / "running.md").read_text()
    (header,) = re.findall(r"^\| AdamW is fed \| lr (.*) \|$", page, re.MULTILINE)
    (losses,) = re.findall(r"^\| the gradient \| (0\.9866.*) \|$", page, re.MULTILINE)
    means = [float(cell.split()[0]) for cell in losses.split(" | ")]
    assert len(means) == len(header.split(" | lr ")) == 3
    assert min(means) == means[-1]
    assert "AdamW's best of three, the largest" in README


def test_what_a_gpt2_takes_is_the_records() -> None:
    assert f"{FOUND['running_gpt_10']} times as long with S from one step in ten" in README
    assert f"and {FOUND['running_gpt_32']} times with one in 32" in README


def test_what_the_readme_says_of_the_digits_on_a_cpu() -> None:
    rows = json.loads((ROOT / "results" / "bench" / "cpu-calm.json").read_text())["rows"]
    small = {row["method"]: row for row in rows if row["network"] == "digits-100"}
    assert f"takes {small['backprop']['milliseconds']:.1f} ms with BackProp" in README
    assert min(small[method]["ratio"] for method in ("cg3", "exact")) > 2
    assert "costs more than twice BackProp's" in README
    large = [row for row in rows if row["network"] == "mlp-500"]
    assert max(max(r["high"] - r["ratio"], r["ratio"] - r["low"]) for r in large) < 0.1
    assert "with quartiles within a tenth" in README


def test_what_pages_say_of_wrap_is_in_the_comparison() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    root = {
        name: (int(better), int(worse))
        for name, better, worse in re.findall(
            r"You use \*\*([^*]+)\*\*:.*a running √S (\d+) better, (\d+) worse", page
        )
    }
    start = " ".join((ROOT / "docs" / "start.md").read_text().split())
    assert "clearly worse in one each, and better in five, six and three" in start
    assert [root[name] for name in ("SGD, Nesterov", "AdamW", "Muon")] == [(5, 1), (6, 1), (3, 1)]
    assert root["SOAP"][0] < root["SOAP"][1]


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_the_first_mention_of_cifar10_says_that_it_was_a_copy(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    after = text[text.index("CIFAR-10") :][:120]
    assert "JPEG" in after
    assert "reordered" in after


def test_the_landing_page_says_of_the_peers_what_their_page_says() -> None:
    wins, ties, losses, tasks, better, worse = (
        int(FOUND[f"peers_{name}"]) for name in ("wins", "ties", "losses", "tasks", "better", "worse")
    )
    assert wins + ties + losses == tasks
    assert better > worse  # "more good than harm"
    index = " ".join((ROOT / "docs" / "index.md").read_text().split())
    named = (
        "wins {{ peers_wins }}, ties {{ peers_ties }} and loses {{ peers_losses }} of {{ peers_tasks }} small"
    )
    assert named in index
    assert "better in {{ peers_better }} and worse in {{ peers_worse }}" in index
