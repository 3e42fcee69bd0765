"""Deferred mode in models people really have: the step of an independent computation."""

import copy

import pytest

from captured import captured, convert, expected_direction
from cases import relative_error
from deferred_claims import works
from models import MODELS, ModelCase
from proxprop import CG, Exact
from proxprop.solvers import Solver
from training import attached

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
    assert calls
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
