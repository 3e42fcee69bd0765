"""Analysis, findings, figures and page: pure functions of records that say what the records say."""

import csv
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from proxprop.lab import figures, paper
from proxprop.lab.analysis import Number, angles, reach, tasks, usable_rates
from proxprop.lab.config import Config
from proxprop.lab.experiments import fig1
from proxprop.lab.figures.curves import band
from proxprop.lab.findings import findings, headline
from proxprop.lab.report import write_report
from proxprop.lab.report.tables import Table, estimated, final_table, layer_table, loss_text, rate_table


@pytest.fixture(scope="module")
def written(tmp_path_factory, comparison):
    """The folder of a report on `comparison`, with its figures."""
    return write_report(comparison, tmp_path_factory.mktemp("report"), "t", formats=("svg",)).parent


@pytest.fixture(scope="module")
def comparison(made):
    """BackProp at three learning rates, one of them diverging, and cg:3, three seeds each."""
    records = []
    for seed in range(3):
        records += [
            made("backprop", lr=0.01, seed=seed, loss=0.2 + 0.01 * seed),
            made("backprop", lr=0.1, seed=seed, loss=0.1 + 0.01 * seed),
            made("backprop", lr=1.0, seed=seed, status="diverged"),
            made("cg:3", lr=0.1, seed=seed, loss=0.02, seconds=2.0),
            made("cg:3", lr=1.0, seed=seed, loss=0.001, seconds=2.0),
        ]
    return records


def test_records_are_grouped_into_tasks_and_arms(comparison, made):
    other = made("backprop", optimizer="adam")
    found = tasks([*comparison, other, made("exact", batch_size=20)])
    assert len(found) == 2
    assert [arm.full_name for arm in found[0].arms] == [
        "Nesterov SGD · BackProp", "Nesterov SGD · ProxProp cg3", "Adam · BackProp",
    ]  # fmt: skip
    assert list(found[0].arms[0].rates) == [0.01, 0.1, 1.0]


def test_the_best_rate_has_the_lowest_mean_loss_and_never_a_divergence(comparison):
    backprop, cg = tasks(comparison)[0].arms
    assert (backprop.best_rate, cg.best_rate) == (0.1, 1.0)
    assert backprop.final("loss", 0.1).mean == pytest.approx(0.11)
    assert backprop.final("loss", 0.1).spread == pytest.approx(0.01)
    assert backprop.final("loss", 1.0).mean == math.inf


def test_a_rate_with_a_diverged_seed_is_not_usable(comparison):
    task = tasks(comparison)[0]
    assert usable_rates(task, task.arms[0]) == [0.01, 0.1]
    assert usable_rates(task, task.arms[1]) == [0.1, 1.0]


def test_reach_is_the_median_over_seeds(made):
    records = [made(loss=loss) for loss in (0.5, 0.05, 0.05)]
    assert reach(records, 0.5, "epoch") == 2.0
    assert reach(records, 0.5, "seconds") == 0.5
    assert reach(records, 0.01, "epoch") is None


def test_a_seed_recorded_twice_counts_once_and_is_told(tmp_path, made):
    short = replace(made("backprop", loss=0.5), status="unfinished", epochs=made("backprop").epochs[:2])
    (task,) = tasks([short, made("backprop"), replace(made("backprop"), folder=tmp_path / "copy")])
    assert final_table(task).rows[0][2:4] == ["0.1", "90.0 %"]  # no ± over copies
    assert task.arms[0].best[0].status == "finished"
    assert task.repeated == 2
    text = write_report([short, made("backprop")], tmp_path, "t").read_text()
    assert "1 run, 1 method, 1 seed each. 1 more record of a seed that is already there left out." in text


def test_runs_with_another_momentum_are_another_task(made):
    one, other = tasks([made(), made(momentum=0.5)])
    assert (one.repeated, other.repeated) == (0, 0)
    assert other.title == f"{one.title}, momentum 0.5"


