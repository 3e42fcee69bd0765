"""Bad input is told apart: an error that says what was expected, what came and what is accepted, or torch's own."""

import copy
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import proxprop
from layers import Scale
from proxprop import CG, Exact
from quiet import quiet_layouts
from training import images, loss_of, small_model, sparse_inputs, told_of_failure

SOLVERS = pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)


def row(feature: str, status: str = "works", note: str = "") -> pytest.MarkDecorator:
    return pytest.mark.compatibility(feature, section="Input", status=status, note=note)


def generic() -> nn.Module:
    return proxprop.convert(Scale(), CG(2), module_types=[Scale], include_last=True)


@row("Shapes that do not fit", "refused", "torch's own message")
@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Linear(4, 3), (2, 5)),
    (lambda: nn.Linear(4, 3), ()),
    (lambda: nn.Conv1d(2, 3, 3), (1, 3, 8)),
    (lambda: nn.Conv2d(2, 3, 3), (1, 3, 5, 5)),
    (lambda: nn.Conv2d(2, 3, 3), (5, 5)),
    (lambda: nn.Conv2d(2, 3, 3), (1, 2, 2, 2)),
    (lambda: nn.Conv3d(2, 3, 3), (1, 3, 5, 5, 5)),
    (lambda: nn.ConvTranspose2d(2, 3, 3), (1, 3, 5, 5)),
    (lambda: nn.LayerNorm(4), (2, 5)),
    (lambda: nn.GroupNorm(1, 4), (2, 5)),
    (lambda: nn.BatchNorm2d(4), (2, 5, 3, 3)),
])  # fmt: skip
def test_shapes_that_do_not_fit(make, shape) -> None:
    assert_message_is_torchs(make, torch.ones(shape))


@row("Integer inputs to a layer that takes none", "refused", "torch's own message")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Linear(4, 3), (2, 4)),
    (lambda: nn.Conv2d(2, 3, 3), (1, 2, 5, 5)),
    (lambda: nn.ConvTranspose2d(2, 3, 3), (1, 2, 5, 5)),
])  # fmt: skip
def test_integer_inputs(make, shape, dtype: torch.dtype) -> None:
    assert_message_is_torchs(make, torch.ones(shape, dtype=dtype))


@row("Inputs of another precision than the layer's", "refused", "torch's own message; autocast casts them")
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(2, 3, 3)])
def test_inputs_of_another_precision(make) -> None:
    assert_message_is_torchs(make, torch.ones(2, 4, dtype=torch.float64))


@row("Inputs that are no tensor", "refused", "torch's own message")
@pytest.mark.parametrize("make", [lambda: proxprop.nn.Linear(4, 3), lambda: proxprop.nn.Conv1d(2, 3, 3)])
def test_inputs_that_are_no_tensor(make) -> None:
    with pytest.raises(
        TypeError, match=r"must be Tensor, not list|invalid combination of arguments - got \(list"
    ):
        make()([1.0, 2.0, 3.0, 4.0])


def assert_message_is_torchs(make: Callable[[], nn.Module], input: Tensor) -> None:
    plain = make()
    layer = proxprop.convert(copy.deepcopy(plain), module_types="all", include_last=True)
    messages = []
    for each in (plain, layer):
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)) as caught:
            each(input)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


COMPLEX = r"weight should be real \(float16, bfloat16, float32 or float64\) but is complex64.*exclude"
no_complex = row("Complex parameters", "refused", "leave such layers out with `exclude`")


@no_complex
@pytest.mark.parametrize("make", [
    lambda: nn.Linear(4, 3, dtype=torch.complex64),
    lambda: nn.Conv2d(2, 3, 3, dtype=torch.complex64),
])  # fmt: skip
def test_complex_parameters_are_refused_by_convert(make) -> None:
    model = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=rf"^0: {COMPLEX}"):
        proxprop.convert(model)
    assert not any(isinstance(module, proxprop.nn.ProximalLayer) for module in model)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")  # torch's own, of `.to`
@no_complex
def test_complex_parameters_are_refused_by_constructors_and_calls() -> None:
    with pytest.raises(TypeError, match=COMPLEX):
        proxprop.nn.Linear(4, 3, dtype=torch.complex64)
    layer = proxprop.nn.Linear(4, 3).to(torch.complex64)
    with pytest.raises(TypeError, match=COMPLEX):
        layer(torch.ones(2, 4, dtype=torch.complex64))


