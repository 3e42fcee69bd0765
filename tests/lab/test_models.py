"""Models and methods: shapes, what is converted, and which optimizer gets which parameter."""

import pytest
import torch

import proxprop
from proxprop.lab.config import Config
from proxprop.lab.methods import FAMILIES, Method, method
from proxprop.lab.models import build
from proxprop.lab.refusal import Refused

SHAPES = [("mlp", (3, 8, 8)), ("mlp", (6,)), ("convnet", (3, 32, 32)), ("convnet", (1, 28, 28)), ("convnet", (1, 8, 8)),
          ("convnet-2pool", (3, 32, 32)), ("resnet18", (3, 16, 16))]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), SHAPES)
@pytest.mark.parametrize("solver", ["backprop", "cg:2", "exact"])
def test_every_model_trains_with_every_solver(name, shape, solver):
    torch.manual_seed(0)
    config = Config(model=name, hidden=(7, 5), solver=solver)
    model = method(config).prepare(build(config, shape, 4))
    scores = model(torch.randn(3, *shape))
    assert scores.shape == (3, 4)
    scores.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    statuses = {row.status for row in proxprop.summary(model, torch.randn(3, *shape)).rows}
    assert ("converted" in statuses) == (solver != "backprop")


def test_the_papers_models_have_the_papers_sizes():
    mlp = build(Config(data="cifar10"), (3, 32, 32), 10)
    sizes = [tuple(p.shape) for p in mlp.parameters() if p.ndim == 2]
    assert sizes == [(4000, 3072), (1000, 4000), (4000, 1000), (10, 4000)]
    with_third, without = (build(Config(model=m), (3, 32, 32), 10) for m in ("convnet", "convnet-2pool"))
    assert with_third[-1].weight.shape == (10, 20 * 4 * 4)
    assert without[-1].weight.shape == (10, 20 * 8 * 8)
    assert [tuple(p.shape) for p in without.parameters()][:5:2] == [
        (16, 3, 5, 5),
        (20, 16, 5, 5),
        (20, 20, 5, 5),
    ]


def test_images_that_do_not_fit():
    with pytest.raises(Refused, match="at least 8×8 but came 7×9"):
        build(Config(model="convnet"), (1, 7, 9), 3)
    with pytest.raises(Refused, match=r"should get \[channels, height, width\] but came \[6\]"):
        build(Config(model="resnet18"), (6,), 3)


@pytest.mark.parametrize("solver", ["cg", "cg:", "cg:1001", "cg:0", "cg:-1", "cg:x", "cg:²"])
def test_cg_wants_a_number_of_iterations(solver):
    with pytest.raises(Refused, match="solver cg should be cg:K with K from 1 to 1000 iterations"):
        method(Config(solver=solver))


def test_other_solvers():
    with pytest.raises(Refused, match="did you mean 'exact'"):
        method(Config(solver="exakt"))
    with pytest.raises(Refused, match="takes nothing after a colon but came with '3'"):
        method(Config(solver="exact:3"))


def test_a_model_that_cannot_be_converted_is_refused():
    config = Config(solver="exact", hidden=())
    with pytest.raises(Refused, match="last layer, which stays explicit"):
        method(config).prepare(build(config, (6,), 3))


@pytest.mark.parametrize("model", ["mlp", "convnet"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "muon"])
def test_every_parameter_has_exactly_one_optimizer(name, model):
    config = Config(optimizer=name, model=model, hidden=(7, 5), lr=0.25)
    network = build(config, (1, 8, 8), 4)
    optimizers = method(config).optimizers(network)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in network.parameters())
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.25}


def test_muon_takes_hidden_matrices_only():
    config = Config(optimizer="muon", hidden=(7, 5))
    network = build(config, (6,), 4)
    muon = next(o for o in method(config).optimizers(network) if isinstance(o, torch.optim.Muon))
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(7, 6), (5, 7)]


def test_a_peer_is_one_entry(monkeypatch):
    monkeypatch.setitem(FAMILIES, "halved", lambda argument, config: lambda model: model.half())
    made = method(Config(solver="halved"))
    assert made.name == "halved"
    assert isinstance(made, Method)
    assert made.prepare(torch.nn.Linear(2, 2)).weight.dtype == torch.float16