def test_one_is_not_said_in_the_plural(tmp_path, made):
    lonely = replace(made(epochs=1), status="unfinished", notes=["odd"])
    text = write_report([lonely], tmp_path, "t").read_text()
    assert "batch 10, 1 epoch<" in text
    assert "1 run, 1 method, 1 seed each. 1 of them is unfinished and counts as far as it got." in text
    assert "1 note from the runs" in text


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(made, tmp_path, suffix):
    (task,) = tasks([made("cg:3")])
    for name in ("a", "b"):
        figures.save(figures.curves(task, "sgd"), tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_the_headline_when_backprop_ends_where_it_began(made):
    worse = made("backprop", loss=2.0)
    text = headline(tasks([worse, made("cg:3", loss=1.0)])[0])
    assert "took 0 epochs instead of 0" in text


@pytest.mark.parametrize("accuracies", [(0.0, 0.0), (0.9, 0.9), (0.975, 0.98), (0.1, 0.99), (0.9991, 0.9992)])
def test_no_two_ticks_of_an_axis_read_alike(made, accuracies):
    record = made(lr=0.1, epochs=2)
    rows = [
        row | {"validation_accuracy": value}
        for row, value in zip(record.epochs, (0.0, *accuracies), strict=True)
    ]
    records = [
        replace(record, epochs=rows),
        replace(record, config=replace(record.config, lr=0.3), epochs=rows),
    ]
    (task,) = tasks(records)
    for figure in (figures.curves(task, "sgd"), figures.robustness(task, "sgd")):
        figure.draw_without_rendering()
        for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
            low, high = sorted(axis.get_view_interval())
            shown = [
                tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
            ]
            assert len(shown) == len(set(shown)), shown


def test_angles_are_the_cosines_in_degrees(made):
    found = angles([made("cg:3"), made("cg:3", seed=1)])
    assert found["1"] == pytest.approx([60.0] * 5)
    assert found["3"] == pytest.approx([math.degrees(math.acos(0.25))] * 5)


@pytest.mark.parametrize(
    ("loss", "seconds", "expected"),
    [
        (
            0.001,
            2.0,
            r"needed fewer epochs than BackProp\. .*ProxProp cg3 took 2 epochs instead of 4 .*\(1× the time\)",
        ),
        (0.1, 2.0, r"saved no epochs here\. .* took 4 epochs instead of 4 .*\(2× the time\)"),
        (0.5, 2.0, r"saved no epochs here\. .* no solver got there with Nesterov SGD"),
    ],
)
def test_the_headline_follows_the_numbers(made, loss, seconds, expected):
    task = tasks([made("backprop", loss=0.1), made("cg:3", lr=1.0, loss=loss, seconds=seconds)])[0]
    assert re.search(expected, headline(task)), headline(task)


def test_the_headline_when_backprop_diverges(made):
    task = tasks([made("backprop", status="diverged"), made("cg:3")])[0]
    assert "BackProp diverged at every learning rate with Nesterov SGD" in headline(task)


def test_nothing_is_said_without_a_comparison(made):
    assert headline(tasks([made("cg:3")])[0]) is None
    assert findings(tasks([made("backprop")])[0]) == []


def test_a_peer_is_in_the_table_but_not_called_proxprop(made):
    task = tasks([made("backprop"), made("halved", loss=1e-6)])[0]
    assert headline(task) is None
    assert [row[0] for row in final_table(task).rows] == ["Nesterov SGD · BackProp", "Nesterov SGD · halved"]


def test_findings_tell_the_numbers(comparison):
    said = " ".join(findings(tasks(comparison)[0]))
    assert "BackProp 2 of 3, ProxProp cg3 2 of 2" in said
    assert "BackProp 0.11, ProxProp cg3 0.001" in said
    assert "BackProp 25.00 ms, ProxProp cg3 2.00×" in said


def test_the_final_table(comparison):
    table = final_table(tasks(comparison)[0])
    assert table.rows[0] == ["Nesterov SGD · BackProp", "0.1", "0.11 ± 0.01", "90.0 ± 0.0 %", "90.0 ± 0.0 %", "2 of 3",
                             "25.00 (1.00×)"]  # fmt: skip
    assert table.rows[1][-1] == "50.00 (2.00×)"
    with pytest.raises(AssertionError, match="a row does not fit its columns"):
        Table(["a", "b"], [["1"]])


def test_the_rate_table_shows_divergence_and_gaps(comparison):
    table = rate_table(tasks(comparison)[0], "sgd")
    assert list(table.columns) == ["final loss at lr", "0.01", "0.1", "1"]
    assert table.rows[0] == ["BackProp", "0.21", "0.11", "diverged"]
    assert table.rows[1] == ["ProxProp cg3", "", "0.02", "0.001"]


def test_the_papers_numbers_stand_beside_ours(made):
    settings = {"data": "cifar10", "hidden": (4000, 1000, 4000), "batch_size": 500, "epochs": 50}
    records = [
        made("cg:5", lr=1.0, loss=0.004, **settings),
        made("backprop", lr=50.0, status="diverged", **settings),
    ]
    rows = {row[0]: row[1:] for row in rate_table(tasks(records)[0], "sgd").rows}
    assert rows == {"BackProp": ["", "diverged / diverged"], "ProxProp cg5": ["0.004 / 0.0003", ""]}


def test_the_layer_table_and_its_sum(made):
    arm = tasks([made("exact")])[0].arms[0]
    assert layer_table(arm).rows == [["1 (Linear)", "520", "sample space", "+50%", "4.0 KiB"]]
    assert estimated(arm) == 0.5
    assert loss_text(Number(1.0, math.nan)) == "1"


def test_curves_draw_every_arm_with_its_band(comparison):
    task = tasks(comparison)[0]
    x, low, middle, high = band(task.arms[0], "loss", "epoch")
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert (low[-1], high[-1]) == pytest.approx((0.1, 0.12))
    assert middle[-1] == pytest.approx(0.11)
    axes = figures.curves(task, "sgd").axes
    assert [ax.get_title(loc="left") for ax in axes][::2] == [
        "full-batch training loss",
        "validation accuracy",
    ]
    np.testing.assert_allclose(axes[0].get_lines()[0].get_ydata(), middle)


def test_the_papers_curve_is_drawn_behind_ours(made):
    run = fig1(Config(data="cifar10", epochs=3))[1]
    settings = {"data": "cifar10", "hidden": run.hidden, "batch_size": 500, "tau_theta": 0.05}
    task = tasks([made("cg:3", lr=1.0, epochs=3, **settings)])[0]
    lines = figures.curves(task, "sgd").axes[0].get_lines()
    np.testing.assert_array_equal(lines[0].get_ydata(), paper.curve(run, "loss", "epoch")[1])
    assert [line.get_label() for line in lines] == ["ProxProp cg3, the paper's", "ProxProp cg3 (lr 1)"]


def test_robustness_marks_divergence(comparison):
    axes = figures.robustness(tasks(comparison)[0], "sgd").axes
    crosses = [line for line in axes[0].get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1.0]]