@row("Complex inputs", "refused", "their imaginary part would be lost; leave such layers out with `exclude`")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_inputs_are_refused(dtype: torch.dtype) -> None:
    layer = generic()
    with pytest.raises(
        TypeError, match=r"^Scale: input and output should be real but are complex; .*exclude"
    ):
        layer(torch.ones(2, 4, dtype=dtype))
    with torch.no_grad():
        assert layer(torch.ones(2, 4, dtype=dtype)).is_complex()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, dtype=torch.complex64)

    def forward(self, input):
        return self.inner(input.to(torch.complex64)).real


@no_complex
def test_complex_parameters_of_inner_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^Inside: inner\.weight should be real"):
        proxprop.convert(Inside(), CG(1), module_types=[Inside], include_last=True)


@no_complex
def test_a_model_with_an_excluded_complex_layer_converts() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4), nn.Linear(4, 2))
    assert isinstance(proxprop.convert(model, exclude=["0"])[1], proxprop.nn.Linear)
    assert type(model[0]) is nn.Linear


SPARSE = "`input.to_dense()`, or leave the layer out with `exclude`; under `no_grad` they work as torch's"


@pytest.mark.parametrize("layout", [
    pytest.param("torch.sparse_coo", marks=[row("Sparse inputs", "refused", SPARSE), *quiet_layouts]),
    pytest.param("torch.sparse_csr", marks=[row("Sparse inputs", "refused", SPARSE), *quiet_layouts]),
    pytest.param("torch.jagged", marks=[row("Nested inputs", "refused", SPARSE), *quiet_layouts]),
])  # fmt: skip
@SOLVERS
def test_sparse_and_nested_inputs(layout: str, solver) -> None:
    layer, input = proxprop.nn.Linear(4, 3, solver=solver), sparse_inputs()[layout]
    with pytest.raises(TypeError, match=rf"input should be dense but is {layout}.*to_dense\(\).*exclude"):
        layer(input)
    plain = proxprop.revert(copy.deepcopy(layer))
    with torch.no_grad():
        found, expected = layer(input), plain(input)
    if found.is_nested:
        found, expected = found.values(), expected.values()
    assert torch.equal(found, expected)


@row("Empty batches", note="direction 0, as BackProp's gradient")
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
@pytest.mark.parametrize(("make", "shape"), [
    (lambda: nn.Linear(4, 3), (0, 4)),
    (lambda: nn.Linear(4, 3), (2, 0, 4)),
    (lambda: nn.Conv1d(2, 3, 3), (0, 2, 8)),
    (lambda: nn.Conv2d(2, 4, 3, groups=2), (0, 2, 5, 5)),
    (lambda: nn.ConvTranspose2d(2, 3, 3), (0, 2, 5, 5)),
    (lambda: nn.LayerNorm(4), (0, 4)),
])  # fmt: skip
@SOLVERS
def test_empty_batches(make, shape, solver, scaling: str) -> None:
    layer = proxprop.convert(make(), solver, scaling=scaling, module_types="all", include_last=True)
    layer(torch.ones(shape)).sum().backward()
    for parameter in layer.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@row("Empty batches")
