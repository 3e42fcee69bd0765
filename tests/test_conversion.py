"""`convert` swaps classes and nothing else; `revert` undoes it; mistakes are told."""

import copy
import io
import logging
import pickle
import threading

import pytest
import torch
from torch import nn

import proxprop
from cases import randn, relative_error
from proxprop import CG, Exact
from proxprop.nn import ProximalLayer


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)),
        nn.Linear(8, 3),
    )


def proximal_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ProximalLayer)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(randn(6, 1, 4, 4, seed=1).to(next(model.parameters()).dtype)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_everything_about_the_model_survives() -> None:
    model = small_model().double().eval()
    model[0].weight.requires_grad_(False)
    calls = []
    model[5].register_forward_hook(lambda *_: calls.append("last"))
    model[0].register_forward_hook(lambda *_: calls.append("first"))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    assert proxprop.convert(model, CG(2), tau_theta=0.5) is model
    assert proximal_names(model) == ["0", "4.0", "4.2"]
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    assert not model[0].weight.requires_grad
    assert not any(module.training for module in model.modules())
    assert model[0].weight.dtype == torch.float64
    model(randn(2, 1, 4, 4, seed=1))
    assert calls == ["first", "last"]
    assert isinstance(model[0], nn.Conv2d)


def test_optimizer_made_before_conversion_goes_on() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step(model, optimizer)
    proxprop.convert(model, CG(3))
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.RMSprop(p, lr=1e-3),
])  # fmt: skip
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
def test_trains_under_torchs_optimizers(make, solver) -> None:
    model = proxprop.convert(small_model(), solver, tau_theta=1.0)
    optimizer = make(model.parameters())
    losses = [step(model, optimizer) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_converting_again_changes_the_settings() -> None:
    model = proxprop.convert(small_model(), CG(3))
    proxprop.convert(model, Exact(), tau_theta=0.1, scaling="gradient")
    assert proximal_names(model) == ["0", "4.0", "4.2"]
    assert {
        (model.get_submodule(n).solver, model.get_submodule(n).tau_theta) for n in proximal_names(model)
    } == {(Exact(), 0.1)}


def test_two_calls_give_layers_different_solvers() -> None:
    model = proxprop.convert(small_model(), CG(3), module_types=[nn.Conv2d])
    proxprop.convert(model, Exact(), module_types=[nn.Linear])
    assert [model.get_submodule(name).solver for name in proximal_names(model)] == [CG(3), Exact(), Exact()]


def test_the_last_layer_counts_even_when_its_kind_is_not_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(2, 2))
    assert proximal_names(proxprop.convert(model, module_types=[nn.Conv2d])) == ["0"]


@pytest.mark.parametrize(("exclude", "left"), [
    (["4.*"], ["0"]),
    (["4"], ["0"]),
    (["0"], ["4.0", "4.2"]),
    (["*.0"], ["0", "4.2"]),
    (["4.2.weight"], ["0", "4.0"]),
    (["1"], ["0", "4.0", "4.2"]),
    (["5.*"], ["0", "4.0", "4.2"]),
])  # fmt: skip
def test_exclude_patterns(exclude, left) -> None:
    assert proximal_names(proxprop.convert(small_model(), exclude=exclude)) == left


def test_include_last_and_a_single_layer() -> None:
    assert proximal_names(proxprop.convert(small_model(), include_last=True))[-1] == "5"
    layer = proxprop.convert(nn.Linear(2, 2), include_last=True)
    assert type(layer) is proxprop.nn.Linear


def test_revert_restores_plain_classes_and_gradients() -> None:
    model = small_model().double()
    plain = copy.deepcopy(model)
    proxprop.revert(proxprop.convert(model, Exact(), include_last=True))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert vars(model[0]).keys() == vars(plain[0]).keys()
    for each in (model, plain):
        step(each, torch.optim.SGD(each.parameters(), lr=0.0))
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_checkpoints_cross_between_plain_and_converted() -> None:
    plain, converted = small_model(), proxprop.convert(small_model(), CG(3))
    with torch.no_grad():
        plain[0].weight.mul_(2)
    converted.load_state_dict(plain.state_dict())
    plain.load_state_dict(converted.state_dict())
    assert torch.equal(plain[0].weight, converted[0].weight)


