"""The Triton kernel against its plain twin, on the CPU under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import relative_error
from proxprop.solve.cg import fused_kernel_takes, normalize, sample_cg

pytest.importorskip("triton")
# numpy, which the interpreter runs on, warns of what the kernel masks out
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
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
    assert "7 passed, 2 skipped" in result.stdout, result.stdout


def problem(groups: int, samples: int, features: int, outputs: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(groups, samples, features, generator=generator)
    K, G = A @ A.mT, torch.randn(groups, samples, outputs, generator=generator)
    return A, K, G, torch.finfo(torch.float32).eps * K.diagonal(dim1=-2, dim2=-1)


def plain(
    K: torch.Tensor, G: torch.Tensor, damping: float, iterations: int, noise: torch.Tensor
) -> torch.Tensor:
    scaled, scale = normalize(G, (-2,))
    return sample_cg(K, scaled, damping, iterations, (-2,), noise) * scale


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
    from proxprop.solve import fused

    A, K, G, noise = problem(groups, samples, features, outputs, seed)
    before = G.clone()
    U = fused.sample_cg(K, G, 0.7, iterations, noise)
    assert torch.equal(G, before), "G is not the kernel's to write to"
    precise = plain(K.double(), G.double(), 0.7, iterations, noise.double())
    assert relative_error(A.mT.double() @ U.double(), A.mT.double() @ precise) < 2e-4
    assert relative_error(A.mT @ U, A.mT @ plain(K, G, 0.7, iterations, noise)) < 2e-4


@inside
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_kernel_is_scale_equivariant_and_leaves_dead_columns_zero(scale: float) -> None:
    from proxprop.solve import fused

    A, K, G, noise = problem(1, 6, 9, 4, seed=0)
    G[..., 1] = 0.0
    U = fused.sample_cg(K, G * scale, 1.0, 3, noise)
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
    from proxprop.solve import fused

    _, K, G, noise = problem(1, 6, 9, 4, seed=0)
    G[0, 2, 1] = value
    U = fused.sample_cg(K, G, 1.0, 3, noise)
    assert not bool(U[..., 1].isfinite().all())
    assert bool(U[..., [0, 2, 3]].isfinite().all())


@inside
def test_kernel_survives_an_input_of_zeros() -> None:
    from proxprop.solve import fused

    _, _, G, noise = problem(1, 6, 9, 4, seed=0)
    U = fused.sample_cg(torch.zeros(1, 6, 6), G, 0.5, 4, noise * 0)
    assert relative_error(U, G / 0.5) < 1e-6


@pytest.mark.skipif(INTERPRETED, reason="says nothing about the interpreter")
def test_the_cpu_takes_the_plain_recurrence() -> None:
    assert not fused_kernel_takes(torch.zeros(1, 4, 4))
