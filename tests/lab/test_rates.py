"""The default rates: every solver that can be named trains digits at least as well as BackProp does by default."""

import pytest

from proxprop.lab.config import Config, command
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


def test_every_solver_and_every_k_has_a_rate():
    assert RATES["adamw"] is RATES["adam"]
    for optimizer, by_family in RATES.items():
        assert set(by_family) == set(FAMILIES)
        for family, by_least in by_family.items():
            assert min(by_least) == 1
            most = MOST[family][1] if family in MOST else 1
            assert rate(optimizer, f"{family}:{most}") == by_least[max(by_least)]
    assert [rate("sgd", f"published:{k}") for k in range(1, 6)] == [2.0, 1.0, 1.0, 0.4, 0.4]


def test_a_solver_that_cannot_be_read_has_a_rate_too():
    assert rate("sgd", "cg:x") == rate("sgd", "cg:0") == rate("sgd", "cg") == 2.0
    assert rate("sgd", "cg:" + 5000 * "9") == 0.4


def test_a_rate_that_is_named_wins_and_a_record_names_its_rate(tmp_path, small):
    assert Config(solver="cg:3", lr=7.0).settled().lr == 7.0
    (record,) = run_all([small], tmp_path)
    assert "--lr 0.05 " in command(record.config, "a")