def test_copies_and_pickles_keep_settings_and_do_not_share_them() -> None:
    model = proxprop.convert(small_model(), Exact(), tau_theta=0.2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for clone in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert (clone[0].solver, clone[0].tau_theta) == (Exact(), 0.2)
        clone[0].tau_theta = 9.0
        assert model[0].tau_theta == 0.2


def test_two_models_do_not_meet() -> None:
    models = [
        proxprop.convert(small_model().double(), solver, tau)
        for solver, tau in [(CG(1), 0.1), (Exact(), 5.0)]
    ]
    alone = []
    for model in models:
        step(model, torch.optim.SGD(model.parameters(), lr=0.0))
        alone.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    loss = sum(model(randn(6, 1, 4, 4, seed=1)).square().mean() for model in models)
    loss.backward()
    for model, gradients in zip(models, alone, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_threads_running_backward_do_not_meet() -> None:
    model = proxprop.convert(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double(), CG(4))
    inputs = [randn(n + 1, 8, seed=n) for n in range(16)]

    def gradients(index: int) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(inputs[index]).square().sum(), list(model.parameters()))

    expected = [gradients(index) for index in range(16)]
    found: list[tuple[torch.Tensor, ...] | None] = [None] * 16

    def work(start: int) -> None:
        for index in range(start, 16, 4):
            for _ in range(5):
                found[index] = gradients(index)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for left, right in zip(expected, found, strict=True):
        assert all(relative_error(b, a) < 1e-12 for a, b in zip(left, right, strict=True))


class Doubled(nn.Linear):
    """A subclass with a forward of its own: converting it as a Linear would be wrong."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_subclasses_with_their_own_forward_are_not_taken_for_their_base() -> None:
    model = nn.Sequential(Doubled(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    assert proximal_names(proxprop.convert(model)) == ["1"]


def test_a_last_layer_that_can_not_be_converted_is_still_the_last() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Doubled(3, 2))
    assert proximal_names(proxprop.convert(model)) == ["0", "1"]
    attention = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))  # its out_proj is inside it
    assert proximal_names(proxprop.convert(attention)) == ["0"]


class Named(nn.Linear):
    """A subclass such as libraries of models write: it computes what its base does."""

    def __init__(self, inputs: int, outputs: int, *, label: str = "hidden") -> None:
        super().__init__(inputs, outputs)
        self.label = label

    def shout(self) -> str:
        return self.label.upper()


class Unfolded(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return 2 * super()._conv_forward(input, weight, bias)


def test_a_subclass_that_changes_no_call_is_converted_as_its_base() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Named(3, 4, label="first"), nn.Tanh(), Named(4, 2)).double()
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain.load_state_dict(model.state_dict())
    proxprop.convert(model, Exact())
    proxprop.convert(plain, Exact())
    assert proximal_names(model) == ["0"]
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.zero_grad()
        each(torch.ones(5, 3).double()).square().sum().backward()
        plain.zero_grad()
        plain(torch.ones(5, 3).double()).square().sum().backward()
        assert torch.equal(each[0].weight.grad, plain[0].weight.grad)
        assert isinstance(each[0], Named)
        assert isinstance(each[0], proxprop.nn.Linear)
        assert each[0].shout() == "FIRST"
    assert type(proxprop.revert(model)[0]) is Named
    assert proximal_names(proxprop.convert(model, module_types=[nn.Linear])) == ["0"]
    assert proximal_names(proxprop.convert(proxprop.revert(model), module_types=[Named])) == ["0"]


@pytest.mark.parametrize("make", [
    lambda: Unfolded(3, 3, 1),
    lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)),
    lambda: type("Overridden", (nn.Conv2d,), {"__call__": lambda self, x: x})(3, 3, 1),
])  # fmt: skip
def test_a_subclass_that_changes_a_call_is_left_alone(make) -> None:
    model = nn.Sequential(make(), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    assert proximal_names(proxprop.convert(model)) == ["1"]


class Transposed(nn.Module):
    """A linear layer that proxprop does not know."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, input):
        return input @ self.weight + self.bias


def test_unknown_layers_beside_the_last_one_are_named_with_what_to_do() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4), Transposed(4, 4), nn.LayerNorm(4), Transposed(4, 4), nn.Linear(4, 2)
    )
    message = (
        r"only linear or convolutional layer is its last layer, .*include_last=True; its other parameters are in "
        r"Embedding, LayerNorm, 2 Transposed\. .*module_types=\[\.\.\.\].*proxprop\.register"
    )
    with pytest.raises(ValueError, match=message):
        proxprop.convert(model)
    with pytest.raises(
        ValueError, match=r"nothing to convert: no linear .*in 2 Transposed\. .*proxprop\.register"
    ):
        proxprop.convert(nn.Sequential(Transposed(4, 4), Transposed(4, 4)))


