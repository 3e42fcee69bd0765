"""Copies, checkpoints, memory formats, devices and quantisation: a converted model is still a torch model."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn import qat
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import proxprop
from cases import assert_directions, oracle, randn, relative_error
from proxprop import CG, Exact
from quantisation import QAT, quantisation_aware
from quiet import quiet_observers
from training import assert_same, directions, images, loss_of, plain_model, saved_by, small_model

works = pytest.mark.compatibility
SOLVERS = pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@works("`deepcopy`, pickle, `torch.save` and `torch.load` of the model")
@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "copy", "pickle", "save"],
)
@SOLVERS
def test_a_copy_gives_the_same_directions(solver, clone: Callable[[nn.Module], nn.Module]) -> None:
    model = small_model(solver)
    loss_of(model, images()).backward()  # a model that has been trained, not a fresh one
    copied = clone(model)
    assert_same(directions(copied, images()), directions(model, images()))


def test_a_copy_of_a_subclass_is_of_that_subclass() -> None:
    class Plain(nn.Linear):
        pass

    class Own(type(proxprop.convert(Plain(3, 2), include_last=True))):
        pass

    assert type(copy.deepcopy(Own(3, 2))) is Own


@works("`deepcopy`, pickle, `torch.save` and `torch.load` of the model")
def test_a_copy_trains_on_its_own() -> None:
    model = small_model()
    copied = copy.deepcopy(model)
    before = directions(model, images())
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
    directions(copied, images())
    optimizer.step()
    copied[3].tau_theta = 5.0
    assert_same(directions(model, images()), before)


@works("`state_dict` of the model and of the optimizer, also with `weights_only=True`")
def test_training_goes_on_from_a_checkpoint() -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        directions(model, images())
        optimizer.step()

    model, optimizer = new()
    step(model, optimizer)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    step(model, optimizer)
    buffer.seek(0)
    checkpoint = torch.load(buffer, weights_only=True)
    resumed, resumed_optimizer = new()
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    step(resumed, resumed_optimizer)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@works("Loading with `assign=True`")
def test_parameters_replaced_by_loading_are_trained() -> None:
    model, other = small_model(), plain_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.load_state_dict(other.state_dict(), assign=True)
    proxprop.convert(other, CG(3), tau_theta=0.7)
    assert_same(directions(model, images()), directions(other, images()))


@works("Averaged and EMA copies (`AveragedModel`)")
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "EMA"])
def test_averaged_models(average) -> None:
    model = small_model()
    averaged = AveragedModel(model, multi_avg_fn=average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(2):
        directions(model, images())
        optimizer.step()
        averaged.update_parameters(model)
        history.append(model[3].weight.detach().clone())
    assert relative_error(averaged.module[3].weight.detach(), (history[0] + history[1]) / 2) < 1e-12
    with torch.no_grad():
        assert averaged(images()).shape == (6, 3)


@works("Channels-last")
@SOLVERS
def test_channels_last(solver) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3, padding=1).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, include_last=True)
    layer.to(memory_format=torch.channels_last)
    input = randn(2, 3, 5, 4, seed=1)
    output = layer(input.to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last)
    G = randn(*output.shape, seed=2)
    output.backward(G.to(memory_format=torch.channels_last))
    assert_directions(layer, oracle(plain, input, G, solver, tau_theta=1.0))


@works("Meta device")
@SOLVERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_meta_device_gives_shapes(solver, dtype: torch.dtype) -> None:
    model, input = small_model(solver, dtype).to("meta"), images(dtype=dtype).to("meta")
    model(input).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.is_meta
    assert proxprop.summary(model, input).rows[0].plan is not None


@works("Meta device")
def test_a_model_made_on_meta_trains_once_it_has_numbers() -> None:
    with torch.device("meta"):
        model = plain_model()
    proxprop.convert(model, CG(3), tau_theta=0.7).to_empty(device="cpu")
    model.load_state_dict(plain_model().state_dict())
    assert_same(directions(model, images()), directions(small_model(), images()))


@works("Inference under `no_grad` and `inference_mode`, at no cost")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_is_torchs_own_forward_and_saves_nothing(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, input = small_model(), plain_model(), images()

    def forbidden(*_) -> None:
        raise AssertionError("a direction was prepared for although nothing is trained")

    monkeypatch.setattr("proxprop.backward.Proximal.apply", forbidden)
    with mode():
        saved, output = saved_by(lambda: model(input))
        assert torch.equal(output, plain(input))
    assert saved == {}
    assert output.grad_fn is None
    assert output.is_inference() is (mode is torch.inference_mode)


@works("Memory kept between forward and backward", note="no more than BackProp keeps")
@SOLVERS
def test_training_keeps_no_more_than_backprop(solver) -> None:
    bytes_kept = []
    for model in (plain_model(), small_model(solver)):
        saved, output = saved_by(lambda model=model: model(images()))
        assert output.requires_grad
        bytes_kept.append(sum(saved.values()))
    assert bytes_kept[1] <= bytes_kept[0]


@pytest.mark.parametrize("deferred", [False, True])
def test_no_input_is_kept_where_biases_alone_are_trained(deferred: bool) -> None:
    """It may then be written to, as without proxprop."""
    torch.manual_seed(0)
    layer = proxprop.convert(nn.Linear(4, 3), include_last=True)
    layer.weight.requires_grad_(False)
    if deferred:
        proxprop.attach(torch.optim.SGD(layer.parameters()), layer)
    input = torch.ones(5, 4)
    saved, output = saved_by(lambda: layer(input))
    assert input.untyped_storage().data_ptr() not in saved
    input.zero_()
    output.sum().backward()


@works("Frozen layers (fine-tuning)")
def test_a_frozen_layer_costs_nothing_and_its_input_gets_torchs_gradient() -> None:
    model, plain = small_model(), plain_model()
    for each in (model, plain):
        each[3].requires_grad_(False)
    expected, found = directions_of_trained(plain), directions_of_trained(model)
    assert found["3.weight"] is None
    assert found["3.bias"] is None
    G = expected["5.weight"]
    assert torch.equal(found["5.weight"], G)
    assert not torch.equal(found["0.weight"], expected["0.weight"])


def directions_of_trained(model: nn.Module) -> dict[str, Tensor | None]:
    loss_of(model, images()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


quantisation = pytest.mark.compatibility(
    "Quantisation-aware modules (`torch.ao.nn.qat`)", status="explicit", note=QAT
)


@quantisation
@quiet_observers
def test_quantisation_aware_modules_stay_explicit_and_summary_says_why() -> None:
    model = proxprop.convert(quantisation_aware())
    assert type(model[3]) is qat.Linear
    rows = {row.name: row for row in proxprop.summary(model, torch.ones(2, 2, 4)).rows}
    assert rows["0"].status == "converted"
    for name in ("1", "3"):
        assert rows[name].status == "explicit"
        assert "quantisation-aware" in rows[name].reason
    model(torch.randn(2, 2, 4)).square().mean().backward()
    assert model[3].weight.grad is not None


@quantisation
@quiet_observers
def test_quantisation_aware_modules_are_refused_when_asked_for() -> None:
    with pytest.raises(ValueError, match=r"quantisation-aware"):
        proxprop.convert(quantisation_aware(), module_types=[qat.Linear], include_last=True)
