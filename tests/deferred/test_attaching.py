"""Attaching and detaching: what is decided for each layer, what is refused, and what becomes of copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact, Running
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Solution, Solver
from training import assert_same, directions, handle_of, images, loss_of, plain_model, small_model

works = pytest.mark.compatibility


def sgd(model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + sum(
        len(p._backward_hooks or ()) for p in model.parameters()
    )


@works("`detach` goes back to immediate mode", mode="deferred")
def test_detach_undoes_everything() -> None:
    model = small_model()
    expected = directions(copy.deepcopy(model), images())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = sgd(model)
    handle = proxprop.attach(optimizer, model)
    loss_of(model, images(seed=3)).backward()
    for _ in range(2):  # the second time there is nothing left to undo
        handle.detach()
    assert hooks_of(model, optimizer) == 0
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    found = directions(model, images())
    optimizer.step()
    assert_same({name: p.grad for name, p in model.named_parameters()}, found, tolerance=0.0)
    assert_same(found, expected)
    proxprop.attach(optimizer, model)


@pytest.mark.parametrize("running", [None, Running()], ids=["", "running"])
@pytest.mark.parametrize("detached", [True, False])
def test_nothing_outlives_a_model_that_is_dropped(detached: bool, running: Running | None) -> None:
    model = small_model()
    optimizer = sgd(model)
    handle = proxprop.attach(optimizer, model, running=running)
    loss_of(model, images()).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, images()).backward()  # and the step that it was for never comes
    if detached:
        handle.detach()
    gone = [weakref.ref(each) for each in (model, model[0].weight, optimizer, handle)]
    del model, optimizer, handle
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_attaching_twice_says_what_to_do() -> None:
    model = small_model()
    optimizer = sgd(model)
    proxprop.attach(optimizer, model)
    with pytest.raises(
        ValueError,
        match=r"0 is attached already: call \.detach\(\) on what attach returned first, or pass all opt",
    ):
        proxprop.attach(optimizer, model)
    with pytest.raises(ValueError, match=r"0 is attached already"):
        proxprop.attach(sgd(model), model)


def test_what_can_not_be_attached_says_why() -> None:
    model = small_model()
    with pytest.raises(
        ValueError, match=r"no proximal layer to attach: call proxprop\.convert\(model\) first"
    ):
        proxprop.attach(sgd(plain_model()), plain_model())
    with pytest.raises(ValueError, match=r"the optimizer holds no parameter of the model's proximal layers"):
        proxprop.attach(sgd(small_model()), model)
    with pytest.raises(TypeError, match=r"attach should be given an optimizer .* but was given Sequential"):
        proxprop.attach(model, sgd(model))
    with pytest.raises(TypeError, match=r"attach should be given an optimizer .* but was given list"):
        proxprop.attach([], model)
    with pytest.raises(TypeError, match=r"running should be a proxprop\.Running or None but is True"):
        proxprop.attach(sgd(model), model, running=True)
    with pytest.raises(ValueError, match=r"max_bytes should be a number of bytes but is -1"):
        proxprop.attach(sgd(model), model, max_bytes=-1)
    with pytest.raises(ValueError, match=r"fallback should be one of explicit, immediate but is 'never'"):
        proxprop.attach(sgd(model), model, fallback="never")
    assert all(layer._attached is None for layer in (model[0], model[3]))


def test_a_detached_handle_does_not_solve() -> None:
    model = small_model()
    handle = proxprop.attach(sgd(model), model)
    handle.detach()
    with pytest.raises(
        RuntimeError, match=r"the handle was detached: call proxprop\.attach\(optimizer, model\) again"
    ):
        handle.solve()


class LoRA(nn.Module):
    """A wrapper such as PEFT's: it freezes a layer and trains two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, input: Tensor) -> Tensor:
        return self.base_layer(input) + self.lora_B["default"](self.lora_A["default"](input))


