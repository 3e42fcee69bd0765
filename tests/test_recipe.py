"""`wrap`: convert and attach in one line, by the recipe, leaving the model as it was where that can't be done."""

import copy
import logging
from pathlib import Path

import pytest
import questions
import torch
from torch import Tensor, nn

import proxprop
from deferred_claims import works
from proxprop import CG, Exact, Running, recipe
from proxprop.lab.peers import analysis
from proxprop.lab.peers.questions import Carried, both, by_rate, carried
from proxprop.lab.peers.store import Store, read
from proxprop.lab.peers.tasks import TASKS
from proxprop.nn import ProximalLayer
from training import assert_same, images, loss_of, plain_model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 12) -> dict[str, Tensor]:
    for step in range(steps):
        loss_of(model, images(seed=step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ProximalLayer)]


@works("`wrap`: convert and attach in one line")
@pytest.mark.parametrize("running", [recipe.RUNNING, None], ids=str)
def test_it_is_convert_then_attach(running: Running | None) -> None:
    one, two = plain_model(), plain_model()
    first, second = adam(one), adam(two)
    handle = proxprop.wrap(first, one, running=running)
    proxprop.convert(two, Exact(), scaling="gradient")
    proxprop.attach(second, two, running=running)
    assert isinstance(handle, proxprop.Attached)
    assert_same(trained(one, [first]), trained(two, [second]), 0.0)


def test_the_recipe_changes_the_steps_and_nothing_else() -> None:
    plain, wrapped = plain_model(), plain_model()
    first, second = adam(plain), adam(wrapped)
    proxprop.wrap(second, wrapped)
    before = copy.deepcopy(wrapped.state_dict())
    assert_same(before, plain.state_dict(), 0.0)
    moved, expected = trained(wrapped, [second], 1), trained(plain, [first], 1)
    assert all(not torch.equal(moved[name], expected[name]) for name in ("0.weight", "3.weight"))
    assert all(torch.equal(moved[name], expected[name]) for name in ("5.weight", "5.bias"))


def test_keywords_go_to_convert_and_attach() -> None:
    model = plain_model()
    handle = proxprop.wrap(adam(model), model, exclude=["0"], include_last=True, solver=CG(2), running=None)
    assert converted(model) == ["3", "5"]
    assert repr(model[3]._settings.solver) == repr(CG(2))
    assert handle.averages is None
    handle.detach()
    with pytest.warns(UserWarning, match="3 keeps BackProp's gradient"):
        proxprop.wrap(adam(model), model, max_bytes=8000)


@pytest.mark.parametrize("made", ["convert", "layers"])
def test_converted_layers_keep_their_settings(made: str) -> None:
    model = plain_model()
    if made == "convert":
        proxprop.convert(model, CG(5), exclude=["0"])
    else:
        model[3] = proxprop.nn.Linear(48, 8, solver=CG(5), dtype=torch.float64)
    proxprop.wrap(adam(model), model)
    assert converted(model) == ["3"]
    assert repr(model[3]._settings.solver) == repr(CG(5))


def test_settings_for_a_converted_model_are_refused() -> None:
    model = proxprop.convert(plain_model())
    with pytest.raises(
        ValueError, match=r"converted already, so wrap can't set solver, exclude: call .*revert"
    ):
        proxprop.wrap(adam(model), model, solver=CG(2), exclude=["0"])
    assert converted(model) == ["0", "3"]


def test_wrapping_twice_is_refused_and_harmless() -> None:
    model = plain_model()
    optimizer = adam(model)
    proxprop.wrap(optimizer, model)
    with pytest.raises(ValueError, match=r"0 is attached already: call \.detach\(\)"):
        proxprop.wrap(optimizer, model)
    other = plain_model()
    alone = adam(other)
    proxprop.wrap(alone, other)
    assert_same(trained(model, [optimizer]), trained(other, [alone]), 0.0)


@works("`wrap`: convert and attach in one line")
def test_an_optimizer_that_took_steps_goes_on_with_its_state() -> None:
    model = plain_model()
    optimizer = adam(model)
    trained(model, [optimizer], 3)
    momentum = optimizer.state[model[3].weight]["exp_avg"]
    before = momentum.clone()
    proxprop.wrap(optimizer, model)
    assert torch.equal(momentum, before)
    trained(model, [optimizer], 1)
    assert int(optimizer.state[model[3].weight]["step"]) == 4
    assert optimizer.state[model[3].weight]["exp_avg"] is momentum


@works("`wrap`: convert and attach in one line")
def test_several_optimizers() -> None:
    one, two = plain_model(), plain_model()
    halves = [torch.optim.SGD(one[:3].parameters(), lr=0.1), torch.optim.SGD(one[3:].parameters(), lr=0.1)]
    whole = torch.optim.SGD(two.parameters(), lr=0.1)
    proxprop.wrap(halves, one)
    proxprop.wrap(whole, two)
    assert_same(trained(one, halves), trained(two, [whole]), 1e-12)