def test_unregister_undoes_register() -> None:
    model = nn.Sequential(Transposed(4, 4), nn.Linear(4, 2))
    proxprop.register(Transposed, transposed=True)
    try:
        assert proximal_names(proxprop.convert(model)) == ["0"]
    finally:
        proxprop.unregister(Transposed)
    assert type(proxprop.revert(model)[0]) is Transposed
    with pytest.raises(ValueError, match=r"its other parameters are in Transposed"):
        proxprop.convert(model)
    for kind in (Transposed, nn.Linear):
        with pytest.raises(ValueError, match=rf"{kind.__name__} was not registered"):
            proxprop.unregister(kind)
    with pytest.raises(TypeError, match=r"unregister should be given a module class but was given 3"):
        proxprop.unregister(3)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, input):
        return self.inner(input)


def test_layers_inside_one_that_is_solved_as_a_whole_are_not_told_as_left(caplog) -> None:
    model = nn.Sequential(Around(), nn.Linear(3, 3))
    with caplog.at_level(logging.INFO, "proxprop"):
        proxprop.convert(model, module_types=[Around])
    (record,) = caplog.records
    assert record.getMessage() == "converted layers: 1; left explicit: 1 (the last layer)"


def test_convert_tells_the_log_what_was_left_and_why(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        *(nn.Linear(3, 3) for _ in range(4)), Doubled(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
    )
    model[1].forward = model[1].forward
    model[5].requires_grad_(False)
    with caplog.at_level(logging.INFO, "proxprop"):
        proxprop.convert(model, exclude=["2"])
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert told == [
        ("INFO", "converted layers: 3; left explicit: 2 (excluded), 6 (the last layer)"),
        ("WARNING", "convert left explicit: 1 (its forward was replaced on the instance), "
                    "4 (a subclass of Linear that may do more; see module_types and proxprop.register)"),
    ]  # fmt: skip
    caplog.clear()
    with caplog.at_level(logging.INFO, "proxprop"):
        proxprop.convert(
            nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(3, 3), nn.Linear(3, 3)), module_types=[nn.Linear]
        )
    (record,) = caplog.records
    assert record.getMessage() == "converted layers: 1; left explicit: 0 (no Linear), 2 (the last layer)"


def test_a_lazy_layer_beside_others_is_told(caplog: pytest.LogCaptureFixture) -> None:
    proxprop.convert(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3), nn.Linear(3, 2)))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "convert left explicit: 0 (the shape of its lazy layers is not known yet"
    )


def test_a_forward_replaced_on_the_instance_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].forward = lambda input: input
    assert proximal_names(proxprop.convert(model)) == ["1"]


def test_mistakes_are_told() -> None:
    with pytest.raises(TypeError, match=r"convert should be given a torch.nn.Module but was given list"):
        proxprop.convert([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"pattern 'hed\.\*' matches no module; there are: 0, 4\.0, 4\.2, 5"):
        proxprop.convert(small_model(), exclude=["hed.*"])
    with pytest.raises(
        TypeError, match=r"exclude should be a list of patterns but is one string: write \['head'\]"
    ):
        proxprop.convert(small_model(), exclude="head")
    with pytest.raises(
        ValueError,
        match=r"nothing to convert: no linear or convolutional layer; its parameters are in LSTM.*module_types=",
    ):
        proxprop.convert(nn.LSTM(2, 2))
    with pytest.raises(ValueError, match=r"parameters are in no module"):
        proxprop.convert(nn.ReLU())
    with pytest.raises(ValueError, match=r"its last layer, which stays explicit: pass include_last=True"):
        proxprop.convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"nothing is left to convert.*exclude names them"):
        proxprop.convert(small_model(), exclude=["*"])
    with pytest.raises(
        TypeError, match=r"module_types should hold module classes such as nn.Linear but holds 'Linear'"
    ):
        proxprop.convert(small_model(), module_types=["Linear"])


