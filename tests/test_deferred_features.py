"""Deferred mode with the rest of torch: what works in immediate mode works here, and what is refused is refused here."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn import qat
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import proxprop
from cases import oracle, randn, relative_error
from models import MODELS, ModelCase
from proxprop import CG, Exact, device
from proxprop.solvers import Solver
from test_bad_input import Scale, quiet_layouts, sparse_inputs
from test_compile import SelfAttention, embedded, whole_step
from test_copies import QAT, quantisation_aware, quiet_observers, saved_by
from test_deferred import attached, grads, quiet_dynamo
from test_export import operators, quiet_exporter, write
from test_layers import Transposed, converted, last
from test_models import captured, convert, expected_direction
from training import assert_same, directions, handle_of, images, loss_of, plain_model, small_model

FEW = pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
MESSAGE = "the message says what is accepted"


def works(feature: str, section: str = "Ways of training", status: str = "works", note: str = ""):
    return pytest.mark.compatibility(feature, section=section, status=status, note=note, mode="deferred")


def refused(feature: str, note: str, section: str = "Ways of training"):
    return works(feature, section, "refused", note)


def stepped(
    model: nn.Module, optimizer: torch.optim.Optimizer, input: Tensor, call=None
) -> dict[str, Tensor]:
    """The directions of one step of an attached model."""
    optimizer.zero_grad()
    loss_of(call or model, input).backward()
    optimizer.step()
    return grads(model)


@pytest.fixture
def registry() -> Iterator[None]:
    """Registrations made in a test end with it."""
    table = dict(proxprop.nn.TABLE)
    yield
    proxprop.nn.TABLE.clear()
    proxprop.nn.TABLE.update(table)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Layers


@pytest.mark.parametrize(("make", "shape"), [
    pytest.param(lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 4), marks=works("Grouped and depthwise convolutions", "Layers")),
    pytest.param(lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 5, 4), marks=works("Grouped and depthwise convolutions", "Layers")),
    pytest.param(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 5), marks=works("Padding modes", "Layers")),
    pytest.param(lambda: nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), (2, 2, 4, 5), marks=works("Padding modes", "Layers")),
])  # fmt: skip
@FEW
def test_convolutions_in_the_middle_of_a_model(make, shape, solver: Solver) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), make(), nn.Softplus(), nn.Flatten()).double()
    model = proxprop.convert(model, solver, tau_theta=0.3, include_last=True)
    whole = copy.deepcopy(model)
    whole(randn(*shape, seed=1)).square().sum().backward()
    optimizer = attached(model)
    for part in randn(*shape, seed=1):
        model(part[None]).square().sum().backward()
    optimizer.step()
    assert_same(grads(model), grads(whole), tolerance=1e-9)


@works("nn.LazyLinear, nn.LazyConv", "Layers")
def test_lazy_layers_once_materialised() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(4), nn.LazyLinear(3)).double()
    model(images())
    proxprop.convert(model, Exact())
    expected = directions(copy.deepcopy(model), images())
    assert_same(stepped(model, attached(model), images()), expected, tolerance=1e-9)


@works("third-party linear layers", "Layers")
@pytest.mark.usefixtures("registry")
@FEW
def test_registered_layers(solver: Solver) -> None:
    proxprop.register(Transposed, transposed=True)
    torch.manual_seed(0)
    plain = Transposed(3, 4).double()
    layer = converted(plain, solver, tau_theta=0.7)
    optimizer = attached(layer)
    input, G = randn(2, 5, 4, seed=1), randn(2, 5, 3, seed=2)
    for part in range(2):
        layer(input[part]).backward(G[part])
    optimizer.step()
    for name, expected in oracle(plain, input, G, solver, 0.7, owners=last).items():
        assert relative_error(layer.get_parameter(name).grad, expected) < 1e-9


EXPLICIT = {
    "Pruning, and weight and spectral norm by hooks (`torch.nn.utils`)": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight norm, spectral norm": nn.utils.parametrizations.weight_norm,
}  # fmt: skip


@pytest.mark.parametrize("change", [
    pytest.param(change, marks=works(feature, "Layers", "explicit", "the output is not linear in what is trained"), id=feature)
    for feature, change in EXPLICIT.items()
])  # fmt: skip
def test_layers_whose_weight_is_computed_keep_their_gradient(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(change(nn.Linear(3, 3)), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    proxprop.convert(model, Exact())
    optimizer = attached(model)
    model(randn(4, 3, seed=1)).square().sum().backward()
    before = grads(model)
    optimizer.step()
    after = grads(model)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith(("0.", "2.")))
    assert not torch.equal(before["1.weight"], after["1.weight"])


# Ways of training


@works("In-place activations after the layer")
@pytest.mark.parametrize("activate", [nn.ReLU(inplace=True), lambda x: x.mul_(2).add_(1)])
def test_in_place_after_the_layer(activate) -> None:
    torch.manual_seed(0)
    layer = proxprop.convert(nn.Linear(5, 4).double(), Exact(), include_last=True)
    whole = copy.deepcopy(layer)
    optimizer = attached(layer)
    for each in (whole, layer):
        (randn(6, 4, seed=6) * activate(each(randn(6, 5, seed=5)))).sum().backward()
    optimizer.step()
    assert_same(grads(layer), grads(whole), tolerance=1e-9)


@works(
    "`torch.autograd.grad`, several output gradients at once (`is_grads_batched`)",
    note="the plain gradients, in deferred mode",
)
def test_batched_output_gradients_are_plain_gradients() -> None:
    model, plain, G = small_model(), plain_model(), randn(4, 6, 3, seed=3)
    attached(model)
    found, expected = (
        torch.autograd.grad(each(images()), list(each.parameters()), G, is_grads_batched=True)
        for each in (model, plain)
    )
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


@works("`retain_graph`", note="rows of a graph that is gone through several times count once")
@FEW
def test_losses_that_share_a_forward_pass_share_its_rows(solver: Solver) -> None:
    """However the loss is split into backward passes, or looked at by `torch.autograd.grad` before."""
    model = small_model(solver)
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    for looks in (False, True):
        optimizer.zero_grad()
        loss = loss_of(model, images())
        if looks:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        (0.3 * loss).backward(retain_graph=True)
        (0.7 * loss).backward()
        optimizer.step()
        assert_same(grads(model), expected, tolerance=1e-9)


@works("Tensor and module hooks", note="see gradients in backward, in deferred mode")
def test_hooks_see_gradients() -> None:
    model, plain = small_model(), plain_model()
    expected = directions(plain, images())["3.weight"]
    optimizer = attached(model)
    seen: list[Tensor] = []
    model[3].weight.register_hook(seen.append)
    model[3].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model[3].register_full_backward_hook(lambda _, __, G: seen.append(G[0]))
    stepped(model, optimizer, images())
    assert sum(value.shape == (6, 8) for value in seen) == 1
    assert all(relative_error(value, expected) < 1e-12 for value in seen if value.shape == expected.shape)


@refused(
    "Double backward (`create_graph=True`)", "`proxprop.revert(model)` for gradient penalties and Hessians"
)
def test_double_backward_is_refused() -> None:
    model = small_model()
    attached(model)
    with pytest.raises(RuntimeError, match=r"can't be differentiated again.*revert"):
        loss_of(model, images()).backward(create_graph=True)


@refused(
    "`torch.func.functional_call`", "in deferred mode with other parameters: S is summed for the layer's own"
)
def test_functional_call_with_other_parameters_is_refused() -> None:
    model = small_model()
    attached(model)
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(
        RuntimeError, match=r"^0: its parameters are not the ones it was attached with.*detach"
    ):
        torch.func.functional_call(model, others, (images(),))


@refused("`torch.func.grad`, `vjp`, `jacrev`, `hessian` while training", "they differentiate backward itself")
@refused(
    "`torch.vmap` while training (per-sample gradients)",
    "a direction belongs to a whole batch; `proxprop.revert(model)` first",
)
@refused("Forward-mode differentiation while training", "`proxprop.revert(model)` first")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp rules are scripted
def test_transforms_are_refused() -> None:
    model, input = small_model(), images()
    attached(model)
    for transform in (
        lambda: torch.func.grad(lambda x: loss_of(model, x))(input),
        lambda: torch.func.vjp(model, input),
        lambda: torch.vmap(lambda image: model(image[None])[0])(input),
        lambda: torch.func.jvp(model, (input,), (torch.ones_like(input),)),
    ):
        with pytest.raises(RuntimeError, match=r"^0: .*revert"):
            transform()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"^0: .*forward-mode.*revert"):
        model(forward_ad.make_dual(input, torch.ones_like(input)))


@works("`torch.vmap` without gradients")
def test_vmap_without_gradients() -> None:
    model, plain = small_model(), plain_model()
    attached(model)
    with torch.no_grad():
        found, expected = (torch.vmap(lambda image, m=m: m(image[None])[0])(images()) for m in (model, plain))
    assert torch.equal(found, expected)


@works(
    "Loading with `assign=True`",
    note="in deferred mode before `attach`; after it, the replaced parameters are noticed",
)
def test_replaced_parameters_are_noticed() -> None:
    model = small_model(Exact())
    model.load_state_dict(plain_model().state_dict(), assign=True)
    optimizer = attached(model)
    assert_same(
        stepped(model, optimizer, images()), directions(small_model(Exact()), images()), tolerance=1e-9
    )
    model.load_state_dict(plain_model().state_dict(), assign=True)
    with pytest.raises(
        RuntimeError, match=r"its parameters are not the ones it was attached with.*assign=True"
    ):
        model(images())


@works("Averaged and EMA copies (`AveragedModel`)")
def test_averaged_models() -> None:
    model = small_model(Exact())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model)
    averaged = AveragedModel(model)
    history = []
    for _ in range(2):
        stepped(model, optimizer, images())
        averaged.update_parameters(model)
        history.append(model[3].weight.detach().clone())
    assert relative_error(averaged.module[3].weight, (history[0] + history[1]) / 2) < 1e-12


@works("Channels-last")
def test_channels_last() -> None:
    torch.manual_seed(0)
    layer = proxprop.convert(nn.Conv2d(3, 4, 3, padding=1).double(), Exact(), include_last=True)
    expected = copy.deepcopy(layer)
    layer.to(memory_format=torch.channels_last)
    optimizer = attached(layer)
    input = randn(2, 3, 5, 4, seed=1)
    expected(input).square().sum().backward()
    layer(input.to(memory_format=torch.channels_last)).square().sum().backward()
    optimizer.step()
    assert_same(grads(layer), grads(expected), tolerance=1e-9)


@works("Meta device")
def test_meta_device_gives_shapes() -> None:
    model = small_model(Exact()).to("meta")
    optimizer = attached(model)
    model(images().to("meta")).sum().backward()
    optimizer.step()
    assert all(p.grad.shape == p.shape and p.grad.is_meta for p in model.parameters())


@works("Memory kept between forward and backward")
def test_no_more_is_kept_between_forward_and_backward_than_by_backprop() -> None:
    model = small_model()
    attached(model)
    plain_kept, kept = (
        sum(saved_by(lambda each=each: each(images()))[0].values()) for each in (plain_model(), model)
    )
    assert kept <= plain_kept


@works("Quantisation-aware modules (`torch.ao.nn.qat`)", status="explicit", note=QAT)
@quiet_observers
def test_quantisation_aware_modules_keep_their_gradient() -> None:
    model = proxprop.convert(quantisation_aware())
    optimizer = attached(model)
    model(torch.randn(2, 2, 4)).square().mean().backward()
    before = model[3].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[3].weight.grad, before)
    assert isinstance(model[3], qat.Linear)


@works("`torch.export`")
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
def test_export_is_the_plain_models(gradients: bool) -> None:
    model, plain = small_model(), plain_model()
    attached(model)
    with torch.set_grad_enabled(gradients):
        exported, expected = (torch.export.export(each, (images(),)) for each in (model, plain))
    assert operators(exported) == operators(expected)
    assert list(exported.state_dict) == list(expected.state_dict)


@works("ONNX export")
@quiet_exporter
def test_onnx_is_the_plain_models(tmp_path: Path) -> None:
    model, plain = small_model(dtype=torch.float32).eval(), plain_model(torch.float32).eval()
    attached(model)
    files = [write(each, tmp_path / f"{name}.onnx") for name, each in [("model", model), ("plain", plain)]]
    assert [node.op_type for node in files[0].graph.node] == [node.op_type for node in files[1].graph.node]
    assert isinstance(files[0], onnx.ModelProto)


@refused("`torch.optim.SparseAdam`", "by torch itself: directions are dense")
def test_sparse_adam() -> None:
    model = small_model()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    proxprop.attach(optimizer, model)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        stepped(model, optimizer, images())


@works("Parameter groups")
@works("Learning-rate schedulers")
def test_groups_and_schedulers() -> None:
    found = []
    for attach in (False, True):
        model = small_model(Exact())
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.5},
            {"params": list(model[3].parameters()), "weight_decay": 0.3},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if attach:
            proxprop.attach(optimizer, model)
        for _ in range(3):
            model.zero_grad()
            loss_of(model, images()).backward()
            optimizer.step()
            scheduler.step()
        found.append(dict(model.named_parameters()))
    assert_same(found[1], found[0], tolerance=1e-9)


# torch.compile


@works("`torch.compile` of the model, with and without `fullgraph`")
@works("`torch.compile`, batches of changing size")
@quiet_dynamo
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("fullgraph", [True, False])
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
@pytest.mark.usefixtures("fresh_compiler")
def test_the_default_backend() -> None:
    model = small_model(Exact(), torch.float32)
    expected = directions(copy.deepcopy(model), images(dtype=torch.float32))
    compiled = torch.compile(model, fullgraph=True)
    assert_same(
        stepped(model, attached(model), images(dtype=torch.float32), compiled), expected, tolerance=1e-4
    )


@works("`torch.compile` under autocast")
@quiet_dynamo
@pytest.mark.usefixtures("fresh_compiler")
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
@pytest.mark.usefixtures("fresh_compiler")
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
@pytest.mark.usefixtures("fresh_compiler")
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
@pytest.mark.usefixtures("fresh_compiler")
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
@pytest.mark.usefixtures("fresh_compiler")
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


# Models

ROWS = [
    pytest.param(
        case,
        solver,
        id=f"{case.name}-{solver}",
        marks=works(case.name, "Models")
        if case.module_types is None
        else works(case.name, "Models", "explicit", "in deferred mode: no Gram matrix to sum"),
    )
    for case in MODELS
    for solver in ([CG(3), Exact()] if case.module_types is None else [CG(3)])
]


@pytest.mark.parametrize(("case", "solver"), ROWS)
def test_models_take_the_step_of_an_independent_computation(case: ModelCase, solver: Solver) -> None:
    plain = case.model()
    model = convert(case, copy.deepcopy(plain), solver)
    calls = captured(case, plain)
    if case.module_types is not None:
        with pytest.warns(UserWarning, match="keeps BackProp's gradient: GraphConv has no Gram matrix"):
            optimizer = attached(model)
    else:
        optimizer = attached(model)
    case.loss(model).backward()
    optimizer.step()
    for name, (inputs, G) in calls.items():
        layer = model.get_submodule(name)
        if case.module_types is not None and type(plain.get_submodule(name)) in case.module_types[:1]:
            for mine, theirs in zip(layer.parameters(), plain.get_submodule(name).parameters(), strict=True):
                assert relative_error(mine.grad, theirs.grad) < 1e-10
            continue
        for parameter, direction in expected_direction(plain.get_submodule(name), inputs, G, solver).items():
            assert relative_error(layer.get_parameter(parameter).grad, direction) < 1e-8, name


# Input


@refused("Shapes that do not fit", "torch's own message", "Input")
@refused("Integer inputs to a layer that takes none", "torch's own message", "Input")
@refused("Inputs of another precision than the layer's", "torch's own message; autocast casts", "Input")
@refused("Inputs that are no tensor", "torch's own message", "Input")
@pytest.mark.parametrize(
    "input",
    [torch.ones(2, 5), torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4).double(), [1.0] * 4, None],
    ids=["shape", "integer", "precision", "list", "none"],
)
def test_torchs_own_messages(input) -> None:
    layer, plain = proxprop.nn.Linear(4, 3), nn.Linear(4, 3)
    attached(layer)
    messages = []
    for each in (layer, plain):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            each(input)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@refused("Sparse inputs", "`input.to_dense()`, or leave the layer out with `exclude`", "Input")
@refused("Nested inputs", "`input.to_dense()`, or leave the layer out with `exclude`", "Input")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=quiet_layouts)
        for name in ("torch.sparse_coo", "torch.sparse_csr", "torch.jagged")
    ],
)
def test_sparse_and_nested_inputs(layout: str) -> None:
    layer = proxprop.nn.Linear(4, 3)
    attached(layer)
    with pytest.raises(TypeError, match=rf"input should be dense but is {layout}.*to_dense\(\).*exclude"):
        layer(sparse_inputs()[layout])


@works("Empty batches", "Input")
@FEW
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 3), (0, 4)),
        (lambda: nn.Conv2d(2, 4, 3, groups=2), (0, 2, 5, 5)),
        (lambda: nn.LayerNorm(4), (0, 4)),
    ],
)
def test_a_step_of_nothing_is_zero(make, shape, solver: Solver, scaling: str) -> None:
    layer = proxprop.convert(make(), solver, scaling=scaling, module_types="all", include_last=True)
    optimizer = attached(layer)
    layer(torch.ones(shape)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


@works("NaN and infinite inputs", "Input")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@FEW
def test_non_finite_inputs_reach_the_direction_and_do_no_lasting_harm(solver: Solver, value: float) -> None:
    model = small_model(solver)
    expected = directions(copy.deepcopy(model), images())
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model)
    bad = images()
    bad[1, 0, 2, 2] = value
    loss_of(model, bad).backward()
    handle.solve()
    assert not bool(model[0].weight.grad.isfinite().all())
    model.zero_grad()
    loss_of(model, images()).backward()
    handle.solve()
    assert_same(grads(model), expected, tolerance=1e-9)


@refused("`tau_theta` that is not positive, not finite or no number", MESSAGE, "Input")
@refused("`CG(0)` and other counts that are none", MESSAGE, "Input")
@refused("Complex parameters", "leave such layers out with `exclude`", "Input")
def test_settings_of_attached_layers_are_checked() -> None:
    model = small_model()
    attached(model)
    with pytest.raises(ValueError, match="tau_theta should be > 0 and finite but is -1"):
        model[3].tau_theta = -1
    with pytest.raises(ValueError, match="iterations should be at least 1 but is 0"):
        model[3].solver = CG(0)
    with pytest.raises(TypeError, match="weight should be real"):
        proxprop.attach(
            torch.optim.SGD(model.parameters(), lr=0.0),
            proxprop.convert(nn.Linear(2, 2, dtype=torch.complex64), include_last=True),
        )


@refused("Patterns that match nothing", "the message lists the layers there are", "Input")
@refused("Patterns and module types of the wrong type", MESSAGE, "Input")
def test_convert_checks_before_attach_can_be_called() -> None:
    with pytest.raises(ValueError, match="matches no module; there are: 0, 3, 5"):
        proxprop.convert(plain_model(), exclude=["hed.*"])
    with pytest.raises(TypeError, match="exclude should be a list of patterns"):
        proxprop.convert(plain_model(), exclude="head")


@refused(
    "CUDA graphs of both passes (`torch.cuda.make_graphed_callables`)",
    "in deferred mode: it asks for gradients alone; capture the whole step",
)
def test_a_graph_of_gradients_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(Exact())
    proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = images().requires_grad_()
    monkeypatch.setattr(device, "is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match="gradients alone"):
        torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.autograd.grad(model(x).square().sum(), x)  # of the input alone nothing is to be summed
    model(x).square().sum().backward()