def adapted(*wrapped: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    proxprop.convert(model, Exact())
    for index in wrapped:
        model[index] = LoRA(model[index])
    return model


PLAIN = r"0\.lora_A\.default, 0\.lora_B\.default.*: plain, and trained beside converted layers that are frozen.*proxprop\.convert"


def test_layers_that_were_added_after_convert_are_told() -> None:
    model = adapted(0)
    with pytest.warns(UserWarning, match=rf"^{PLAIN}\(model\) once more"):
        handle = proxprop.attach(sgd(model), model)
    handle.detach()
    proxprop.convert(model, Exact())
    assert list(proxprop.attach(sgd(model), model).choices) == [
        *("0.base_layer", "0.lora_A.default", "0.lora_B.default", "2"),
    ]


def test_an_optimizer_of_added_layers_alone_is_told_to_convert_them() -> None:
    model = adapted(0, 2)
    trained = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with pytest.raises(ValueError, match=rf"holds no parameter of the model's proximal layers: {PLAIN}"):
        proxprop.attach(trained, model)


def test_a_frozen_layer_beside_trained_ones_is_nothing_to_tell() -> None:
    model = adapted()
    model[0].requires_grad_(False)
    proxprop.attach(sgd(model), model).detach()
    model[2].requires_grad_(False)  # all that trains is the last layer, which stays explicit
    proxprop.attach(sgd(model), model)


def test_convert_and_revert_ask_to_detach_first() -> None:
    model = small_model()
    handle = proxprop.attach(sgd(model), model)
    for change in (proxprop.revert, proxprop.convert):
        with pytest.raises(
            ValueError,
            match=r"attached to an optimizer: call \.detach\(\) on what proxprop\.attach returned first",
        ):
            change(model)
    handle.detach()
    proxprop.revert(model)


@works(
    "`deepcopy`, pickle, `torch.save` and `torch.load` of the model",
    mode="deferred",
    note="the copy of an attached model is not attached",
)
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_an_attached_model_is_not_attached(clone) -> None:
    model = small_model()
    expected = directions(copy.deepcopy(model), images())
    optimizer = sgd(model)
    proxprop.attach(optimizer, model)
    loss_of(model, images()).backward()
    copied = clone(model)
    assert_same(directions(copied, images()), expected)
    assert copied.state_dict().keys() == model.state_dict().keys()
    optimizer.step()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, tolerance=1e-9)


@works("`state_dict` of the model and of the optimizer, also with `weights_only=True`", mode="deferred")
def test_state_dicts_are_those_of_the_plain_model_and_optimizer() -> None:
    model, plain = small_model(), plain_model()
    optimizer = torch.optim.Adam(model.parameters())
    keys = optimizer.state_dict().keys()
    proxprop.attach(optimizer, model, running=Running())
    directions(model, images())
    optimizer.step()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert optimizer.state_dict().keys() == keys


def test_settings_can_be_changed_while_attached() -> None:
    model = small_model()
    optimizer = sgd(model)
    proxprop.attach(optimizer, model)
    model[3].tau_theta, model[0].solver, model[0].scaling = 0.01, Exact(), "gradient"
    expected = directions(copy.deepcopy(model), images())
    directions(model, images())
    optimizer.step()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, tolerance=1e-9)


def test_a_change_that_breaks_a_sum_is_refused() -> None:
    model = small_model()
    proxprop.attach(sgd(model), model)
    loss_of(model, images()).backward()
    model[3].bias.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"^3: device, precision, scaling or which parameters are trained changed"
    ):
        loss_of(model, images())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_other_parameters_may_be_trained_after_a_step_that_was_given_up(set_to_none: bool) -> None:
    model = small_model(Exact())
    optimizer = sgd(model)
    proxprop.attach(optimizer, model)
    loss_of(model, images()).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    model[3].bias.requires_grad_(False)
    immediate = copy.deepcopy(model)
    for each in (immediate, model):
        loss_of(each, images()).backward()
    optimizer.step()
    for found, expected in zip(model.parameters(), immediate.parameters(), strict=True):
        assert not found.requires_grad or relative_error(found.grad, expected.grad) < 1e-9


def test_a_model_may_be_moved_to_another_precision_between_steps() -> None:
    model = small_model(Exact())
    optimizer = sgd(model)
    proxprop.attach(optimizer, model)
    directions(model, images())
    optimizer.step()
    optimizer.zero_grad()
    model.float()
    expected = directions(copy.deepcopy(model), images(dtype=torch.float32))
    directions(model, images(dtype=torch.float32))
    optimizer.step()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, tolerance=1e-4)


def wide(**options) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return proxprop.convert(model, Exact(), **options)


