"""What must hold of every direction, whatever the layer, the solver and the space."""

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import proxprop
from cases import CROSSED_SOLVER_SPACES, LAYERS, LayerCase, by_name, oracle, randn, relative_error
from proxprop import CG, Exact
from proxprop.solvers import FEATURE, SAMPLE, Solver

SOME_LAYERS = [
    case for case in LAYERS if case.name in {"linear-few-samples", "linear-many-samples", "conv2d-groups"}
]


def directions(layer: nn.Module, input: Tensor, G: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    layer(input).backward(G.to(input.dtype))
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def converted(
    case: LayerCase, solver: Solver, space: str, dtype: torch.dtype = torch.float64, **settings
) -> nn.Module:
    settings = {"tau_theta": 0.7, **settings}
    return proxprop.convert(case.layer(), solver, space=space, include_last=True, **settings).to(dtype)


@pytest.mark.parametrize("case", SOME_LAYERS, **by_name)
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
@pytest.mark.parametrize(
    ("dtype", "exponents"), [(torch.float32, (-30, -8, 8, 30)), (torch.float64, (-200, 200))]
)
def test_scale_equivariant_in_G(case, solver, space, dtype, exponents) -> None:
    """D(sG) = s·D(G), far beyond where a square or an absolute epsilon would break it."""
    layer, input = converted(case, solver, space, dtype), case.input().to(dtype)
    G = randn(*layer(input).shape, seed=1).to(dtype)
    base = directions(layer, input, G)
    for exponent in exponents:
        scaled = directions(layer, input, G * 10.0**exponent)
        for name, value in base.items():
            tolerance = 2e-5 if dtype == torch.float32 else 1e-12
            assert relative_error(scaled[name].double() / 10.0**exponent, value.double()) < tolerance


@pytest.mark.parametrize("case", SOME_LAYERS, **by_name)
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
def test_dead_output_gets_an_exactly_zero_direction(case, solver, space) -> None:
    layer, input = converted(case, solver, space), case.input()
    G = randn(*layer(input).shape, seed=1)
    channel = -1 if isinstance(layer, nn.Linear) else 1
    G.select(channel, 1).zero_()
    for value in directions(layer, input, G).values():
        assert torch.equal(value[1], torch.zeros_like(value[1]))
        assert bool(value[0].abs().sum() > 0)


@pytest.mark.parametrize("case", SOME_LAYERS, **by_name)
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
def test_zero_gradient_gives_exactly_zero(case, solver, space) -> None:
    layer, input = converted(case, solver, space), case.input()
    for value in directions(layer, input, torch.zeros_like(layer(input))).values():
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("make", [lambda: nn.Linear(7, 4, bias=False), lambda: nn.Linear(3, 4, bias=False)])
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
@pytest.mark.parametrize("scale", [1e-25, 1e-4, 10.0])
def test_inputs_of_any_scale_give_the_oracles_direction_in_float32(make, solver, space, scale) -> None:
    """A so small that AᵀA underflows leaves the scaled gradient τ_θ·AᵀG, not zero and not NaN."""
    plain = make().double()
    input, G = randn(5, plain.in_features, seed=1) * scale, randn(5, 4, seed=2)
    layer = proxprop.convert(copy.deepcopy(plain), solver, 0.7, space=space, include_last=True).float()
    found = directions(layer, input.float(), G.float())
    expected = oracle(plain, input, G, solver, tau_theta=0.7)
    assert relative_error(found["weight"].double(), expected["weight"]) < 2e-3


@given(
    samples=st.integers(1, 12),
    features=st.integers(1, 12),
    k=st.integers(1, 10),
    per_output=st.booleans(),
    space=st.sampled_from([SAMPLE, FEATURE]),
    log_tau=st.floats(-4, 4),
    seed=st.integers(0, 2**31),
)
def test_direction_makes_an_acute_angle_with_the_gradient(
    samples, features, k, per_output, space, log_tau, seed
) -> None:
    layer = proxprop.nn.Linear(
        features, 3, solver=CG(k, per_output), tau_theta=10**log_tau, space=space, dtype=torch.float64
    )
    input, G = randn(samples, features, seed=seed), randn(samples, 3, seed=seed + 1)
    D = directions(layer, input, G)
    assert float((D["weight"] * (G.T @ input)).sum() + (D["bias"] * G.sum(0)).sum()) > 0


@pytest.mark.parametrize("solver", [Exact(), CG(1), CG(4), CG(4, per_output=False)], **by_name)
def test_gradient_scaling_tends_to_the_gradient_and_forgets_the_batch_size(solver) -> None:
    layer = proxprop.nn.Linear(4, 3, solver=solver, tau_theta=1e-9, scaling="gradient", dtype=torch.float64)
    input, G = randn(6, 4, seed=1), randn(6, 3, seed=2)
    assert relative_error(directions(layer, input, G)["weight"], G.T @ input) < 1e-7
    layer.tau_theta = 2.0
    once = directions(layer, input, G)
    twice = directions(layer, torch.cat([input, input]), torch.cat([G, G]) / 2)
    for name, value in once.items():
        assert relative_error(twice[name], value) < 1e-12


@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
def test_paper_and_gradient_scaling_differ_by_their_documented_factor(solver, space) -> None:
    input, G = randn(6, 4, seed=1), randn(6, 3, seed=2)
    settings = {"solver": solver, "space": space, "dtype": torch.float64}
    torch.manual_seed(0)
    paper = proxprop.nn.Linear(4, 3, tau_theta=0.5, **settings)
    like = proxprop.nn.Linear(4, 3, tau_theta=0.5 * 6, scaling="gradient", **settings)
    left, right = directions(paper, input, G), directions(like, input, G)
    for name in left:
        assert relative_error(right[name] * 0.5, left[name]) < 1e-12


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("solver", "space"), CROSSED_SOLVER_SPACES, **by_name)
@pytest.mark.parametrize("where", ["G", "input"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_non_finite_values_reach_the_gradient(value, solver, space, where, dtype) -> None:
    """A gradient scaler must see them; a factorisation that met infinities says so."""
    layer = proxprop.nn.Linear(4, 3, solver=solver, space=space, dtype=dtype)
    input, G = randn(6, 4, seed=1).to(dtype), randn(6, 3, seed=2).to(dtype)
    (G if where == "G" else input)[2, 1] = value
    fails = solver == Exact() and where == "input" and value == float("inf")
    with pytest.warns(RuntimeWarning, match="not positive definite") if fails else nullcontext():
        D = directions(layer, input, G)
    assert not bool(D["weight"].isfinite().all())
    if where == "G" and getattr(solver, "per_output", True):
        assert bool(D["weight"][0].isfinite().all()), "the other outputs are untouched, as with BackProp"
