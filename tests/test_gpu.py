"""The tables of layers, solvers and spaces on a GPU, and layers that are large enough for its own ways to multiply."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from cases import LAYERS, SOLVER_SPACES, SOLVERS, LayerCase, by_name, oracle, randn, relative_error
from layers import CASES, Case, converted, fresh
from proxprop import CG, Exact, device
from proxprop.nn import TABLE
from proxprop.solvers import SPACES, Solver, eigenbasis
from proxprop.solvers.block_inverse import BlockInverse
from proxprop.solvers.cholesky import factorize_whole
from quiet import quiet_same_padding
from solvers.krylov import (
    FLOAT32,
    IMAGES,
    REGIMES,
    TF32,
    System,
    assert_descends,
    backward,
    check_patches,
    layer_for,
    system,
)
from solvers.krylov import assert_close as assert_near_the_best

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PRECISIONS = {"float64": 1e-9, "float32": 1e-3, "tf32": 1e-1}
"""And how close directions have to come, after as many iterations as there are unknowns."""

LARGE = {"float64": 1e-9, "float32": 1e-4, "tf32": 3e-2}
"""Where these are fewer."""

# torch's words where the first product on a GPU is one of a backward pass, which has a thread of its own
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context"
)


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """Float64, float32 and, where torch may round to it, TF32."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = request.param == "tf32"
    assert device.tf32_allowed() == (request.param == "tf32")
    yield request.param
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


def directions(
    plain: nn.Module,
    inputs: tuple[Tensor | None, ...],
    G: Tensor,
    solver: Solver,
    space: str | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """By name, of a layer's copy on the GPU."""
    layer = converted(plain, solver, tau_theta=0.7, space=space).to("cuda", dtype)
    there = [x if x is None else x.to("cuda", dtype if x.is_floating_point() else x.dtype) for x in inputs]
    layer(*there).backward(G.to("cuda", dtype))
    return {name: p.grad.double().cpu() for name, p in layer.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= tolerance, errors


@quiet_same_padding
@pytest.mark.parametrize("case", LAYERS, **by_name)
@pytest.mark.parametrize(("solver", "space"), SOLVER_SPACES, **by_name)
def test_direction_equals_dense_oracle(case: LayerCase, solver: Solver, space: str, precision: str) -> None:
    plain, input = case.layer(), case.input()
    G = randn(*plain(input).shape, seed=2)
    found = directions(plain, (input,), G, solver, space, dtype_of(precision))
    assert_close(found, oracle(plain, input, G, solver, 0.7), PRECISIONS[precision])


@pytest.mark.parametrize("case", CASES, **by_name)
@pytest.mark.parametrize("solver", SOLVERS, **by_name)
def test_direction_of_every_kind_equals_dense_oracle(case: Case, solver: Solver, precision: str) -> None:
    plain, inputs = fresh(case), case.inputs()
    G = randn(*copy.deepcopy(plain)(*inputs).shape, seed=4)
    expected = oracle(copy.deepcopy(plain), inputs, G, solver, 0.7, owners=case.owners)
    for space in (None, *(s for s in TABLE[type(plain)].spaces if s in solver.spaces)):
        found = directions(plain, inputs, G, solver, space, dtype_of(precision))
        assert_close(found, expected, PRECISIONS[precision])


@pytest.mark.parametrize("solver", [Exact(), CG(1), CG(3), CG(10)], ids=str)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3072, 1024), (500, 3072)),
        (lambda: nn.Linear(1000, 1000, bias=False), (500, 1000)),
        (lambda: nn.Linear(512, 256), (4096, 512)),
        (lambda: nn.Conv2d(3, 20, 5), (128, 3, 32, 32)),
        (lambda: nn.Conv2d(20, 30, 3, padding=1, stride=2), (128, 20, 14, 14)),
    ],
    ids=["wide", "no-bias", "narrow", "conv", "conv-stride"],
)
def test_large_layers_equal_themselves_in_float64(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    solver: Solver,
    precision: str,
) -> None:
    """Kernels and products in parts, against plain products on the CPU."""
    monkeypatch.setattr(eigenbasis, "pays", lambda M, iterations, outputs: False)
    torch.manual_seed(0)
    plain, input = make().double(), randn(*shape, seed=1)
    G = randn(*plain(input).shape, seed=2)
    layer = converted(plain, solver, tau_theta=0.7)
    layer(input).backward(G)
    expected = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    found = directions(plain, (input,), G, solver, None, dtype_of(precision))
    assert_close(found, expected, LARGE[precision])


