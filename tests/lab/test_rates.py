"""The default rates: every solver that can be named trains digits at least as well as BackProp does by default."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from proxprop.lab.config import MODELS, OPTIMIZERS, Config, command
from proxprop.lab.data import load
from proxprop.lab.experiments import run_all
from proxprop.lab.methods import FAMILIES, MOST
from proxprop.lab.rates import RATES, rate
from proxprop.lab.train import train

FEW = [("sgd", "cg:3"), ("sgd", "exact"), ("sgd", "running:10"), ("adam", "cg:2"), ("muon", "exact")]
# All: both sides of every K at which the rate changes, and many iterations; AdamW takes Adam's rates.
BY_SGD = ["cg:1", "cg:2", "cg:3", "cg:10", "exact", "running:1", "running:10", "running:1000",
          "published:1", "published:2", "published:3", "published:4", "published:10"]  # fmt: skip
BY_OTHERS = ["cg:1", "cg:2", "exact", "running:10", "running:1000", "published:1", "published:2"]
ALL = [("sgd", solver, (0, 1, 2)) for solver in BY_SGD]
ALL += [(optimizer, solver, (0,)) for optimizer in ("adam", "muon") for solver in BY_OTHERS]


@pytest.fixture(scope="module")
def final_loss(tmp_path_factory):
    """A function from a run's settings to its final training loss; a run is trained once."""
    folder, digits, losses = tmp_path_factory.mktemp("rates"), load("digits"), {}

    def trained(**settings):
        config = Config(**settings, threads=1, measure_every=10, observe=False, save_weights=False)
        if config not in losses:
            loss = train(config, folder / config.slug(), dataset=digits).last["loss"]
            losses[config] = float("inf") if loss is None else loss
        return losses[config]

    return trained


@pytest.mark.parametrize(("optimizer", "solver"), FEW)
def test_solvers_train_at_least_as_well_as_backprop_by_default(final_loss, optimizer, solver):
    assert final_loss(solver=solver, optimizer=optimizer) <= final_loss(
        solver="backprop", optimizer=optimizer
    )


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "solver", "seeds"), ALL)
def test_every_solver_trains_at_least_as_well_as_backprop_by_default(final_loss, optimizer, solver, seeds):
    for seed in seeds:
        settings = {"optimizer": optimizer, "seed": seed}
        assert final_loss(solver=solver, **settings) <= final_loss(solver="backprop", **settings)


@pytest.mark.parametrize(
    ("model", "solver"), [("mlp-bn", "cg:1"), ("mlp-bn", "exact"), ("convnet-2pool", "cg:3")]
)
def test_other_networks_train_at_least_as_well_as_backprop_by_default(final_loss, model, solver):
    assert final_loss(model=model, solver=solver) <= final_loss(model=model, solver="backprop")


def test_the_record_has_no_solver_that_ends_above_backprop():
    """On average over seeds; BackProp's own losses differ by more from seed to seed."""
    losses = defaultdict(list)
    with (Path(__file__).parents[2] / "results/digits/rates.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert float(row["lr"]) == rate(row["optimizer"], row["solver"], row["model"])
            losses[row["model"], row["optimizer"], row["solver"]].append(float(row["loss"] or "inf"))
    assert {model for model, _, _ in losses} >= {"mlp", "mlp-bn", "convnet", "convnet-2pool"}
    for (model, optimizer, solver), found in losses.items():
        assert fmean(found) <= fmean(losses[model, optimizer, "backprop"]), (model, optimizer, solver)


def test_every_network_solver_and_k_has_a_rate():
    for model in MODELS:
        assert rate("adamw", "cg:3", model) == rate("adam", "cg:3", model)
    for by_optimizer in RATES.values():
        assert {*by_optimizer, "adamw"} == set(OPTIMIZERS)
        for by_family in by_optimizer.values():
            assert set(by_family) == set(FAMILIES)
            assert all(min(by_least) == 1 for by_least in by_family.values())
    assert [rate("sgd", f"published:{k}") for k in range(1, 6)] == [2.0, 1.0, 1.0, 0.4, 0.4]
    assert rate("sgd", f"cg:{MOST['cg'][1]}", "convnet") == 0.4


def test_a_solver_that_cannot_be_read_has_a_rate_too():
    assert rate("sgd", "cg:x") == rate("sgd", "cg:0") == rate("sgd", "cg") == 2.0
    assert rate("sgd", "cg:" + 5000 * "9") == 0.4


def test_a_rate_that_is_named_wins_and_a_record_names_its_rate(tmp_path, small):
    assert Config(solver="cg:3", lr=7.0).settled().lr == 7.0
    (record,) = run_all([small], tmp_path)
    assert "--lr 0.05 " in command(record.config, "a")
