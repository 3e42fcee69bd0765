"""The two measurements that no training run shows: the spectrum and the propositions."""

import math

import pytest
import torch
from torch import nn

from proxprop.lab.config import Config
from proxprop.lab.figures.reproduction import figures
from proxprop.lab.reproduction import grades, propositions, spectrum
from proxprop.lab.reproduction.claims import verdicts
from proxprop.lab.reproduction.document import document
from proxprop.lab.reproduction.files import read_csv
from proxprop.lab.reproduction.results import Results


@pytest.fixture
def network():
    """A small network, one batch, and the Config of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return model, torch.randn(8, 6), torch.arange(8) % 3, Config(hidden=(5, 4), batch_size=8)


@pytest.fixture
def measured(network):
    return list(propositions.at(*network))


def about(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_the_angle_and_the_energy_are_those_of_the_formulas(network, measured):
    model, inputs, labels, _ = network
    model = model.double()
    z = model[0](inputs.double())
    G = torch.autograd.grad(nn.functional.cross_entropy(model[1:](z), labels), z)[0]
    A = torch.cat([inputs.double(), torch.ones(8, 1)], 1)
    gradient = A.T @ G
    D = torch.linalg.solve(torch.eye(7) / 10 + A.T @ A, gradient)
    (row,) = about(measured, layer="0", solver="exact", tau_theta=10.0, precision="float64")
    assert row["cosine"] == pytest.approx(float((D * gradient).sum() / D.norm() / gradient.norm()))
    assert row["energy"] == pytest.approx(float((G - A @ D).square().sum() / G.square().sum()))
    assert row["largest_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(A.T @ A)[-1]))
    (step,) = about(measured, layer="0", solver="explicit", tau_theta=10.0, precision="float64")
    assert step["energy"] == pytest.approx(float((G - 10 * A @ gradient).square().sum() / G.square().sum()))
    assert step["angle"] == pytest.approx(0, abs=1e-5)


def test_proximal_steps_descend_for_every_step_size_and_explicit_ones_do_not(measured):
    implicit = [row for row in measured if row["solver"] != "explicit"]
    assert {row["tau_theta"] for row in implicit} == set(propositions.TAU_THETAS)
    assert all(row["angle"] < 90 for row in implicit)
    assert all(row["energy"] <= 1 for row in implicit if row["layer"] != "all")
    explicit = about(measured, solver="explicit", precision="float64")
    small = [row for row in explicit if row["tau_theta"] * row["largest_eigenvalue"] < 2]
    assert all(row["energy"] < 1 for row in small)
    assert max(row["energy"] for row in explicit) > 1e3


def test_along_a_run_and_into_a_file(tmp_path, small):
    path = tmp_path / "propositions.csv"
    propositions.write(small, path, epochs=(0, 1))
    rows = read_csv(path)
    assert {(row["trained_with"], row["epoch"]) for row in rows} == {
        ("backprop", 0), ("backprop", 1), ("cg:3", 1), ("exact", 1),
    }  # fmt: skip
    assert {row["run"] is None for row in rows if row["epoch"] == 0} == {True}
    results = Results(propositions=rows)
    told = [v.reproduced for v in verdicts(results)["Propositions"]]
    assert set(told[:4]) == {grades.YES}
    assert list(figures(results)) == ["propositions"]
    assert "**Propositions**: of " in document(results)


def test_the_spectrum_of_a_known_matrix():
    images = torch.tensor([[[[3.0, 0.0]]], [[[0.0, 1.0]]]]).expand(2, 3, 1, 2) / 3
    (row, single) = [r for r in spectrum.measure({"two": images}) if r["reading"] == "[0, 255]"]
    assert row["largest"] == pytest.approx(3 * 255**2)
    assert row["precision"] == "float64"
    assert single["precision"] == "float32"
    assert row["count"] == 2
    assert row["features"] == 6


def test_the_readings_nearest_to_the_papers_are_named():
    def row(reading, count, largest, orders, precision="float64"):
        smallest = largest / 10**orders
        cells = (reading, f"first {count}", count, precision, 3072, largest, smallest, orders)
        return dict(zip(spectrum.COLUMNS, cells, strict=True))

    rows = [
        row("[0, 1], as released", 30000, 2.2e7, 8.6), row("[0, 1], as released", 45000, 3.3e7, 8.6),
        row("[-1, 1]", 30000, 6.72e6, 7.4), row("[-1, 1]", 45000, 1.0e7, 7.4),
    ]  # fmt: skip
    rows += [dict(r) | {"precision": "float32"} for r in rows]
    results = Results(spectrum=rows)
    found = verdicts(results)["Section 4.1, the spectrum"]
    assert [v.reproduced for v in found] == [grades.NO, "by a fit", grades.YES, grades.NO]
    assert "[-1, 1], first 30000 images: 6.72e+06, 7.4 orders" in found[1].correct
    assert list(figures(results)) == ["spectrum"]
    assert math.isclose(
        float(document(results).split("| 6.72e+06 |")[1].split("|")[3].replace(",", "")), 29911
    )


def test_a_bare_machine_can_measure(tmp_path):
    spectrum.main(["--data", "digits", "--out", str(tmp_path / "out.csv")])
    assert len(read_csv(tmp_path / "out.csv")) == 2 * 3 * len(spectrum.READINGS)
