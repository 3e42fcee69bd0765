"""The model of many GPUs: its shapes are those of the networks, and its formulas hold where they can be checked."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORKS
from scaling_model import Network, Term, Terms, fit, predict, system_numbers
from scaling_shapes import GPT2_MEDIUM, LLAMA_7B, MEASURED, MODELS, RESNET50, Model

import proxprop

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
    [(RESNET50, 25.557), (GPT2_MEDIUM, 354.7), (LLAMA_7B, 6738.1)],
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
def test_an_all_reduce_of_more_ranks_or_bytes_takes_no_less(ranks: int, size: float) -> None:
    assert NETWORK.all_reduce(size, 1) == 0
    assert NETWORK.all_reduce(2 * size, ranks) >= NETWORK.all_reduce(size, ranks)
    assert NETWORK.all_reduce(size, 8 * ranks) >= NETWORK.all_reduce(size, ranks)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_step_is_its_parts(model: Model) -> None:
    alone = predict(model, TERMS, NETWORK, 1, sharded=False)
    assert alone.waits == alone.system_bytes == 0
    many = predict(model, TERMS, NETWORK, 64, sharded=True)
    assert many.extra < alone.extra + TERMS.pack(many.system_bytes)  # each rank solves its rows
    assert many.system_bytes == 4 * system_numbers(model)
    assert predict(model, TERMS, NETWORK, 1, sharded=False, every=10).extra < alone.extra


def test_the_scaling_page_is_made_from_the_records() -> None:
    made = subprocess.run(
        [sys.executable, "benchmarks/scaling.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs" / "scaling.md").read_text() == made, "run `make docs`"
