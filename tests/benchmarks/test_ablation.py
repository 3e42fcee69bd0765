"""The script that measures what each tuned path buys."""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace

import ablation
import pytest
import torch
from ablation import KNOWN, PATHS, SMALL
from step import PRECISIONS
from torch.profiler import ProfilerActivity, profile
from ways import RUNNING, SOLVERS, prepare

from proxprop import tuning


def recorded(monkeypatch, tmp_path, *arguments: str) -> dict:
    out = tmp_path / "record.json"
    command = ["ablation.py", "--device", "cpu", "--rounds", "1", *arguments, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    ablation.main()
    return json.loads(out.read_text())


@pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))
def test_a_path_is_switched_off_by_names_that_exist(path) -> None:
    def now() -> list:
        return [getattr(owner, name) for owner, name, _ in path.off]

    before = now()
    with path.switched_off():
        assert now() == [value for *_, value in path.off] != before
    assert now() == before


@pytest.mark.parametrize("path", PATHS.values(), ids=list(PATHS))
def test_a_path_is_measured_on_what_can_be_made(path) -> None:
    cases = list(path.cases())
    assert cases
    for network, method, precision in cases:
        assert network in KNOWN
        assert method in SOLVERS or method in RUNNING
        assert precision in PRECISIONS


def operations(step) -> Counter:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return Counter(event.name for event in profiler.events())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "mlp-500" in path.networks else [])
        for name, path in PATHS.items()
        if path.way == "cpu"
    ],
)
def test_a_step_without_a_path_does_something_else(monkeypatch, name) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # eigenvectors pay for few cores alone
    path = PATHS[name]
    network, method, precision = next(path.cases())
    _, step = prepare(KNOWN[network], method, None, argparse.Namespace(device="cpu", way="eager"), precision)
    step()  # makes what later steps find: an optimizer's state, constants
    usual = operations(step)
    assert operations(step) == usual
    with path.switched_off():
        assert operations(step) != usual


def test_a_record_compares_steps_with_and_without_a_path(monkeypatch, tmp_path, capsys) -> None:
    record = recorded(monkeypatch, tmp_path, "--paths", "small-patches")
    (row,) = record["rows"]
    assert record["command"] == "ablation.py --device cpu --rounds 1 --paths small-patches"
    assert record["paths"] == {"small-patches": PATHS["small-patches"].purpose}
    assert "commit" in record["environment"]
    assert (row["network"], row["method"], row["way"], row["error"]) == (SMALL.name, "cg3", "cpu", None)
    assert row["low"] == row["gain"] == row["high"] == row["ratio_without"] / row["ratio_with"] > 0
    assert row["memory_with"] > 1
    assert row["memory_without"] > 1
    assert f"{row['gain']:.2f}" in capsys.readouterr().out


def test_a_path_that_fails_is_recorded_and_the_rest_goes_on(monkeypatch, tmp_path, capsys) -> None:
    gone = replace(PATHS["small-patches"], off=((tuning, "GONE", 0),))
    monkeypatch.setitem(PATHS, "gone", gone)
    failed, measured = recorded(monkeypatch, tmp_path, "--paths", "gone", "small-patches")["rows"]
    assert "does not have the attribute 'GONE'" in failed["error"]
    assert failed["gain"] is None
    assert measured["gain"] > 0
    assert failed["error"] in capsys.readouterr().out


def test_a_path_of_another_device_is_refused(monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        recorded(monkeypatch, tmp_path, "--paths", "side-streams")
    assert "not on cpu: side-streams" in capsys.readouterr().err


@pytest.mark.parametrize("method", RUNNING)
def test_steps_of_running_averages_cost_the_same(method) -> None:
    options = argparse.Namespace(device="cpu", way="eager")
    _, step = prepare(KNOWN["digits-100"], method, None, options, "fp32")
    step()
    step()
    first, *others = (operations(step) for _ in range(3))
    assert others == [first, first]
    inverts = "aten::cholesky_inverse" in first or "aten::linalg_cholesky_ex" in first
    assert inverts == (method == "renewed")
