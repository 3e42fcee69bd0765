"""From records to tables, from tables to verdicts: what is missing is said, and nothing is made up."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proxprop.lab import experiments, paper
from proxprop.lab.config import Config
from proxprop.lab.figures.reproduction import figures
from proxprop.lab.records import Record
from proxprop.lab.refusal import Refused
from proxprop.lab.reproduction import grades, tables
from proxprop.lab.reproduction.claims import PARTS, verdicts
from proxprop.lab.reproduction.claims.verdict import Both
from proxprop.lab.reproduction.document import document
from proxprop.lab.reproduction.files import read_csv, write_csv
from proxprop.lab.reproduction.measured import LOSS, Seeds, arm, at, band, final, within
from proxprop.lab.reproduction.results import Results
from proxprop.lab.reproduction.write import staged, write_document, write_tables

BASE = Config(data="cifar10", device="cuda", epochs=50)
COMMITTED = Path(__file__).parents[2] / "results" / "paper"


def rows_like_the_papers(name, seeds=2):
    """An experiment's rows as they would be if every run repeated the paper's number."""
    found = []
    for config in experiments.paper([name], BASE, seeds):
        losses, accuracies = _papers_curves(name, config)
        lost = any(math.isnan(loss) for loss in losses)
        record = Record(
            Path(config.slug()),
            config,
            "diverged" if lost else "finished",
            [
                {
                    "epoch": epoch,
                    "seconds": float(epoch),
                    "loss": None if math.isnan(loss) else loss,
                    "validation_accuracy": accuracy,
                    "test_accuracy": accuracy,
                }
                for epoch, loss, accuracy in zip(range(51), losses, accuracies, strict=True)
            ],
        )
        found += tables.curve_rows([(config, record)])
    return found


def _papers_curves(name, config):
    if name == "table1":
        loss = paper.table().get((paper.name(config.solver), config.lr), 1.0)
        return [loss] * 51, [0.5] * 51
    curves = [
        paper.drawn(name, paper.name(config.solver), q, "epoch") for q in ("loss", "validation_accuracy")
    ]
    ys = [list(curve[1]) if curve else [0.5] * 51 for curve in curves]
    return [(y + y[-1:])[:51] for y in ys]


@pytest.fixture(scope="module")
def own():
    """Results that are the paper's own."""
    runs = {name: [(c, None) for c in experiments.paper([name], BASE, 2)] for name in experiments.PAPER}
    return Results(
        **{name: rows_like_the_papers(name) for name in experiments.PAPER}, runs=tables.run_rows(runs)
    )


def test_the_papers_own_numbers_are_reproduced(own):
    found = verdicts(own)
    for part in ("Figure 1", "Figure 2"):
        losses = [v for v in found[part] if "loss" in v.claim and "lower loss" not in v.claim]
        assert {v.reproduced for v in losses if "architecture" not in v.claim} == {grades.YES}
        assert {v.graded for v in losses if v.graded} <= {Both("yes", "yes"), Both(None, "yes")}
    cells = [v.reproduced for v in found["Table 1"][:4]]
    assert [text[:6] for text in cells] == ["9 of 9"] * 4
    assert {v.reproduced for v in found["Table 1"][4:]} == {grades.YES}


def test_a_number_that_is_off_is_not_reproduced(own):
    double = [row | {LOSS: 3 * row[LOSS]} for row in own.fig1 if row["solver"] == "published:3"]
    rest = [row for row in own.fig1 if row["solver"] != "published:3"]
    (verdict,) = [
        v
        for v in verdicts(replace(own, fig1=rest + double))["Figure 1"]
        if v.claim == "ProxProp (cg3): loss after 10 epochs"
    ]
    assert verdict.reproduced == "by correct CG"
    assert "published 3× the paper's" in verdict.why


def test_nothing_run_is_said_everywhere():
    found = verdicts(Results())
    assert {v.reproduced for claims in found.values() for v in claims} == {grades.NOT_RUN}
    text = document(Results())
    assert "Nothing has been run yet." in text
    assert all(f"### {part}" in text for part in PARTS)


def test_missing_seeds_are_counted(own):
    one = [row for row in own.fig1 if row["seed"] == 0]
    text = document(replace(own, fig1=one))
    assert "(1 of 2 seeds)" in text


def test_every_part_of_every_size_of_results_is_written(own):
    for names in ([], ["fig1"], ["table1"], ["fig2"], ["fig1", "table1", "fig2"]):
        part = Results(**{name: getattr(own, name) for name in names}, runs=own.runs)
        assert document(part).startswith("# Proximal Backpropagation, reproduced")