def test_an_empty_first_batch_of_a_generic_layer() -> None:
    layer = generic()
    layer(torch.ones(0, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(4))
    layer(torch.ones(2, 4)).sum().backward()
    assert bool((layer.weight.grad > 0).all())


NAN = (
    "the direction is NaN too, so that a gradient scaler skips the step; parameters and settings stay usable"
)


@row("NaN and infinite inputs", note=NAN)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@SOLVERS
def test_non_finite_inputs_reach_the_direction_and_do_no_lasting_harm(solver, value: float) -> None:
    model = small_model(solver)
    bad = images()
    bad[1, 0, 2, 2] = value
    with told_of_failure(solver, value):
        loss_of(model, bad).backward()
    assert not bool(model[0].weight.grad.isfinite().all())
    model.zero_grad()
    loss_of(model, images()).backward()
    expected = small_model(solver)
    loss_of(expected, images()).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@row("NaN and infinite inputs", note=NAN)
def test_a_first_batch_with_nan_in_a_generic_layer() -> None:
    layer = generic()
    layer(torch.full((2, 4), torch.nan)).sum().backward()
    assert bool(layer.weight.grad.isnan().all())
    layer.zero_grad()
    layer(torch.ones(2, 4)).sum().backward()
    assert bool(layer.weight.grad.isfinite().all())


@row(
    "`tau_theta` that is not positive, not finite or no number",
    "refused",
    "the message says what is accepted",
)
@pytest.mark.parametrize(("tau_theta", "error", "message"), [
    (0, ValueError, "tau_theta should be > 0 and finite but is 0"),
    (-1.0, ValueError, "tau_theta should be > 0 and finite but is -1.0"),
    (float("inf"), ValueError, "tau_theta should be > 0 and finite but is inf"),
    (float("nan"), ValueError, "tau_theta should be > 0 and finite but is nan"),
    (1e-40, ValueError, "tau_theta should be at least 1e-30, .* but is 1e-40"),
    ("1", TypeError, "tau_theta should be a real number but is '1'"),
    (None, TypeError, "tau_theta should be a real number but is None"),
    (True, TypeError, "tau_theta should be a real number but is True"),
    (1 + 0j, TypeError, r"tau_theta should be a real number but is \(1\+0j\)"),
    (np.complex64(1), TypeError, r"tau_theta should be a real number but is np\.complex64"),
    (np.True_, TypeError, r"tau_theta should be a real number but is np\.True_"),
])  # fmt: skip
def test_bad_tau_theta(tau_theta, error, message: str) -> None:
    for attempt in (
        lambda: proxprop.convert(nn.Linear(2, 2), tau_theta=tau_theta, include_last=True),
        lambda: proxprop.nn.Conv2d(1, 1, 1, tau_theta=tau_theta),
        lambda: setattr(proxprop.nn.Linear(2, 2), "tau_theta", tau_theta),
    ):
        with pytest.raises(error, match=message):
            attempt()


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64, np.int64, Fraction, int], ids=str)
def test_any_real_number_is_a_tau_theta(number) -> None:
    layer = proxprop.convert(nn.Linear(2, 2), tau_theta=number(2), include_last=True)
    assert type(layer.tau_theta) is float
    assert layer.tau_theta == 2.0


@row("`CG(0)` and other counts that are none", "refused", "the message says what is accepted")
@pytest.mark.parametrize(("iterations", "error", "message"), [
    (0, ValueError, "iterations should be at least 1 but is 0"),
    (-1, ValueError, "iterations should be at least 1 but is -1"),
    (1.5, TypeError, "iterations should be a whole number but is 1.5"),
    ("3", TypeError, "iterations should be a whole number but is '3'"),
    (None, TypeError, "iterations should be a whole number but is None"),
])  # fmt: skip
def test_bad_iterations(iterations, error, message: str) -> None:
    with pytest.raises(error, match=message):
        CG(iterations)


@row("Patterns that match nothing", "refused", "the message lists the layers there are")
@pytest.mark.parametrize("pattern", ["hed.*", "6", "*.wieght"])
def test_unknown_patterns(pattern: str) -> None:
    model = proxprop.revert(small_model())
    with pytest.raises(ValueError, match=r"exclude pattern '.*' matches no module; there are: 0, 3, 5$"):
        proxprop.convert(model, exclude=["0", pattern])
    assert type(model[3]) is nn.Linear


@row("Patterns and module types of the wrong type", "refused", "the message says what is accepted")
@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"exclude": "head"}, TypeError, r"exclude should be a list of patterns but is one string: write \['head'\]"),
    ({"exclude": [3]}, TypeError, r"exclude.*pattern.*but.*3"),
    ({"exclude": 3}, TypeError, r"exclude should be a list of patterns but is 3"),
    ({"module_types": "linear"}, ValueError, r"module_types should be .*'linear'"),
    ({"module_types": ["Linear"]}, TypeError, r"module_types should hold module classes such as nn.Linear but holds 'Linear'"),
    ({"module_types": nn.Linear}, TypeError, r"module_types should .*list.*Linear"),
    ({"module_types": []}, ValueError, r"module_types"),
])  # fmt: skip
def test_patterns_and_module_types_of_the_wrong_type(arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        proxprop.convert(proxprop.revert(small_model()), **arguments)
