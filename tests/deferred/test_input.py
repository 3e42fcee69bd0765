"""Bad input in deferred mode: refused as in immediate mode, or seen by the step."""

import copy

import pytest
import torch
from torch import nn

import proxprop
from deferred_claims import refused, works
from proxprop import CG, Exact, device
from proxprop.solvers import Solver
from quiet import quiet_layouts
from training import (
    assert_same,
    attached,
    directions,
    grads,
    images,
    loss_of,
    plain_model,
    small_model,
    sparse_inputs,
    told_of_failure,
)

MESSAGE = "the message says what is accepted"
FEW = pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)


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
    with told_of_failure(solver, value, forms_S=True):
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
