"""Compiled, the models people have keep eager's directions: with symbolic sizes or not, in bfloat16 or not."""

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import proxprop
from cases import randn
from compiling import converted, directions, in_one_graph, quiet_compiler
from models import MODELS, AttentionBlock, ModelCase
from proxprop import CG, Exact
from proxprop.solvers import Solver
from training import assert_same

slow = pytest.mark.slow
works = pytest.mark.compatibility
pytestmark = [pytest.mark.usefixtures("fresh_compiler"), *quiet_compiler]

FAST = {("U-Net", None, False), ("LSTM classifier", True, True)}
"""A model, `dynamic`, and whether under autocast: what is run without the rest of the cross."""

CROSS = [
    pytest.param(
        case, dynamic, autocast,
        id=f"{case.name}-dynamic={dynamic}-{'bf16' if autocast else 'float64'}",
        marks=[] if (case.name, dynamic, autocast) in FAST else slow,
    )
    for case in MODELS for dynamic in (None, True, False) for autocast in (False, True)
]  # fmt: skip


@works("`torch.compile` of every model of this page, `dynamic` or not, in bf16 or not")
@pytest.mark.parametrize(("case", "dynamic", "autocast"), CROSS)
def test_a_compiled_model_has_eagers_directions(
    case: ModelCase, dynamic: bool | None, autocast: bool
) -> None:
    model = converted(case, CG(3), dtype=torch.float32 if autocast else torch.float64)
    whole = in_one_graph(case, model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=whole)
    for batch in (3, 5, 6):
        expected = directions(case, model, model, batch, autocast)
        found = directions(case, model, compiled, batch, autocast)
        assert_same(found, expected, 1e-5 if autocast else 1e-10)


@works("`torch.compile` of every model of this page, `dynamic` or not, in bf16 or not")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
@slow
def test_a_residual_network_in_the_default_backend(solver: Solver, dtype: torch.dtype) -> None:
    case = MODELS[0]
    model = converted(case, solver, dtype=dtype, memory_format=torch.channels_last)
    compiled = torch.compile(model, fullgraph=True)
    expected, found = (directions(case, model, call, 8) for call in (model, compiled))
    assert_same(found, expected, 1e-9 if dtype == torch.float64 else 1e-2)


def blocks(solver: Solver | None) -> nn.Sequential:
    """Whose normalisations are converted too: these are traced, not solved by an operator."""
    torch.manual_seed(0)
    model = nn.Sequential(*(AttentionBlock(8, 2) for _ in range(4)), nn.Linear(8, 3)).double()
    return proxprop.convert(model, solver, module_types="all") if solver is not None else model


def graphs_of_blocks(solver: Solver | None) -> int:
    """How many graphs it takes to compile each block of a model by itself."""
    torch.compiler.reset()
    counters.clear()
    model = blocks(solver)
    for block in model[:-1]:
        block.compile(backend="aot_eager")
    model(randn(2, 3, 8, seed=1)).square().mean().backward()
    return counters["stats"]["unique_graphs"]


@works("`torch.compile` of each block by itself")
def test_layers_that_are_alike_share_a_graph() -> None:
    """As torch's own: one for the first block, whose input needs no gradient, one for all others."""
    assert graphs_of_blocks(CG(3)) == graphs_of_blocks(None) == 2


def test_models_that_are_alike_share_a_graph() -> None:
    counters.clear()
    for _ in range(3):
        model = torch.compile(blocks(CG(2)), backend="aot_eager", fullgraph=True)
        model(randn(2, 3, 8, seed=1)).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1


def graphs_of_batches(case: ModelCase, model: nn.Module, dynamic: bool | None) -> int:
    """How many graphs it takes to compile a model for batches of changing size."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    for batch in (3, 5, 6, 9, 4):
        directions(case, model, compiled, batch)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=slow)])
def test_a_batch_of_another_size_is_compiled_anew_no_more_often_than_for_plain_layers(
    dynamic: bool | None,
) -> None:
    case = next(case for case in MODELS if case.name == "MLP-Mixer")
    proximal, plain = converted(case, CG(3)), case.model()
    assert graphs_of_batches(case, proximal, dynamic) == graphs_of_batches(case, plain, dynamic) <= 2


def test_a_solve_is_one_operator() -> None:
    """However many iterations it takes."""
    found = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        found.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=look)
    model = proxprop.convert(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), CG(50))
    torch.compile(model, backend=backend)(torch.ones(3, 4)).sum().backward()
    (nodes,) = found
    assert sum(node.target is torch.ops.proxprop.direction.default for node in nodes) == 1
    assert len(nodes) < 20