@works(
    "An S over the limit (vocabulary-sized layers)",
    mode="deferred",
    status="explicit",
    note="or solved inside each backward (`fallback`); a warning names the layer and the figure",
)
@pytest.mark.parametrize("fallback", ["explicit", "immediate"])
def test_an_s_over_the_limit_is_left_out_with_a_message(fallback: str) -> None:
    model = wide()
    optimizer = sgd(model)
    message = r"^0 (keeps BackProp's gradient|solves inside every backward): its S would take 13\.1 KiB, over the limit of 1\.95 KiB"
    with pytest.warns(UserWarning, match=message):
        handle = proxprop.attach(optimizer, model, max_bytes=2000, fallback=fallback)
    assert handle.choices["0"].mode == fallback
    assert handle.bytes == 7 * 7 * 8
    assert f"0: {fallback}, its S would take 13.1 KiB" in repr(handle)
    assert "2: deferred, S takes 392 B" in repr(handle)
    row = proxprop.summary(model, randn(5, 40, seed=1)).rows[0]
    assert row.status == ("explicit" if fallback == "explicit" else "converted")
    assert ("attached without an S" in row.reason) is (fallback == "explicit")
    input = randn(5, 40, seed=1)
    copied = copy.deepcopy(model)
    model(input).square().sum().backward()
    if fallback == "explicit":
        proxprop.revert(copied)
    copied(input).square().sum().backward()
    assert relative_error(model[0].weight.grad, copied[0].weight.grad) < 1e-12
    optimizer.step()
    assert relative_error(model[0].weight.grad, copied[0].weight.grad) < 1e-12


class SampleOnly(Solver):
    """Works in sample space alone."""

    spaces = (SAMPLE,)

    def flops(self, sizes, space: str) -> float:
        return 1.0

    def samples(self, K: Tensor, G: Tensor, damping: float) -> Solution:
        return Exact().samples(K, G, damping)


class Scaled(nn.Module):
    """Linear in its parameters, of a class proxprop does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@works(
    "nn.EmbeddingBag",
    section="Layers",
    mode="deferred",
    status="explicit",
    note="no Gram matrix to sum in deferred mode",
)
def test_layers_without_a_gram_matrix_are_named() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 3)).double()
    proxprop.convert(model, CG(1), module_types="all", include_last=True)
    with pytest.warns(
        UserWarning,
        match=r"^0 keeps BackProp's gradient: EmbeddingBag has no Gram matrix that could be summed",
    ):
        handle = proxprop.attach(sgd(model), model)
    assert [choice.mode for choice in handle.choices.values()] == ["explicit", "deferred"]
    model(torch.tensor([[0, 1]])).sum().backward()
    handle.solve()


@works(
    "Any class that is linear in its parameters (`module_types=[...]`)",
    section="Layers",
    mode="deferred",
    status="explicit",
    note="no Gram matrix to sum in deferred mode",
)
def test_matrix_free_layers_are_named() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(3, 3, dtype=torch.float64))
    proxprop.convert(model, CG(1), module_types=[Scaled, nn.Linear], include_last=True)
    with pytest.warns(UserWarning, match=r"^0 solves inside every backward: Scaled has no Gram matrix"):
        handle = proxprop.attach(sgd(model), model, fallback="immediate")
    assert handle.choices["0"].mode == "immediate"
    plain = copy.deepcopy(model)
    x = randn(4, 3, seed=1)
    for each in (model, plain):
        each(x).sum().backward()
    assert relative_error(model[0].weight.grad, plain[0].weight.grad) < 1e-12


def test_a_solver_that_needs_samples_is_named() -> None:
    model = proxprop.convert(plain_model(), SampleOnly())
    with pytest.warns(UserWarning, match=r"does not work in feature space"):
        handle = proxprop.attach(sgd(model), model)
    assert {choice.mode for choice in handle.choices.values()} == {"explicit"}


@works("Tied weights", mode="deferred")
def test_ties_that_have_no_common_step_are_refused() -> None:
    def tied(**options) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        return proxprop.convert(model, CG(1), **options)

    model = tied(module_types="all", include_last=True)
    with pytest.raises(ValueError, match=r"^0 and 2 share a parameter, but their parameters lie differently"):
        proxprop.attach(sgd(model), model)
    model = tied(module_types=[nn.Embedding])
    with pytest.raises(ValueError, match=r"^0 shares a parameter with 2, which is not deferred"):
        proxprop.attach(sgd(model), model)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].weight = model[0].weight
    proxprop.convert(model, CG(1))
    model[1].tau_theta = 5.0
    with pytest.raises(ValueError, match=r"^0 and 1 share a parameter, but the two have different settings"):
        proxprop.attach(sgd(model), model)


def test_names_are_those_of_the_users_model() -> None:
    model = small_model()
    compiled = torch.compile(model, backend="eager")
    handle = proxprop.attach(sgd(model), compiled, running=Running())
    assert list(handle.choices) == ["0", "3"]
    assert "0.S" in handle.state_dict()


def test_summary_shows_what_the_mode_in_force_costs() -> None:
    """Convolutions are solved matrix-free in immediate mode, and deferred mode forms their S."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2))
    model, example = proxprop.convert(model, CG(1)), torch.ones(2, 8, 8, 8)
    before = proxprop.summary(model, example)
    assert {row.plan.space for row in before.rows if row.plan} == {MATRIX_FREE}
    assert before.flops == before.immediate_flops < before.deferred_flops
    ratio = before.deferred_flops / sum(p.backprop_flops for row in before.rows for p in row.plans)
    assert (
        f"in deferred mode (attach) with S of 2 layers formed: {before.deferred_flops:.3g}, {ratio:.2f}x"
        in str(before)
    )
    handle = proxprop.attach(sgd(model), model)
    attached = proxprop.summary(model, example)
    assert {row.plan.space for row in attached.rows if row.plan} == {FEATURE}
    assert attached.flops == attached.deferred_flops == before.deferred_flops
    assert f"S of 2 layers formed; in immediate mode: {before.flops:.3g}" in str(attached)
    handle.detach()
    assert str(proxprop.summary(model, example)) == str(before)


