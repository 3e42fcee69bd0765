"""The experiments are the paper's, and a list is run once."""

import math

import pytest

from proxprop.lab import experiments, paper
from proxprop.lab.config import Config
from proxprop.lab.experiments import fig1, fig2, run_all, table1
from proxprop.lab.methods import method
from proxprop.lab.refusal import Interrupted

CIFAR = Config(data="cifar10", epochs=50)


def test_figure_1_is_the_papers():
    runs = fig1(CIFAR)
    assert [(run.solver, run.lr) for run in runs] == [
        ("backprop", 0.05), ("cg:3", 1.0), ("cg:5", 1.0), ("cg:10", 1.0), ("exact", 1.0),
        ("published:3", 1.0), ("published:5", 1.0), ("published:10", 1.0),
    ]  # fmt: skip
    assert {run.tau_theta for run in runs if run.solver != "backprop"} == {0.05}
    assert {(r.model, r.hidden, r.optimizer, r.momentum, r.batch_size, r.epochs) for r in runs} == {
        ("mlp", (4000, 1000, 4000), "sgd", 0.95, 500, 50)
    }
    for run in runs[:5]:
        x, y = paper.curve(run, "loss", "epoch")
        assert x == list(range(50))
        assert y[0] == pytest.approx(math.log(10), rel=0.01)


def test_table_1_is_the_papers():
    runs, published = table1(CIFAR)[:45], table1(CIFAR)[45:]
    assert [run.solver for run in published[::9]] == ["published:1", "published:3", "published:5"]
    assert {run.lr for run in published} == {run.lr for run in runs}
    known = [paper.final_loss(run) for run in runs if run.solver != "exact"]
    assert len(known) == len(paper.table()) == 36
    assert None not in known
    assert {paper.final_loss(run) for run in runs if run.solver == "exact"} == {None}
    best = min((run for run in runs if run.solver == "cg:5"), key=paper.final_loss)
    assert (best.lr, paper.final_loss(best)) == (1.0, 0.0003)
    assert math.isnan(
        paper.final_loss(next(run for run in runs if run.solver == "backprop" and run.lr == 50))
    )


def test_figure_2_is_the_papers():
    runs = fig2(CIFAR)
    assert [(run.model, run.solver) for run in runs] == [
        (model, solver)
        for model in ("convnet-2pool", "convnet")
        for solver in ("backprop", "cg:3", "cg:10", "exact", "published:3", "published:10")
    ]
    assert {(run.optimizer, run.lr, run.batch_size, run.tau_theta) for run in runs} == {
        ("adam", 0.001, 500, 1.0)
    }
    for run in runs[:4]:
        for quantity in ("loss", "validation_accuracy"):
            for over in ("epoch", "seconds"):
                assert (paper.curve(run, quantity, over) is None) == (run.solver == "exact")


@pytest.mark.parametrize(
    "change", [{"data": "digits"}, {"lr": 0.5}, {"batch_size": 100}, {"optimizer": "adam"}]
)
def test_other_runs_have_no_curve_of_the_papers(change):
    from dataclasses import replace

    for run in fig1(CIFAR)[1:]:
        assert paper.curve(replace(run, **change), "loss", "epoch") is None


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_run_of_every_experiment_is_a_method(name):
    runs = experiments.EXPERIMENTS[name](CIFAR)
    assert len({run.slug() for run in runs}) == len(runs)
    for run in runs:
        assert method(run).name


def test_a_run_in_two_experiments_is_listed_once_per_seed():
    runs = experiments.paper(["fig1", "batches", "fig1"], CIFAR, seeds=2)
    assert len(runs) == 2 * (8 + 15)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_compare_gives_every_solver_the_same_rates():
    runs = experiments.compare(Config(), ["backprop", "cg:3"], experiments.COMPARED_RATES, seeds=3)
    rates = {}
    for run in runs:
        rates.setdefault((run.optimizer, run.solver), set()).add((run.lr, run.seed))
    assert rates["sgd", "backprop"] == rates["sgd", "cg:3"]
    assert rates["adam", "backprop"] == rates["adam", "cg:3"]
    assert len(runs) == 3 * 2 * (7 + 7)


def test_quick_is_small_and_keeps_the_methods():
    whole = experiments.paper(experiments.EXPERIMENTS, CIFAR)
    short = experiments.quick(whole)
    assert [(run.solver, run.lr, run.model) for run in short] == [
        (run.solver, run.lr, run.model) for run in whole
    ]
    assert {(run.data, run.epochs) for run in short} == {("digits", 2)}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_finished_runs_are_not_run_again(tmp_path, small, jobs):
    runs = experiments.compare(small, ["backprop", "cg:2"], {"sgd": [0.01]}, seeds=1)
    told = []
    first = run_all(runs, tmp_path, jobs, tell=lambda number, record: told.append((number, record.config)))
    assert told == [(1, runs[0].settled()), (2, runs[1].settled())]
    stamps = [(record.folder / "result.json").stat().st_mtime_ns for record in first]
    second = run_all(runs, tmp_path, 1)
    assert stamps == [(record.folder / "result.json").stat().st_mtime_ns for record in second]
    assert [record.epochs for record in first] == [record.epochs for record in second]


def test_an_interruption_survives_the_way_between_processes():
    import pickle
    from pathlib import Path

    again = pickle.loads(pickle.dumps(Interrupted(Path("runs/a"), 7)))
    assert (again.folder, again.step, str(again)) == (Path("runs/a"), 7, "stopped after step 7 in runs/a")
