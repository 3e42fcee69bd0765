"""`torch.compile` of a model and of a whole step gives eager's directions."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import proxprop
from cases import randn, relative_error
from compiling import quiet_compiler
from layers import SelfAttention, embedded
from proxprop import CG, Exact
from training import assert_same, directions, grads, images, small_model, whole_step

works = pytest.mark.compatibility
slow = pytest.mark.slow
pytestmark = [pytest.mark.usefixtures("fresh_compiler"), *quiet_compiler]


@works("`torch.compile` of the model, with and without `fullgraph`")
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("solver", [CG(3), CG(2, per_output=False), Exact()], ids=str)
def test_a_compiled_model_gives_eagers_directions(solver, fullgraph: bool) -> None:
    model = small_model(solver)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    assert_same(directions(model, images(), compiled), directions(model, images()))


@works("`torch.compile` of the model, with and without `fullgraph`")
def test_the_default_backend() -> None:
    model = small_model(dtype=torch.float32)
    input = images(dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(directions(model, input, compiled), directions(model, input), tolerance=1e-5)


@works("`torch.compile`, batches of changing size")
def test_batches_of_changing_size() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (3, 5, 9):
        assert_same(directions(model, images(batch), compiled), directions(model, images(batch)))


class Residual(nn.Module):
    """Convolutions as in a residual network: strided, without a bias, with a shortcut and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shortcut = nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.Conv2d(1, 4, 1, 2)
        self.norm, self.second, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm(self.first(x)), inplace=True)
        return self.head((self.second(y) + self.shortcut(x)).mean((2, 3)))


@works("`torch.compile`, batches of changing size")
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=slow), pytest.param(False, marks=slow)])
@pytest.mark.parametrize(("solver", "space"), [(CG(2), "sample"), (Exact(), "feature")], ids=str)
def test_convolutions_with_symbolic_sizes(solver, space: str | None, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = proxprop.convert(Residual().double(), solver, tau_theta=0.7, space=space)
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    for batch in (3, 5):
        assert_same(directions(model, images(batch), compiled), directions(model, images(batch)), 1e-9)


@slow
@works("`torch.compile`, batches of changing size")
def test_symbolic_sizes_in_bfloat16_with_channels_last() -> None:
    torch.manual_seed(0)
    form = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    model = proxprop.convert(Residual().to(**form), CG(2), tau_theta=0.7)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for batch in (3, 5):
        input = images(batch).to(**form)
        assert_same(directions(model, input, compiled), directions(model, input), 1e-2)


# torch's own: the benchmarks that choose a product ask for what torch has deprecated
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@slow
@works("`torch.compile` of the model, with and without `fullgraph`")
def test_products_that_inductor_chooses_among() -> None:
    torch.manual_seed(0)
    model = proxprop.convert(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), CG(2))
    compiled, input = torch.compile(model, mode="max-autotune-no-cudagraphs"), torch.randn(6, 16)
    assert_same(directions(model, input, compiled), directions(model, input), 1e-5)


@works("`torch.compile` under autocast")
def test_under_autocast() -> None:
    model, input = small_model(dtype=torch.float32), images(dtype=torch.float32)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(directions(model, input, compiled), directions(model, input, call), tolerance=1e-6)


@works("`torch.compile` of the whole step (forward, backward, optimizer)")
@pytest.mark.parametrize(("solver", "optimizer", "tolerance"), [
    (CG(3), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 1e-9),
    (Exact(), lambda p: torch.optim.Adam(p, lr=0.01), 1e-5),  # torch's compiled Adam corrects its bias in float32
], ids=["CG-SGD", "Exact-Adam"])  # fmt: skip
def test_a_compiled_step_trains_as_an_eager_one(solver, optimizer, tolerance: float) -> None:
    models = [small_model(solver) for _ in range(2)]
    eager, compiled = (whole_step(model, optimizer(model.parameters())) for model in models)
    compiled = torch.compile(compiled, backend="aot_eager")
    losses = [(float(eager(images())), float(compiled(images()))) for _ in range(3)]
    assert losses[-1][0] < losses[0][0]
    for one, other in losses:
        assert one == pytest.approx(other, rel=tolerance)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert relative_error(other, one) < tolerance


@works("`torch.compile` of a module solved matrix-free through autograd")
def test_a_generic_layer_inside_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scaled(4), nn.Tanh(), nn.Linear(4, 3)).double()
    proxprop.convert(model, CG(2), module_types=[Scaled, nn.Linear])
    input, compiled = randn(6, 4, seed=1), torch.compile(copy.deepcopy(model), backend="aot_eager")
    found = directions(compiled._orig_mod, input, compiled)
    assert_same(found, directions(model, input))


class Scaled(nn.Module):
    """One scale a feature: linear in its parameter, and in no table."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale


@works("`torch.compile` of every kind of layer")
@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Conv1d(4, 4, 3, groups=2, padding="same"), (2, 4, 6)),
    (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), (2, 2, 3, 3)),
    (lambda: nn.LayerNorm(4), (3, 4)),
    (lambda: nn.RMSNorm(4), (3, 4)),
    (lambda: nn.GroupNorm(2, 4), (3, 4, 2)),
    (lambda: nn.BatchNorm2d(4), (3, 4, 2, 2)),
    (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    (SelfAttention, (2, 3, 4)),
    (embedded, None),
], ids=["Conv1d", "ConvTranspose2d", "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm2d", "InstanceNorm1d",
        "MultiheadAttention", "Embedding"])  # fmt: skip
def test_every_kind_of_layer(make, shape) -> None:
    torch.manual_seed(0)
    model = proxprop.convert(make().double(), CG(2), module_types="all", include_last=True)
    input = randn(*shape, seed=1) if shape else torch.arange(6).view(2, 3)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for call in (model, compiled):
        call(input).square().sum().backward()
    found = dict(compiled._orig_mod.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative_error(found[name].grad, parameter.grad) < 1e-12


@works("`torch.compile` before and after conversion")
def test_a_model_converted_after_it_was_compiled_is_compiled_anew() -> None:
    model = proxprop.revert(small_model())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = directions(model, images(), compiled)
    proxprop.convert(model, CG(3), tau_theta=0.7)
    assert_same(directions(model, images(), compiled), directions(model, images()))
    proxprop.revert(model)
    assert_same(directions(model, images(), compiled), plain)


@works("`torch.compile`, settings changed after compiling")
def test_changed_settings_are_seen_by_a_compiled_model() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    directions(model, images(), compiled)
    model[3].tau_theta = 0.01
    model[0].solver = Exact()
    assert_same(directions(model, images(), compiled), directions(model, images()))


@works("Activation checkpointing, reentrant and not")
@works("`torch.compile`, batches of changing size")
def test_a_checkpoint_before_other_layers_with_symbolic_numbers() -> None:
    """tau_theta is a symbol there, and one that was read in a checkpoint is unknown outside of it."""
    torch.manual_seed(0)
    model = proxprop.convert(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double(), CG(2))

    def call(x: Tensor) -> Tensor:
        return model[1:](checkpoint(model[0], x, use_reentrant=False))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (3, 5):
        input, found = randn(batch, 4, seed=batch), []
        for each in (compiled, call):
            model.zero_grad()
            each(input).square().sum().backward()
            found.append(grads(model))
        assert_same(*found, tolerance=1e-12)
