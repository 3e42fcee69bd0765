"""The script that times steps in each way, and the page that shows its records."""

import json
import sys

import pytest
import report
import step
import torch
import ways
from networks import NETWORKS

from proxprop import CG


def recorded(monkeypatch, tmp_path, *arguments: str) -> dict:
    out = tmp_path / "record.json"
    command = ["step.py", "--device", "cpu", "--networks", "digits-100", "--rounds", "1", *arguments]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    step.main()
    return json.loads(out.read_text())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, see test_compile.py
@pytest.mark.parametrize("way", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_record_says_in_which_way_a_step_ran(monkeypatch, tmp_path, way: str) -> None:
    rows = recorded(monkeypatch, tmp_path, "--methods", "cg3", "--ways", way)["rows"]
    assert [(row["method"], row["way"], row["error"]) for row in rows] == [
        ("backprop", way, None),
        ("cg3", way, None),
    ]
    assert rows[1]["ratio"] > 0
    assert rows[1]["memory"] > 0
    assert rows[1]["predicted"] > 1


def test_what_fails_is_recorded_and_the_rest_goes_on(monkeypatch, tmp_path, capsys) -> None:
    class Broken(CG):
        def prepared(self, *args, **kwargs):
            raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(ways.SOLVERS, "cg1", Broken(1))
    rows = recorded(monkeypatch, tmp_path, "--methods", "cg1", "cg3")["rows"]
    assert [(row["method"], row["error"]) for row in rows] == [
        ("backprop", None),
        ("cg3", None),
        ("cg1", "RuntimeError: out of luck"),
    ]
    assert rows[2]["ratio"] is None
    assert "RuntimeError: out of luck" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_recorded(monkeypatch, tmp_path) -> None:
    rows = recorded(monkeypatch, tmp_path, "--methods", "cg3", "--seconds", "0")["rows"]
    assert [row["error"] for row in rows] == 2 * ["ValueError: no time was left"]


def test_a_way_that_needs_a_gpu_is_refused_without_one(monkeypatch, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        recorded(monkeypatch, tmp_path, "--ways", "eager", "graph", "passes")
    assert "needs a GPU: graph, passes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["autoencoder-1000", "digits-100"])
def test_a_new_network_trains(name: str) -> None:
    network = NETWORKS[name]
    torch.manual_seed(0)
    model, x = network.model(), network.input()
    y = network.target(model(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = network.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "millions"), [("gpt2-8x1024", 124.5), ("resnet18-vision-128", 11.18)])
def test_a_networks_size_is_the_published_one(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = NETWORKS[name].model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


def row(method: str, way: str, **rest) -> dict:
    place = {"network": "mlp-500", "precision": "tf32", "method": method, "way": way}
    return place | {"milliseconds": 1.0, "ratio": None, "memory": None, "error": None} | rest


def test_the_page_shows_ways_side_by_side(monkeypatch, tmp_path, capsys) -> None:
    rows = [
        row("backprop", "eager", ratio=1.0, memory=1.0),
        row("cg3", "eager", ratio=1.234, memory=1.1),
        row("backprop", "graph", ratio=1.0, memory=1.0),
        row("cg3", "graph", error="RuntimeError: no luck"),
    ]
    made = {"device": "a GPU", "torch": "2", "threads": 1, "commit": "abc"}
    command = "step.py --networks mlp-500 --precisions tf32 --ways eager graph compile"
    record = {"command": command, "environment": made, "rows": rows}
    (tmp_path / "h200-ways-mlp.json").write_text(json.dumps(record))
    monkeypatch.setattr(report, "BENCH", tmp_path)
    report.print_ways()
    shown = capsys.readouterr().out
    assert "| mlp-500, tf32 | eager | 1.00 | 1.23 (1.40) | 1.10 |" in shown
    assert "| mlp-500, tf32 | graph | 1.00 | – (1.10) | – |" in shown
    assert "Not timed: mlp-500 in tf32, graph, cg3: `RuntimeError: no luck`" in shown
    assert "Not reached before the run was ended: mlp-500 in tf32 compile" in shown