class Wrapper:
    """As optimizers are wrapped that are no torch optimizers themselves."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base


class Uninitialised(torch.optim.Optimizer):
    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def test_a_wrapped_optimizer_is_found() -> None:
    model = plain_model()
    optimizer = adam(model)
    assert proxprop.wrap(Wrapper(optimizer), model).optimizers == [optimizer]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (lambda model: "adam", TypeError, "given an optimizer or a list of optimizers.* but was given str"),
        (lambda model: [], TypeError, "given an optimizer or a list of optimizers.* but was given list"),
        (lambda model: Wrapper(None), TypeError, "but was given Wrapper"),
        (
            lambda model: Uninitialised([*model.parameters()]),
            TypeError,
            "Uninitialised never called Optimizer",
        ),
        (lambda model: adam(nn.Linear(2, 2)), ValueError, "the optimizer holds no parameter of the model's"),
    ],
)
def test_optimizers_that_cannot_be_attached_leave_the_model_as_it_was(given, kind, message) -> None:
    model = plain_model()
    with pytest.raises(kind, match=message):
        proxprop.wrap(given(model), model)
    assert converted(model) == []
    assert [type(module) for module in model] == [type(module) for module in plain_model()]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(4, 2)),
            "only linear or convolutional layer is its last layer.*include_last",
        ),
        (nn.LSTM(4, 2), "the model has nothing to convert.*its parameters are in LSTM"),
    ],
    ids=["last", "recurrent"],
)
def test_nothing_to_convert(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proxprop.wrap(adam(model), model)


def test_arguments_in_the_wrong_order_and_unknown_settings() -> None:
    model = plain_model()
    with pytest.raises(TypeError, match=r"wrap should be given a torch.nn.Module but was given AdamW"):
        proxprop.wrap(model, adam(model))
    with pytest.raises(TypeError, match=r"running should be a proxprop.Running or None but is True"):
        proxprop.wrap(adam(model), model, running=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dampening'"):
        proxprop.wrap(adam(model), model, dampening=0.1)
    assert converted(model) == []


def test_soap_is_told_that_s_may_hurt(caplog: pytest.LogCaptureFixture) -> None:
    class SOAP(torch.optim.AdamW):
        """A stand-in by its name."""

    with caplog.at_level(logging.WARNING, "proxprop"):
        proxprop.wrap(adam(plain := plain_model()), plain)
        assert caplog.messages == []
        proxprop.wrap(SOAP((model := plain_model()).parameters()), model)
    (message,) = caplog.messages
    assert "under SOAP a running √S made one of twelve small tasks better and three worse" in message
    assert "compare with SOAP alone" in message


PEERS = Store(Path(__file__).parents[1] / "results" / "peers")
FOUND = analysis.cells(PEERS.all(TASKS), PEERS.targets(), PEERS.times())


def outcomes(method: str, other: str) -> dict[str, list[str]]:
    """In which tasks a method's last score wins, ties and loses."""
    found: dict[str, list[str]] = {"wins": [], "ties": [], "loses": []}
    for task in analysis.tasks_of(FOUND):
        found[analysis.verdict(FOUND[task, method].score, FOUND[task, other].score)].append(task)
    return found


@pytest.mark.parametrize(
    ("optimizer", "better", "worse"),
    [
        ("sgd", 5, ["poisson-small"]),
        ("adamw", 6, ["image-small"]),
        ("muon", 3, ["image-small"]),
        ("soap", 1, ["autoencoder-small", "image-small", "gpt-small"]),
    ],
)
def test_what_the_recipe_says_of_the_root_is_in_the_records(
    optimizer: str, better: int, worse: list[str]
) -> None:
    found = outcomes(f"root+{optimizer}", optimizer)
    assert len(found["wins"]) == better
    assert sorted(found["loses"]) == sorted(worse)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_s_itself_made_as_many_tasks_worse_as_better(optimizer: str) -> None:
    found = outcomes(f"running+{optimizer}", optimizer)
    assert len(found["loses"]) >= len(found["wins"])


@pytest.mark.parametrize(("optimizer", "better", "worse"), [("adamw", 3, 1), ("muon", 5, 0)])
def test_what_the_recipe_does_at_the_optimizers_own_rate(optimizer: str, better: int, worse: int) -> None:
    tasks = carried_over(f"seldom+{optimizer}")
    assert len(tasks) == 7
    assert (sum(max(one.kept) < 1 for one in tasks), sum(min(one.kept) > 1 for one in tasks)) == (
        better,
        worse,
    )
    plain = carried_over(f"running+{optimizer}")
    assert sum(min(one.kept) > 1 for one in plain) >= worse


def carried_over(direction: str) -> list[Carried]:
    """What becomes of an optimizer's best rate, in every task."""
    rows, base = read(PEERS.folder.parent / "questions" / "rates.csv"), direction.partition("+")[2]
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        without, having = both(by_rate(of_task, base), by_rate(of_task, direction))
        if without:
            found.append(carried(task, base, direction.partition("+")[0], without, having))
    return found


def test_the_recipe_is_what_was_asked_which_learning_rate_it_keeps() -> None:
    method, (damping,) = questions.METHODS_OF_RATES["seldom+adamw"], {questions.DAMPING}
    asked = Running(damping=damping, power=method.power, invert_every=method.invert_every)
    assert asked == recipe.RUNNING
