"""The model of many GPUs: its shapes are those of the networks, and its formulas hold where they can be checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORKS
from scaling_model import Network, Term, Terms, fit, predict, system_numbers
from scaling_shapes import GPT2_MEDIUM, LLAMA_7B, LLAMA_70B, MEASURED, MODELS, RESNET50, Model
from scaling_terms import from_pieces

import proxprop
from proxprop import Running

ROOT = Path(__file__).parents[2]
TERM = Term(1e-5, 1e14)
TERMS = Terms({(m.like, m.precision): 1e14 for m in (*MODELS, *MEASURED)}, TERM, 2.0, TERM, TERM, TERM, TERM)
NETWORK = Network(inside=450e9, between=50e9)


@pytest.mark.parametrize("model", MEASURED, ids=lambda model: model.name)
def test_shapes_are_those_of_the_networks(model: Model) -> None:
    network = NETWORKS[model.name].model()
    assert model.parameters == sum(p.numel() for p in network.parameters())
    converted = proxprop.convert(network, proxprop.Exact())
    layers = [m for m in converted.modules() if isinstance(m, proxprop.nn.ProximalLayer)]
    assert sum(layer.count for layer in model.layers) == len(layers)
    sizes = [
        layer._parts()[""].call.layout([p.shape for p in layer.parameters()] + [None] * (layer.bias is None))
        for layer in layers
    ]
    assert system_numbers(model) == sum(s.sizes.features * (s.sizes.features + 1) / 2 for s in sizes)


@pytest.mark.parametrize(
    ("model", "millions"),
    [(RESNET50, 25.557), (GPT2_MEDIUM, 354.7), (LLAMA_7B, 6738.1), (LLAMA_70B, 68975.3)],
    ids=lambda x: str(x)[:8],
)
def test_parameters_are_the_published_ones(model: Model, millions: float) -> None:
    assert model.parameters / 1e6 == pytest.approx(millions, rel=1e-3)


@given(st.floats(0, 1e-3), st.floats(1e6, 1e15))
def test_a_fit_finds_the_term_that_made_the_times(latency: float, rate: float) -> None:
    work = [rate * 1e-5 * 4**k for k in range(8)]
    found = fit(work, [latency + w / rate for w in work])
    assert found.rate == pytest.approx(rate, rel=1e-6)
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-10)
    assert found.error < 1e-6


@given(st.integers(1, 2048), st.floats(1e3, 1e11))
def test_more_ranks_or_bytes_take_no_less(ranks: int, size: float) -> None:
    for send in (NETWORK.one_way, NETWORK.exchange):
        assert send(size, 1) == send(0.0, ranks) == 0
        assert send(2 * size, ranks) >= send(size, ranks)
        assert send(size, 8 * ranks) >= send(size, ranks)


@pytest.mark.parametrize("running", [None, Running()], ids=["batch", "running"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_step_is_its_parts(model: Model, running: Running | None) -> None:
    alone = predict(model, TERMS, NETWORK, 1, sharded=False, running=running)
    assert alone.system_bytes == 0
    assert not any(part for name, part in alone.parts.items() if "send" in name)
    assert alone.ratio == pytest.approx(1 + sum(alone.parts.values()) / alone.plain)
    many = predict(model, TERMS, NETWORK, 64, sharded=True, running=running)
    assert sum(many.parts.values()) < sum(alone.parts.values())
    assert many.system_bytes > 0


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_averages_and_inverses_of_all_ranks_are_one_copy(model: Model, sharded: bool) -> None:
    running = Running(copies=0.0)
    whole = 8 * sum(layer.count * layer.numbers for layer in model.layers)
    assert predict(model, TERMS, NETWORK, 1, sharded, running).state == whole
    before = whole
    for ranks in (2, 4, 8):
        step = predict(model, TERMS, NETWORK, ranks, sharded, running)
        assert step.state == pytest.approx(step.balance[1] * whole / ranks)
        assert step.state < before
        before = step.state


def test_goals_are_met_by_the_page() -> None:
    """Those of Llama-7B and GPT-2 medium on 64 GPUs, with terms fitted to the records."""
    half, record = (
        json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())
        for name in ("h200-bf16", "deferred-h200")
    )
    terms = from_pieces(record, half)
    gpt = predict(GPT2_MEDIUM, terms, NETWORK, 64, sharded=False, running=Running())
    llama = predict(LLAMA_7B, terms, NETWORK, 64, sharded=True, running=Running())
    assert gpt.ratio <= 1.12
    assert llama.ratio <= 1.15
    assert llama.state + llama.passing <= 2e9


def test_the_scaling_page_is_made_from_the_records() -> None:
    made = subprocess.run(
        [sys.executable, "benchmarks/scaling.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "scaling.md").read_text() == made, "run `make docs`"