def test_angle_draws_layers_or_nothing(comparison, made):
    figure = figures.angle(tasks(comparison)[0], "sgd")
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["layer 1", "layer 3"]
    assert figures.angle(tasks([made("backprop")])[0], "sgd") is None


def test_spectrum_shows_what_tau_theta_adds():
    lines = figures.spectrum([0.0, 4.0, 1.0], "X", tau_theta=0.5).axes[0].get_lines()
    np.testing.assert_array_equal(lines[0].get_ydata(), [4.0, 1.0, np.nan])
    np.testing.assert_array_equal(lines[1].get_ydata(), [6.0, 3.0, 2.0])


class Page(HTMLParser):
    """Collects what a page needs from outside, its ids, and tags that do not close."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.outside, self.ids, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data") and not value.startswith("#"):
                self.outside.append(value)
            if name == "xlink:href" and value.startswith("#"):
                self.outside += [] if value[1:] in self.ids else [f"dangling {value}"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_but_itself(tmp_path, comparison, made):
    records = [*comparison, made("exact", optimizer="adam"), made("backprop", optimizer="adam")]
    text = write_report(records, tmp_path, "A <title> & more", rerun="proxprop compare --seeds 3").read_text()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert len(page.ids) == len(set(page.ids))
    assert "<script" not in text
    assert "@import" not in text
    assert "A <title> & more" in page.text
    assert text.count("<svg") == 5  # curves twice, rates once, angles twice
    for part in ("Where each method ends", "Over epochs and over time", "How much the learning rate matters",
                 "turns away from the gradient", "What is solved where", "proxprop compare --seeds 3"):  # fmt: skip
        assert part in page.text


def test_tables_and_figures_can_be_read_without_seeing_them(written):
    text = (written / "report.html").read_text()
    assert "<th>" not in text
    assert '<th scope="col">best lr</th>' in text
    assert '<th scope="row">Nesterov SGD · BackProp</th>' in text
    curves, rates, angle = re.findall(r'<svg role="img" aria-label="(.*?)"', text)
    assert (
        "BackProp at learning rate 0.1 ends at loss 0.11 ± 0.01, validation accuracy 90.0 ± 0.0 %" in curves
    )
    assert "BackProp from 0.01 to 1, best at 0.1 with loss 0.11 ± 0.01, diverged at 1" in rates
    assert "ProxProp cg3, layer 3 from 76 to 76 degrees" in angle


def test_a_phone_gets_figures_it_can_read_and_a_hint_that_they_go_on(written):
    text = (written / "report.html").read_text()
    (least,) = re.findall(r"figure svg \{ min-width: (\d+)px", text)
    for width in re.findall(r'viewBox="0 0 ([\d.]+)', text):
        assert int(least) / float(width) * 10 >= 9.9  # pixels, of the 10 points that axes are labelled in
    assert text.count("Swipe sideways to see the whole figure") == text.count("<svg") == 3
    wide = re.findall(r'<div class="wide[^>]*>', text)
    assert len(wide) == text.count("<table") + text.count("<svg")
    assert all('tabindex="0" role="region" aria-label="' in region for region in wide)


def test_text_from_records_is_escaped(tmp_path, made):
    record = replace(made("cg:3"), notes=["<script>alert(1)</script>"], starts=[{"device": "<b>GPU</b>"}])
    text = write_report([record], tmp_path, "t").read_text()
    assert "<script>" not in text
    assert "&lt;b&gt;GPU&lt;/b&gt;" in text


def test_a_report_is_the_same_every_time(tmp_path, comparison, written):
    assert write_report(comparison, tmp_path, "t").read_bytes() == (written / "report.html").read_bytes()


def test_figures_by_themselves(written):
    assert {path.name for path in written.iterdir()} == {
        "report.html", "records.csv", "curves-sgd.svg", "rates-sgd.svg", "angle-sgd.svg",
    }  # fmt: skip


def without_validation(record):
    return replace(record, epochs=[row | {"validation_accuracy": None} for row in record.epochs])


@pytest.mark.parametrize("change", [
    without_validation,
    lambda record: replace(record, status="unfinished", epochs=record.epochs[:1]),
    lambda record: replace(record, folder=Path(os.fsdecode(b"\xff")), config=replace(record.config, data=os.fsdecode(b"\xff.npz")), notes=[os.fsdecode(b"in \xff")]),
    lambda record: replace(record, status="diverged", epochs=[record.epochs[0], record.epochs[1] | {"loss": None}]),
])  # fmt: skip
def test_strange_records_are_reported_too(tmp_path, comparison, change):
    text = write_report([change(record) for record in comparison], tmp_path, "t").read_text()
    unfinished = sum(change(record).status == "unfinished" for record in comparison)
    assert ("15 of them are unfinished" in text) == (unfinished == 15)
    assert text.count("<svg") == 3


def test_a_report_comes_with_every_epoch_as_a_table(comparison, written):
    with (written / "records.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(record.epochs) for record in comparison)
    last = [row for row in rows if row["solver"] == "cg:3" and row["lr"] == "1.0" and row["seed"] == "2"][-1]
    assert float(last["loss"]) == pytest.approx(0.001)
    assert last["status"] == "finished"
    diverged = [row for row in rows if row["status"] == "diverged"]
    assert {row["solver"] for row in diverged} == {"backprop"}
