"""Between observed steps a layer is torch's own; inputs that several layers see are squared once."""

import copy
import pickle

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo

import proxprop
from cases import randn
from deferred_claims import works
from layers import SelfAttention
from proxprop import Exact, Running
from proxprop.deferred.accumulator import Summing
from proxprop.solvers import FEATURE
from quiet import quiet_dynamo
from training import assert_same, attached, grads, images, plain_model, stepped

RUNNING = Running(update_every=3, invert_every=3)


def resting(model: nn.Module, input: Tensor) -> nn.Module:
    """A model that has taken its first step of three."""
    optimizer = attached(model, running=RUNNING)
    model(input).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 4), (3, 4)),
        (lambda: nn.Conv2d(2, 4, 3), (2, 2, 5, 5)),
        (lambda: nn.ConvTranspose1d(2, 4, 3), (2, 2, 5)),
        (lambda: nn.LayerNorm(4), (3, 4)),
        (lambda: nn.BatchNorm1d(4), (3, 4)),
        (SelfAttention, (2, 3, 4)),
    ],
    ids=["Linear", "Conv2d", "ConvTranspose1d", "LayerNorm", "BatchNorm1d", "MultiheadAttention"],
)
def test_a_layer_that_rests_runs_the_plain_classs_forward(make, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(make())
    model = proxprop.convert(copy.deepcopy(plain), Exact(), module_types="all", include_last=True)
    input = randn(*shape, seed=1).float()
    resting(model, input)
    layers = [layer for layer in model.modules() if isinstance(layer, proxprop.nn.ProximalLayer)]
    assert layers
    for layer in layers:
        assert type(layer).forward is layer.plain.forward
    plain.train()(input)  # a normalisation has seen the input twice, too
    for each in (model, plain):
        each.zero_grad()
        each(input).square().sum().backward()
    for name, expected in grads(plain).items():
        assert torch.equal(grads(model)[name], expected)


def test_bits_of_the_gradient_are_torchs_in_observed_steps_too() -> None:
    plain, model = plain_model(torch.float32), proxprop.convert(plain_model(torch.float32), Exact())
    attached(model)
    input = images(dtype=torch.float32)
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(input)
        output.float().square().sum().backward()
    for name, expected in grads(plain).items():
        assert torch.equal(grads(model)[name], expected), name


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_rests_solves_inside_backward(clone) -> None:
    model = resting(proxprop.convert(plain_model(), Exact(), tau_theta=0.7), images())
    other = clone(model)
    expected = proxprop.convert(plain_model(), Exact(), tau_theta=0.7)
    for each in (other, expected):
        assert type(each[3]) is proxprop.nn.Linear
        each(images()).square().sum().backward()
    assert_same(grads(other), grads(expected))
    optimizer = attached(other)  # is not attached yet
    stepped(other, optimizer, images())


def test_detaching_a_model_that_rests_wakes_it_up() -> None:
    model = resting(proxprop.convert(plain_model(), Exact(), tau_theta=0.7), images())
    model[0]._attached.handle.detach()
    assert type(model[0]) is proxprop.nn.Conv2d
    proxprop.revert(model)
    assert type(model[0]) is nn.Conv2d


@works(
    "`torch.func` transforms between observed steps of running averages", note="layers are torch's own there"
)
def test_transforms_work_between_observed_steps() -> None:
    model, plain = proxprop.convert(plain_model(), Exact()), plain_model()
    resting(model, images())
    values = dict(plain.named_parameters())

    def loss(parameters: dict[str, Tensor], each: nn.Module) -> Tensor:
        return torch.func.functional_call(each, parameters, (images(),)).square().sum()

    assert_same(*(torch.func.grad(loss)(values, each) for each in (model, plain)))


class Projections(nn.Module):
    """Query, key and value of one input, and a layer that sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=i > 0) for i in range(3))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x).tanh() * self.k(x).tanh() * self.v(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_that_see_the_same_tensor_share_its_s(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    torch.manual_seed(0)
    model = proxprop.convert(Projections().double(), Exact(), include_last=True)
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model, running=Running())
    formed = []
    original = Summing.formed
    monkeypatch.setattr(Summing, "formed", lambda *args: formed.append(args) or original(*args))
    inputs = [randn(7, 6, seed=i) for i in range(2)]
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x.clone())
        output.square().sum().backward()
    assert len(formed) == 6  # in each pass of q, of k and v, which have a bias, and of the last layer
    S = {system.name: system.S for system in handle.systems}
    if not autocast:
        expected = sum(x.T @ x for x in inputs)
        for name in "qkv":
            assert torch.allclose(S[name][0, :6, :6], expected)
    assert torch.equal(S["k"], S["v"])
    assert S["k"].data_ptr() != S["v"].data_ptr()


class Gated(nn.Module):
    """Two layers that see the same tensor, in every call one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.out = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gate(x).tanh() * self.up(x))


