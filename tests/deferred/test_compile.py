"""Deferred mode under `torch.compile`."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import proxprop
from cases import randn, relative_error
from deferred_claims import works
from layers import Scale, SelfAttention, embedded
from proxprop import CG, Exact, Running
from quiet import quiet_dynamo
from training import (
    assert_same,
    attached,
    directions,
    grads,
    handle_of,
    images,
    plain_model,
    small_model,
    stepped,
    whole_step,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@works("`torch.compile` of the model, with and without `fullgraph`")
@works("`torch.compile`, batches of changing size")
@quiet_dynamo
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_model(fullgraph: bool) -> None:
    model = small_model(Exact())
    eager = copy.deepcopy(model)
    optimizer = attached(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for batch in (3, 5, 9):
        assert_same(
            stepped(model, optimizer, images(batch), compiled),
            directions(eager, images(batch)),
            tolerance=1e-9,
        )


@works("`torch.compile` of the model, with and without `fullgraph`")
@quiet_dynamo
@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
def test_the_default_backend() -> None:
    model = small_model(Exact(), torch.float32)
    expected = directions(copy.deepcopy(model), images(dtype=torch.float32))
    compiled = torch.compile(model, fullgraph=True)
    assert_same(
        stepped(model, attached(model), images(dtype=torch.float32), compiled), expected, tolerance=1e-4
    )


@works("`torch.compile` under autocast")
@quiet_dynamo
def test_compiled_under_autocast() -> None:
    model, input = small_model(Exact(), torch.float32), images(dtype=torch.float32)
    optimizer = attached(model)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    expected = stepped(model, optimizer, input, call)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(stepped(model, optimizer, input, compiled), expected, tolerance=1e-5)


@works("`torch.compile` of the whole step (forward, backward, optimizer)")
@quiet_dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_step() -> None:
    models = [small_model(Exact()) for _ in range(2)]
    steps = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        proxprop.attach(optimizer, model)
        steps.append(whole_step(model, optimizer))
    steps[1] = torch.compile(steps[1], backend="aot_eager")
    for _ in range(3):
        losses = [float(step(images())) for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert relative_error(other, one) < 1e-9


@works(
    "`torch.compile` of a module solved matrix-free through autograd",
    status="explicit",
    note="no Gram matrix to sum in deferred mode",
)
@quiet_dynamo
def test_a_generic_layer_inside_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Tanh(), nn.Linear(4, 3)).double()
    proxprop.convert(model, CG(2), module_types=[Scale, nn.Linear])
    eager = copy.deepcopy(model)
    found = []
    for each in (eager, model):
        with pytest.warns(UserWarning, match="1 keeps BackProp's gradient: Scale has no Gram matrix"):
            optimizer = attached(each)
        call = each if each is eager else torch.compile(each, backend="aot_eager")
        found.append(stepped(each, optimizer, randn(6, 4, seed=1), call))
    assert_same(found[1], found[0], tolerance=1e-12)


@works("`torch.compile` of every kind of layer")
@quiet_dynamo
@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Conv1d(4, 4, 3, groups=2, padding="same"), (2, 4, 6)),
    (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), (2, 2, 3, 3)),
    (lambda: nn.LayerNorm(4), (3, 4)),
    (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
    (SelfAttention, (2, 3, 4)),
    (embedded, None),
], ids=["Conv1d", "ConvTranspose2d", "LayerNorm", "BatchNorm2d", "MultiheadAttention", "Embedding"])  # fmt: skip
def test_every_kind_of_layer_compiled(make, shape) -> None:
    torch.manual_seed(0)
    model = proxprop.convert(make().double(), CG(2), module_types="all", include_last=True)
    input = randn(*shape, seed=1) if shape else torch.arange(6).view(2, 3)
    eager = copy.deepcopy(model)
    for each in (eager, model):
        optimizer = attached(each)
        call = each if each is eager else torch.compile(each, backend="aot_eager", fullgraph=True)
        call(input).square().sum().backward()
        optimizer.step()
    assert_same(grads(model), grads(eager), tolerance=1e-10)


@works("`torch.compile` before and after conversion")
@works("`torch.compile`, settings changed after compiling")
@quiet_dynamo
def test_a_model_attached_after_it_was_compiled_is_compiled_anew() -> None:
    model = small_model(Exact())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = directions(model, images(), compiled)
    optimizer = attached(model)
    plain = directions(plain_model(), images())
    assert_same(directions(model, images(), compiled), plain, tolerance=1e-9)
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)
    model[3].tau_theta = 0.01
    found = stepped(model, optimizer, images(), compiled)
    handle_of(model).detach()
    assert_same(found, directions(model, images(), compiled), tolerance=1e-9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


@works("`torch.compile` of the model, with and without `fullgraph`")
@quiet_dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("running", [None, Running(update_every=2, invert_every=2)], ids=["", "running"])
def test_alike_blocks_that_are_compiled_one_by_one_share_a_graph(running: Running | None) -> None:
    """With a graph each, a deep model would come to torch's limit on graphs of one function."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(4, 3)).double()
    model = proxprop.convert(plain, Exact())
    eager, graphs = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    optimizers = [attached(each, running=running) for each in (model, eager)]
    for block in model[:-1]:
        block.compile(backend=graphs, fullgraph=True)
    for step in range(4):
        input = randn(5, 4, seed=step).requires_grad_()  # as the later blocks' inputs do
        assert_same(
            *(stepped(each, own, input) for each, own in zip((model, eager), optimizers, strict=True))
        )
    assert graphs.frame_count == (1 if running is None else 2)  # observed, and resting
