"""The Triton kernels against their plain twins, on the CPU under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import relative_error
from proxprop import CG, device, tuning
from proxprop.backward import Task
from proxprop.deferred.operator import Form, Inverse
from proxprop.failures import FailureWarner
from proxprop.settings import Settings
from proxprop.solvers.cg import feature_cg, normalize, sample_cg
from proxprop.solvers.cholesky import factorize
from proxprop.solvers.exact import by_elimination, by_factor
from proxprop.solvers.matmul import (
    LEFT,
    LEFT_IN_TWO,
    RIGHT,
    RIGHT_IN_TWO,
    SMALLEST_FIRST,
    WALK,
    plain_parts,
)
from proxprop.transfer import LinearCall

pytest.importorskip("triton")
# numpy, which the interpreter runs on, warns of what the kernel masks out
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning"
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the subprocess below")


def test_kernel_under_the_interpreter() -> None:
    """The interpreter must be chosen before Triton is imported, so these tests run in a process of their own."""
    if INTERPRETED:
        pytest.skip("this is that process")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "34 passed, 4 skipped" in result.stdout, result.stdout


def problem(groups: int, samples: int, features: int, outputs: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, samples, features, generator=generator)
    K, G = A @ A.mT, torch.randn(groups, samples, outputs, generator=generator)
    return A, K, G, torch.finfo(torch.float32).eps * K.diagonal(dim1=-2, dim2=-1)


def plain(
    K: torch.Tensor, G: torch.Tensor, damping: float, iterations: int, noise: torch.Tensor
) -> torch.Tensor:
    return sample_cg(K, G, damping, iterations, (-2,), noise)


@inside
@settings(max_examples=25)
@given(
    groups=st.integers(1, 3),
    samples=st.integers(1, 20),
    features=st.integers(1, 24),
    outputs=st.integers(1, 9),
    iterations=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_kernel_equals_its_twin_and_the_float64_recurrence(
    groups, samples, features, outputs, iterations, seed
) -> None:
    from proxprop.kernels import sample_cg as fused

    A, K, G, noise = problem(groups, samples, features, outputs, seed)
    before = G.clone()
    U = fused.sample_cg(K, G, 0.7, iterations, parts=3)
    assert torch.equal(G, before), "G is not the kernel's to write to"
    precise = plain(K.double(), G.double(), 0.7, iterations, noise.double())
    assert relative_error(A.mT.double() @ U.double(), A.mT.double() @ precise) < 2e-4
    assert relative_error(A.mT @ U, A.mT @ plain(K, G, 0.7, iterations, noise)) < 2e-4


@inside
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_kernel_is_scale_equivariant_and_leaves_dead_columns_zero(scale: float) -> None:
    from proxprop.kernels import sample_cg as fused

    A, K, G, noise = problem(1, 6, 9, 4, seed=0)
    G[..., 1] = 0.0
    U = fused.sample_cg(K, G * scale, 1.0, 3, parts=3)
    assert bool((U[..., 1] == 0).all())
    assert (
        relative_error(
            A.mT.double() @ (U.double() / scale), A.mT.double() @ plain(K, G, 1.0, 3, noise).double()
        )
        < 1e-5
    )


@inside
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kernel_lets_non_finite_columns_through_and_keeps_the_others(value: float) -> None:
    from proxprop.kernels import sample_cg as fused

    _, K, G, _ = problem(1, 6, 9, 4, seed=0)
    G[0, 2, 1] = value
    U = fused.sample_cg(K, G, 1.0, 3, parts=3)
    assert not bool(U[..., 1].isfinite().all())
    assert bool(U[..., [0, 2, 3]].isfinite().all())


@inside
@pytest.mark.parametrize(("parts", "rounding"), [(1, 1e-3), (3, 1e-6)])
def test_outputs_in_blocks_are_solved_as_all_at_once(parts: int, rounding: float, monkeypatch) -> None:
    from proxprop.kernels import sample_cg as fused

    _, K, G, _ = problem(2, 6, 9, 11, seed=0)
    whole = fused.sample_cg(K, G, 0.7, 4, parts)
    monkeypatch.setattr(tuning, "SAMPLE_CG_MOST_BYTES", 2**13)
    with mock.patch.object(fused, "_solve", wraps=fused._solve) as solve:
        assert relative_error(fused.sample_cg(K, G, 0.7, 4, parts), whole) < rounding
    assert solve.call_count > 1


@inside
def test_kernel_survives_an_input_of_zeros() -> None:
    from proxprop.kernels import sample_cg as fused

    _, _, G, _ = problem(1, 6, 9, 4, seed=0)
    U = fused.sample_cg(torch.zeros(1, 6, 6), G, 0.5, 4, parts=3)
    assert relative_error(U, G / 0.5) < 1e-6


@inside
def test_one_part_is_as_accurate_as_tf32() -> None:
    from proxprop.kernels import sample_cg as fused

    A, K, G, noise = problem(1, 40, 60, 5, seed=0)
    precise = A.mT.double() @ plain(K.double(), G.double(), 0.7, 3, noise.double())
    errors = [
        relative_error(A.mT.double() @ fused.sample_cg(K, G, 0.7, 3, p).double(), precise) for p in (1, 3)
    ]
    assert errors[1] < 2e-6 < errors[0] < 2e-3


@inside
@pytest.mark.parametrize("more", [0, 10])
@pytest.mark.parametrize("order", [LEFT, RIGHT, LEFT_IN_TWO, RIGHT_IN_TWO, SMALLEST_FIRST, WALK])
def test_parts_equal_their_twin(order: tuple[int, ...], more: int) -> None:
    from proxprop.kernels import split_bf16

    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 36, 24)
    assert torch.equal(split_bf16.parts(x, order, 37 + more), plain_parts(x, order, 37 + more))
    for length in (30, 32):
        by_columns, rows = x.mT.contiguous().mT[:length], length + more
        found = split_bf16.parts(by_columns, order, rows)
        assert torch.equal(found, plain_parts(x[:length], order, rows))
        assert (found.stride(0) == 1) == (len(order) * rows % 8 == 0)


@inside
@settings(max_examples=25)
@given(
    groups=st.integers(1, 3),
    features=st.integers(1, 150),
    outputs=st.integers(1, 9),
    iterations=st.integers(1, 6),
    scale=st.sampled_from([1e-25, 1.0, 1e25]),
    whole=st.sampled_from([0, 1024]),
    width=st.sampled_from([1, 4, 2048]),
    seed=st.integers(0, 2**31),
)
def test_feature_kernels_equal_their_twin(
    groups, features, outputs, iterations, scale, whole, width, seed
) -> None:
    """Also where outputs are solved for in blocks, the last of which has fewer."""
    from proxprop.kernels import feature_cg as fused

    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, features + 5, features, generator=generator)
    S, B = A.mT @ A, torch.randn(groups, features, outputs, generator=generator)
    B[..., 0] = 0.0
    with mock.patch.multiple(
        tuning,
        FEATURE_CG_WHOLE_ROWS=whole,
        FEATURE_CG_ROWS=64,
        FEATURE_CG_MOST_NUMBERS=1,
        FEATURE_CG_LEAST_OUTPUTS=width,
    ):
        D = fused.feature_cg(S, B * scale, 0.7, iterations, parts=3)
    normal, size = normalize(B, (-2,))
    damped = (S + 0.7 * torch.eye(features)).matmul
    assert relative_error(D / scale, feature_cg(damped, normal, 0.7, iterations, (-2,)) * size) < 1e-4
    assert bool((D[..., 0] == 0).all())


@inside
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_feature_kernel_lets_non_finite_columns_through_and_keeps_the_others(value: float) -> None:
    from proxprop.kernels import feature_cg as fused

    B = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    B[0, 2, 1] = value
    D = fused.feature_cg(torch.eye(6)[None], B, 1.0, 3, parts=3)
    assert not bool(D[..., 1].isfinite().all())
    assert bool(D[..., [0, 2, 3]].isfinite().all())


@inside
@pytest.mark.parametrize(
    ("groups", "size", "outputs"), [(1, 1, 3), (2, 15, 3), (1, 16, 20), (2, 17, 20), (1, 40, 5)]
)
def test_elimination_equals_its_twin(groups: int, size: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(size)
    A = torch.randn(groups, size, size + 3, generator=generator)
    M, B = A @ A.mT, torch.randn(groups, size, outputs, generator=generator)
    found = by_elimination(M, 0.5, outputs)(B)
    exact = torch.linalg.solve(M.double() + 0.5 * torch.eye(size), B.double())
    assert relative_error(found.value.double(), exact) < 1e-4
    assert relative_error(found.value, by_factor(factorize(M.clone(), 0.5), outputs)(B).value) < 1e-4
    assert not bool(found.failed.any())


@inside
@pytest.mark.parametrize("entry", [-10.0, float("nan"), float("inf")])
def test_elimination_fails_like_its_twin(entry: float) -> None:
    M = torch.eye(20).repeat(2, 1, 1)
    M[1, 18, 18] = entry
    B = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0))
    found, twin = by_elimination(M, 1.0, 3)(B), by_factor(factorize(M.clone(), 1.0), 3)(B)
    assert torch.equal(found.failed, twin.failed)
    torch.testing.assert_close(found.value, twin.value, equal_nan=True)


@inside
def test_an_inverse_by_elimination_equals_its_twin() -> None:
    A = torch.randn(3, 20, 24, generator=torch.Generator().manual_seed(0))
    M = A @ A.mT
    M[1, 18, 18] = -100.0
    found, failed = Inverse.by_elimination(Form(M.clone(), 0.5, 1.5))
    twin, twin_failed = Inverse.of(Form(M.clone(), 0.5, 1.5))
    assert torch.equal(failed, twin_failed)
    assert failed.tolist() == [False, True, False]
    for one, other in zip(found.kept, twin.kept, strict=True):
        assert relative_error(one, other) < 1e-4


@pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")
def test_the_cpu_takes_the_plain_twins() -> None:
    assert not device.use_triton(torch.zeros(1, 4, 4))


@pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")
@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_bfloat16_layers_are_solved_in_fewer_parts(dtype: torch.dtype, parts: int) -> None:
    x, seen = torch.randn(5, 3, dtype=dtype), []

    class Looking(CG):
        def samples(self, K, G, damping):
            seen.append(device.fp16_terms())
            return super().samples(K, G, damping)

    settings = Settings(Looking(), space="sample")
    task = Task(LinearCall(), settings, "layer", FailureWarner(), None, inputs=1, parameters=2)
    G = torch.randn(5, 4, dtype=dtype)
    task.direction(LinearCall().transfer([x], G, [torch.Size([4, 3]), None]), G)
    assert seen == [parts]
    assert device.fp16_terms() == 3