def test_a_refused_conversion_changes_nothing() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="tau_theta"):
        proxprop.convert(model, tau_theta=0)
    assert proximal_names(model) == []


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"solver": "cg3"}, TypeError, r"solver should be CG\(iterations\) or Exact\(\) but is 'cg3'"),
    ({"solver": CG}, TypeError, r"solver should be CG\(iterations\) or Exact\(\) but is <class"),
    ({"tau_theta": 0}, ValueError, r"tau_theta should be > 0 and finite but is 0"),
    ({"tau_theta": -1.0}, ValueError, r"tau_theta should be > 0 and finite but is -1.0"),
    ({"tau_theta": float("inf")}, ValueError, r"tau_theta should be > 0 and finite but is inf"),
    ({"tau_theta": float("nan")}, ValueError, r"tau_theta should be > 0 and finite but is nan"),
    ({"tau_theta": "1"}, TypeError, r"tau_theta should be a real number but is '1'"),
    ({"tau_theta": True}, TypeError, r"tau_theta should be a real number but is True"),
    ({"scaling": "mean"}, ValueError, r"scaling should be one of paper, gradient but is 'mean'"),
    ({"space": "primal"}, ValueError, r"space should be one of sample, feature, matrix_free or None \(choose\)"),
    ({"solver": Exact(), "space": "matrix_free"}, ValueError, r"Exact\(\) cannot solve this layer in space 'matrix_free'"),
])  # fmt: skip
def test_bad_settings_are_refused_everywhere(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        proxprop.convert(small_model(), **settings)
    with pytest.raises(error, match=message):
        proxprop.nn.Linear(2, 2, **settings)
    *first, (name, value) = settings.items()
    layer = proxprop.nn.Linear(2, 2, **dict(first))
    with pytest.raises(error, match=message):
        setattr(layer, name, value)


@pytest.mark.parametrize(("iterations", "error", "message"), [
    (0, ValueError, "iterations should be at least 1 but is 0"),
    (-3, ValueError, "iterations should be at least 1 but is -3"),
    (2.0, TypeError, r"iterations should be a whole number but is 2.0"),
    (True, TypeError, r"iterations should be a whole number but is True"),
])  # fmt: skip
def test_bad_iterations_are_refused(iterations, error, message) -> None:
    with pytest.raises(error, match=message):
        CG(iterations)


class Own(proxprop.nn.Linear):
    """Somebody's subclass of a proximal layer."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_subclasses_of_proximal_layers_are_their_authors() -> None:
    model = nn.Sequential(Own(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    input = torch.ones(2, 3)
    before = model(input)
    proxprop.convert(model, Exact())
    proxprop.revert(model)
    assert type(model[0]) is Own
    assert torch.equal(model(input), before)


def test_excluding_a_part_of_attention_excludes_it_whole() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.widen, self.head = (
                nn.MultiheadAttention(4, 2),
                nn.Linear(4, 4),
                nn.Linear(4, 1),
            )

    assert proximal_names(proxprop.convert(Attends(), exclude=["*.out_proj"])) == ["widen"]


def test_data_parallel_replicas_are_refused_and_empty_module_types_told() -> None:
    model = proxprop.convert(small_model())
    replica = model[0]._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"DataParallel's replicas.*DistributedDataParallel"):
        replica(torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"module_types is empty; it should be"):
        proxprop.convert(small_model(), module_types=[])


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.parametrizations.weight_norm,
        lambda layer: nn.utils.prune.random_unstructured(layer, "weight", amount=0.5),
    ],
)
def test_reparametrising_after_conversion_is_refused(change) -> None:
    import torch.nn.utils.prune

    model = proxprop.convert(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    change(model[0])
    with pytest.raises(
        RuntimeError, match=r"^0: its weight or bias is computed by a hook or a parametrization.*revert"
    ):
        model(torch.ones(2, 3))