@pytest.mark.parametrize("precision", ["float32", "tf32"], indirect=True)
@pytest.mark.parametrize("tau_theta", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("regime", REGIMES)
def test_rounding_costs_no_more_than_it_has_to(
    regime: str, space: str, tau_theta: float, precision: str
) -> None:
    """What a GPU can't solve again it has to warn of; even then a direction is finite and goes down."""
    of, products = system(regime, tau_theta), {"float32": FLOAT32, "tf32": TF32}[precision]
    for iterations in (1, 3, 10, 40):
        D, warned = direction_and_warning(of, CG(iterations), space)
        assert_descends(D, of, products, slack=4.0)
        if not warned:
            assert_near_the_best(D, of, iterations, products)


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
@pytest.mark.parametrize("space", ["sample", "feature"])
@pytest.mark.parametrize("regime", REGIMES)
def test_an_exact_direction_is_near_the_best_or_warned_of(regime: str, space: str, precision: str) -> None:
    of = system(regime, tau_theta=1.0)
    D, warned = direction_and_warning(of, Exact(), space)
    assert_descends(D, of, slack=4.0)
    if not warned:
        allowed = max(1e-2, 100 * of.amplification(FLOAT32))
        assert relative_error(D, of.exact) <= allowed


@pytest.mark.parametrize("precision", ["float32"], indirect=True)
@pytest.mark.parametrize("solver", [Exact(), CG(1)], ids=str)
@pytest.mark.parametrize("images", IMAGES)
def test_convolutions_in_sample_space_multiply_by_rotated_patches(
    solver: Solver, images: str, precision: str
) -> None:
    check_patches(solver, images, "cuda")


@pytest.mark.parametrize("precision", ["float32", "tf32"], indirect=True)
@pytest.mark.parametrize(("groups", "size"), [(1, 1500), (1, 3073), (3, 1400)])
def test_inverses_by_blocks_are_about_as_accurate_as_the_librarys(
    groups: int, size: int, precision: str
) -> None:
    """Also where products may be rounded to TF32: an inverse magnifies that. Tensor cores truncate sums a little."""
    A = torch.randn(groups, 2 * size, size, device="cuda") * torch.logspace(0, -2, size, device="cuda")
    with device.float32_products("ieee", A):
        M = A.mT @ A
    L = torch.linalg.cholesky(M + torch.eye(size, device="cuda"))
    exact = torch.linalg.inv(M.double() + torch.eye(size, device="cuda"))
    factorization = factorize_whole(M, 1.0)
    assert isinstance(factorization, BlockInverse)
    inverse, factor = factorization.inverse().double(), factorization.inverse_factor().double()
    bound = 10 * relative_error(torch.cholesky_inverse(L), exact)
    assert relative_error(inverse, exact) <= bound
    assert relative_error(factor.mT @ factor, exact) <= bound
    assert not factorization.failed.any()


def direction_and_warning(of: System, solver: Solver, space: str) -> tuple[Tensor, bool]:
    """On the GPU, which looks at a failure in the next call."""
    layer = layer_for(of, solver, space, of.G.shape[1], device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            D = backward(layer, of)
            torch.cuda.synchronize()
    failures = [str(w.message) for w in caught if w.category is RuntimeWarning]
    expected = "rounding of" if isinstance(solver, CG) else "not positive definite"
    assert all(expected in message for message in failures), failures
    return D, bool(failures)


def dtype_of(precision: str) -> torch.dtype:
    return torch.float64 if precision == "float64" else torch.float32