def test_s_is_not_kept_from_one_backward_pass_to_the_next() -> None:
    """NumPy writes each batch into the same memory, of which torch counts no writes."""
    torch.manual_seed(0)
    plain = Gated().double()
    immediate, model = (proxprop.convert(copy.deepcopy(plain), Exact(), space=FEATURE) for _ in range(2))
    optimizer = attached(model)
    batch = numpy.empty((7, 6))
    x = torch.from_numpy(batch)
    for step in range(3):
        batch[...] = (step + 1) * randn(7, 6, seed=step).numpy()
        model(x)  # to look at the output alone
        for each in (immediate, model):
            each.zero_grad()
            each(x).square().sum().backward()
        optimizer.step()
        assert_same(grads(model), grads(immediate), tolerance=1e-9)


def test_layers_that_see_a_tensor_in_two_precisions_share_no_s() -> None:
    torch.manual_seed(0)
    model = proxprop.convert(Gated(), Exact(), space=FEATURE)
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model)
    x = randn(7, 6, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        gate = model.gate(x)
    (gate * model.up(x)).sum().backward()
    S = {system.name: system.S[0, :6, :6] for system in handle.systems}
    for name, seen in (("gate", x.bfloat16().float()), ("up", x)):
        torch.testing.assert_close(S[name], seen.T @ seen)


class Lookups(nn.Module):
    """Two tables of different sizes, looked up by the same indices."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Embedding(7, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = x[:, 0].abs().long().clamp(max=4)
        return self.large(index) * self.small(index)


class Products(nn.Module):
    """Two layers that see the same first input, and different second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Bilinear(6, 6, 2), nn.Bilinear(6, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, x.tanh()) * self.second(x, x.cos())


@pytest.mark.parametrize("make", [Lookups, Products])
def test_layers_that_have_no_s_in_common_each_sum_their_own(make) -> None:
    torch.manual_seed(0)
    plain = make().double()
    x = randn(9, 6, seed=1) * 3
    immediate, model = (
        proxprop.convert(copy.deepcopy(plain), Exact(), module_types="all", include_last=True)
        for _ in range(2)
    )
    optimizer = attached(model)
    for each in (immediate, model):
        each(x).square().sum().backward()
    optimizer.step()
    assert_same(grads(model), grads(immediate), tolerance=1e-9)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).relu())


@quiet_dynamo
@dynamo.patch(use_recursive_dict_tags_for_guards=True)
def test_a_compiled_model_is_observed_where_guards_look_at_attributes_alone(
    fresh_compiler: None,
) -> None:
    """By default in torch 2.11: a graph is taken again unless the attributes of a module have changed."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual() for _ in range(3)))
    models = [proxprop.convert(nn.Sequential(blocks, nn.Linear(8, 8)), Exact())]
    models.append(copy.deepcopy(models[0]))
    found = []
    for model, called in zip(models, (models[0], torch.compile(models[1], backend="aot_eager")), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        proxprop.attach(optimizer, model, running=Running(update_every=3, invert_every=3))
        for step in range(8):
            optimizer.zero_grad()
            called(randn(16, 8, seed=step).float()).square().sum().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