def test_summary_of_running_averages_says_how_often_and_does_not_depend_on_the_step() -> None:
    model, example = small_model(), images()
    optimizer = sgd(model)
    proxprop.attach(optimizer, model, running=Running(update_every=2, invert_every=4))
    first = str(proxprop.summary(model, example))
    assert "running averages: S is formed in one step of 2, and solved with in one of 4" in first
    loss_of(model, example).backward()
    optimizer.step()
    assert str(proxprop.summary(model, example)) == first


def test_summary_counts_the_rows_that_a_wide_layer_keeps() -> None:
    model = proxprop.convert(nn.Sequential(nn.Linear(400, 8), nn.Linear(8, 2)), Exact())
    example = torch.ones(3, 400)
    proxprop.attach(sgd(model), model)
    row = proxprop.summary(model, example).rows[0]
    assert row.plan.space == SAMPLE
    assert row.immediate[0].flops < row.plan.flops < row.plan.costs[FEATURE].flops


def test_summary_shows_the_memory_of_s_before_a_run() -> None:
    model = small_model()
    summary = proxprop.summary(model, images())
    rows = {row.name: row for row in summary.rows}
    assert rows["0"].gram_bytes == 10 * 10 * 8
    assert rows["3"].gram_bytes == 49 * 49 * 8
    assert rows["5"].gram_bytes is None
    assert summary.gram_bytes == proxprop.attach(sgd(model), model).bytes
    assert "deferred mode (attach) holds S: 19.5 KiB; with running averages 39.1 KiB" in str(summary)
    assert proxprop.summary(model, images()).gram_bytes == summary.gram_bytes  # also of an attached model


def test_an_attached_model_is_summarised_without_summing() -> None:
    model = small_model()
    handle = proxprop.attach(sgd(model), model)
    proxprop.summary(model, images())
    assert all(system.S is None for system in handle.systems)


def test_observe_asks_to_detach_first() -> None:
    model = small_model()
    proxprop.attach(sgd(model), model)
    with (
        pytest.raises(
            ValueError,
            match=r"solves inside backward: call \.detach\(\) on what proxprop\.attach returned first",
        ),
        proxprop.diagnostics.observe(model),
    ):
        pass


@works("Nothing waits for the device", mode="deferred", note="a meta tensor has no number to wait for")
@pytest.mark.parametrize(
    "running",
    [
        None,
        Running(update_every=1, invert_every=2),
        Running(update_every=1, invert_every=2, damping=None),
        Running(update_every=1, invert_every=2, power=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_nothing_asks_for_a_number_on_the_host(running: Running | None, solver: Solver) -> None:
    model = small_model(solver, torch.float32).to("meta")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=False)
    proxprop.attach(optimizer, model, running=running)
    for step in range(4):
        for part in images(dtype=torch.float32).to("meta").split(2):
            model(part).square().mean().backward()
        if step != 1:  # one step is given up
            handle_of(model).solve()
        optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.is_meta for p in model.parameters())
