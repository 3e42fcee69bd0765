"""Compiled steps on a GPU have eager's directions: the models people have, bfloat16 and channels-last, CUDA graphs."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import proxprop
from cases import relative_error
from compiling import converted, directions, in_one_graph, quiet_compiler
from models import MODELS, ModelCase, ResNet18
from proxprop import CG, Exact
from proxprop.lab.models import convnet, mlp
from proxprop.solvers import Solver
from training import assert_same

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    *quiet_compiler,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication"),
    pytest.mark.filterwarnings("ignore:.*Online softmax is disabled on the fly"),
]


def largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_compiled_model_has_eagers_directions(case: ModelCase) -> None:
    """Whose own kernels an operator calls, in batches of changing size."""
    if "transformers" in case.name:
        pytest.importorskip("transformers")
    model = converted(case, CG(3), device="cuda", dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=in_one_graph(case, model))
    for batch in (4, 7):
        expected, found = (directions(case, model, call, batch) for call in (model, compiled))
        assert_same(found, expected, 1e-2)


def vision(solver: Solver | None) -> nn.Module:
    torch.manual_seed(0)
    model = ResNet18(16)
    if solver is not None:
        proxprop.convert(model, solver)
    return model.to("cuda", memory_format=torch.channels_last)


def difference(model: nn.Module, backend: str) -> float:
    """The largest relative difference of what a compiled and an eager step under autocast leave in `.grad`."""
    case = next(case for case in MODELS if case.make is ResNet18)
    counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected, *found = (
        directions(case, model, call, 32, autocast=True) for call in (model, compiled, compiled)
    )
    assert counters["stats"]["unique_graphs"] == 1
    assert all(bool(value.isfinite().all()) for value in found[-1].values())
    return largest(found[-1], expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("solver", [CG(1), CG(3), Exact()], ids=str)
def test_bfloat16_and_channels_last(solver: Solver, backend: str) -> None:
    """Rounding to bfloat16 in other places moves BackProp's gradient too, and directions hardly more."""
    assert difference(vision(solver), backend) <= 3 * difference(vision(None), backend) + 1e-2


@pytest.mark.parametrize("solver", [CG(3), Exact()], ids=str)
@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: mlp([200] * 8 + [10]), (64, 200)), (lambda: convnet((3, 16, 16), 10), (32, 3, 16, 16))],
    ids=["mlp", "convnet"],
)
def test_in_cuda_graphs(make, shape: tuple[int, ...], solver: Solver) -> None:
    """Of `mode="reduce-overhead"`: run, warmed up, captured, replayed.

    Of layers with the same shapes there are so many that an eager step would replay their solves.
    """
    torch.manual_seed(0)
    model = proxprop.convert(make(), solver).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        x, found = torch.randn(*shape, device="cuda"), []
        for call in (compiled, model):
            model.zero_grad()
            call(x).square().mean().backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert_same(*found, 1e-2)


def test_a_step_in_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(0)
        model, x = (
            proxprop.convert(mlp([512, 600, 400, 10]), CG(3)).cuda(),
            torch.randn(128, 512, device="cuda"),
        )
        compiled, found = torch.compile(model, fullgraph=True), []
        for call in (compiled, model):
            model.zero_grad()
            call(x).square().mean().backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert_same(*found, 2e-2)
    finally:
        torch.set_float32_matmul_precision(before)