def test_tables_are_the_same_after_reading(own, tmp_path):
    write_csv(tmp_path / "fig1.csv", tables.CURVES, own.fig1)
    assert read_csv(tmp_path / "fig1.csv") == own.fig1
    assert read_csv(tmp_path / "nothing.csv") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("reading,orders\ngr\xe4y,7\n".encode("latin-1"), "spectrum.csv is not a readable .csv in UTF-8"),
        (b"reading,orders\ngrey,7,8\n", "spectrum.csv has a row with more or fewer cells than its header"),
        (b"reading,orders\ngrey\n", "spectrum.csv has a row with more or fewer cells than its header"),
        (
            b"reading;orders\ngrey;7\n",
            "spectrum.csv should have the columns reading, .* but lacks reading, images",
        ),
        (b"", "spectrum.csv should have the columns reading, .* but lacks reading, images"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path, content, message):
    (tmp_path / "spectrum.csv").write_bytes(content)
    with pytest.raises(Refused, match=message):
        Results.read(tmp_path)


def test_a_mark_before_a_table_is_no_part_of_its_first_column(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfreading,orders\r\ngrey,7\r\n")
    assert read_csv(tmp_path / "a.csv", ("reading",)) == [{"reading": "grey", "orders": 7}]


def test_numbers_of_an_arm():
    base = {"status": "finished", "solver": "exact"}
    rows = [
        base | {"seed": s, "epoch": e, "seconds": 2.0 * e, LOSS: 1.0 / (e + s + 1)}
        for s in (0, 1)
        for e in (0, 1)
    ]
    rows += [base | {"seed": 2, "epoch": 0, "seconds": 0.0, LOSS: 1.0, "status": "diverged"}]
    assert at(rows, LOSS, 1) == Seeds((1 / 2, 1 / 3), diverged=1)
    assert final(rows, LOSS).lost
    assert final(rows, LOSS).mean == math.inf
    assert within(rows[:4], LOSS, 1.9) == Seeds((1.0, 1 / 2))
    assert [list(map(round, 12 * np.array(part))) for part in band(rows[:4], LOSS)] == [
        [0, 12],
        [6, 4],
        [9, 5],
        [12, 6],
    ]
    assert arm([row | {"status": "unfinished"} for row in rows]) == []


def test_a_record_is_found_wherever_it_was_computed(made):
    configs = [
        Config(solver="cg:3", lr=0.1, hidden=(8,), batch_size=10, epochs=4, device="cuda", seed=s)
        for s in (0, 1)
    ]
    often, seldom = made("cg:3"), made("cg:3", measure_every=2)
    found = tables.pairs([configs[0], replace(configs[0], measure_every=2), configs[1]], [seldom, often])
    assert [record for _, record in found] == [often, seldom, None]


def test_runs_that_shared_the_machine_have_no_seconds(made):
    record = made()
    crowded = replace(record, starts=[{"runs_at_once": 4}])
    rows = [list(tables.curve_rows([(r.config, r)])) for r in (record, crowded)]
    assert [row["seconds"] is None for row in rows[0]] == [False] * 5
    assert [row["seconds"] is None for row in rows[1]] == [True] * 5


def test_a_run_names_its_experiments_and_the_command_that_runs_it(made):
    record = made("exact", data_dir="/somewhere", save_weights=False)
    rows = tables.run_rows(
        {"fig1": [(record.config, record)], "table1": [(record.config, record), (BASE, None)]}
    )
    assert [(row["experiments"], row["status"]) for row in rows] == [
        ("fig1 table1", "finished"),
        ("table1", "missing"),
    ]
    assert "--solver exact" in rows[0]["command"]
    assert "/somewhere" not in rows[0]["command"]


def test_every_figure_is_drawn(own):
    assert list(figures(own)) == ["fig1", "table1", "fig2-convnet-2pool", "fig2-convnet"]
    assert figures(Results()) == {}


def test_figures_and_document_are_made_from_the_tables_alone(own, tmp_path):
    write_csv(tmp_path / "table1.csv", tables.CURVES, own.table1)
    write_csv(tmp_path / "runs.csv", tables.RUNS, own.runs)
    path = write_document(tmp_path)
    assert (
        path.read_text()
        == document(Results.read(tmp_path))
        == document(Results(table1=own.table1, runs=own.runs))
    )
    assert {p.name for p in tmp_path.glob("*.png")} == {"table1.png"}
    before = (tmp_path / "table1.svg").read_bytes()
    write_document(tmp_path)
    assert (tmp_path / "table1.svg").read_bytes() == before


def beyond_rows(loss):
    """Every run beyond the paper's, ending at the loss a function gives it; infinite is divergence."""
    found = []
    for name in experiments.BEYOND:
        for config in experiments.paper([name], BASE, 1):
            ends = [(0, 2.3), (10, loss(config))]
            epochs = [
                {
                    "epoch": epoch,
                    "loss": value if math.isfinite(value) else None,
                    "validation_accuracy": 0.5,
                    "test_accuracy": 0.5,
                }
                for epoch, value in ends
            ]
            status = "finished" if math.isfinite(ends[1][1]) else "diverged"
            found += tables.curve_rows(
                [(config, Record(Path(config.slug()), config, status, epochs))], experiment=name
            )
    return found


def test_what_is_beyond_the_paper_is_judged():
    def loss(config):
        if config.solver == "backprop":
            return math.inf if config.lr > 1 else 1.0
        return 0.1 * max(1.0, config.tau_theta if config.solver == "exact" else 1.0)

    results = Results(beyond=beyond_rows(loss), runs=tables.run_rows({"batches": [(BASE, None)]}))
    found = {v.claim.partition(":")[0]: v for v in verdicts(results)["Beyond the paper's runs"]}
    assert {v.reproduced for v in found.values()} == {grades.YES}
    assert found["exact is more sensitive to τ_θ than cg3"].correct.startswith(
        "cg3 5 orders, worst over best 1×; exact 3"
    )
    text = document(results)
    assert "| BackProp | 1 (50.0 %) | 1 (50.0 %) | 1 (50.0 %) | diverged |" in text
    assert list(figures(results)) == ["beyond"]
    worse = replace(results, beyond=beyond_rows(lambda config: 1.0 if config.solver == "backprop" else 2.0))
    told = {v.reproduced for v in verdicts(worse)["Beyond the paper's runs"][2:5]}
    assert told == {grades.NO}
    rows = [row for row in results.beyond if (row["solver"], row["tau"]) != ("exact", 0.1)]
    some = verdicts(replace(results, beyond=rows))["Beyond the paper's runs"][2:6]
    assert [v.reproduced for v in some] == [grades.NOT_RUN, grades.NOT_RUN, grades.YES, grades.YES]
    alone = [row for row in results.beyond if row["solver"] != "backprop"]
    some = verdicts(replace(results, beyond=alone))["Beyond the paper's runs"][2:6]
    assert {v.reproduced for v in some} == {grades.NOT_RUN}


def test_tables_are_written_from_records(made, tmp_path):
    record = made("cg:3", lr=1.0)
    write_tables([record], {"fig1": [record.config], "batches": [record.config], "fig2": [BASE]}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "fig1.csv",
        "beyond.csv",
        "runs.csv",
        "environment.json",
    }
    (run,) = read_csv(tmp_path / "runs.csv")
    assert run["experiments"] == "fig1 batches"
    assert [row["epoch"] for row in read_csv(tmp_path / "fig1.csv")] == [0, 1, 2, 3, 4]
    assert read_csv(tmp_path / "beyond.csv")[0]["experiment"] == "batches"


@pytest.mark.skipif(not (COMMITTED / "REPRODUCTION.md").is_file(), reason="results/paper is not there yet")
class TestCommitted:
    """What is committed under results/paper."""

    def test_the_document_is_made_from_the_tables(self):
        text = (COMMITTED / "REPRODUCTION.md").read_text()
        assert text == document(Results.read(COMMITTED)), (
            "proxprop reproduce spectrum --only-write --out results/paper"
        )

    def test_every_row_names_a_run_that_can_be_run_again(self):
        results = Results.read(COMMITTED)
        runs = {row["run"]: row for row in results.runs}
        for name in (*experiments.PAPER, "beyond"):
            assert {row["run"] for row in getattr(results, name)} <= set(runs), name
        assert all(row["command"].startswith("proxprop train --") for row in runs.values())


def test_two_processes_do_not_write_a_reproduction_at_once(tmp_path):
    (tmp_path / "fig1.csv").write_text("old")
    with staged(tmp_path) as fresh:
        (fresh / "fig1.csv").write_text("new")
        with pytest.raises(Refused, match="is being written by another process"), staged(tmp_path):
            pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("fig1.csv", "new")]


def test_what_a_kill_left_of_a_reproduction_is_removed_and_a_link_not_followed(tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    (out / ".new").mkdir(parents=True)
    (out / ".new" / "fig1.svg").write_text("half")
    with staged(out):
        pass
    assert list(out.iterdir()) == []
    mine.mkdir()
    (mine / "file").write_text("mine")
    (out / ".new").symlink_to(mine)
    with staged(out):
        pass
    assert (list(out.iterdir()), [path.name for path in mine.iterdir()]) == ([], ["file"])
