"""Deferred mode with the rest of torch: what works in immediate mode works here, and what is refused is refused here."""

import copy
from collections.abc import Callable
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
from deferred_claims import refused, works
from exporting import operators, write
from layers import Transposed, converted, last
from proxprop import CG, Exact
from proxprop.solvers import Solver
from quantisation import QAT, quantisation_aware
from quiet import quiet_exporter, quiet_observers
from training import (
    assert_same,
    attached,
    directions,
    grads,
    images,
    loss_of,
    plain_model,
    saved_by,
    small_model,
    stepped,
)

FEW = pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)


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
    gradients = [value for value in seen if value.shape == expected.shape]
    assert len(gradients) == 2
    assert all(relative_error(gradient, expected) < 1e-12 for gradient in gradients)


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
