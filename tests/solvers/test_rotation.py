"""Rotated samples: another basis, the same direction, and digits that a mean would have cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import proxprop
from cases import LAYERS, LayerCase, assert_directions, by_name, oracle, randn, relative_error
from proxprop import CG, Exact, direction
from proxprop.solvers import SAMPLE, Solver
from proxprop.solvers.rotation import always_rotates, mean_dominates, rotate, rotate_both
from proxprop.transfer import LinearTransfer


@given(
    groups=st.integers(1, 3),
    samples=st.integers(2, 30),
    columns=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_a_rotation_is_orthogonal_and_its_own_inverse(groups, samples, columns, seed) -> None:
    X = randn(groups, samples, columns, seed=seed)
    before = X.clone()
    assert relative_error(rotate(rotate(X)), X) < 1e-13
    assert relative_error(rotate(X).mT @ rotate(X), X.mT @ X) < 1e-13
    assert torch.equal(X, before)


def test_the_mean_becomes_the_first_sample() -> None:
    X = randn(1, 9, 4, seed=0)
    assert relative_error(rotate(X)[:, 0], X.sum(1) / 3) < 1e-14
    ones = rotate(torch.ones(1, 9, 1, dtype=torch.float64)).flatten()
    assert torch.equal(ones, torch.tensor([3.0] + [0.0] * 8, dtype=torch.float64))


def test_both_sides() -> None:
    A = randn(2, 9, 4, seed=0)
    assert relative_error(rotate_both(A @ A.mT), rotate(A) @ rotate(A).mT) < 1e-13


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e6])
def test_differences_keep_their_digits_beside_a_large_mean(mean: float) -> None:
    X = torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(0)) + mean
    assert relative_error(rotate(X)[:, 1:].double(), rotate(X.double())[:, 1:]) < 1e-6


def test_rows_that_are_equal_become_zero_but_for_float64s_rounding() -> None:
    X = torch.randn(1, 1, 9, generator=torch.Generator().manual_seed(0)).repeat(1, 7, 1)
    assert float(rotate(X)[:, 1:].abs().max()) < 1e-15


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("case", LAYERS, **by_name)
@pytest.mark.parametrize("solver", [Exact(), CG(2), CG(3, per_output=False)], **by_name)
def test_the_direction_stays_what_it_is(monkeypatch, case: LayerCase, solver: Solver) -> None:
    rotated = []

    def always(samples: int, like: Tensor) -> bool:
        rotated.append(samples > 1)
        return samples > 1

    monkeypatch.setattr(direction, "always_rotates", always)
    plain, input = case.layer(), case.input()
    G = randn(*plain(input).shape, seed=2)
    layer = proxprop.convert(case.layer(), solver, 0.7, space=SAMPLE, include_last=True)
    layer(input).backward(G)
    assert_directions(layer, oracle(plain, input, G, solver, 0.7))
    assert rotated == [case.name not in {"linear-one-sample", "linear-unbatched"}]


def gram(A: Tensor) -> Tensor:
    return (A @ A.T)[None]


@pytest.mark.parametrize(
    ("A", "dominates"),
    [
        (torch.ones(5, 3), True),
        (1 + 0.1 * torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), True),
        (torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), False),
        (torch.eye(5), False),
        (torch.zeros(5, 3), False),
        (torch.ones(1, 3), False),  # a sample alone has no differences
        (torch.tensor([[1.0], [-1.0]]), False),
    ],
    ids=["ones", "near one", "normal", "unit vectors", "zeros", "one sample", "opposites"],
)
def test_a_mean_dominates_where_it_is_nearly_all_of_the_trace(A: Tensor, dominates: bool) -> None:
    assert mean_dominates(gram(A)) == dominates


def test_one_group_whose_mean_dominates_is_enough() -> None:
    assert mean_dominates(torch.cat([torch.eye(4)[None], torch.ones(1, 4, 4)]))


def test_a_cpu_looks_at_the_mean_and_others_do_not() -> None:
    assert not always_rotates(5, torch.empty(0))
    assert always_rotates(5, torch.empty(0, device="meta"))
    assert not always_rotates(1, torch.empty(0, device="meta"))


@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_rows_are_multiplied_as_they_are_and_rotated_after(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    X = (torch.randn(6, 9, generator=generator) + 2).bfloat16()
    U = torch.randn(1, 6, 4, generator=generator)
    shapes = [torch.Size([4, 9]), torch.Size([4]) if bias else None]
    coarse, fine = (LinearTransfer([x], U[0], shapes) for x in (X, X.double()))
    K = coarse.rotated_sample_gram()
    assert K.dtype == torch.float32
    assert relative_error(K.double(), fine.rotated_sample_gram()) < 1e-6
    for found, expected in zip(coarse.rotated_gradient(U), fine.rotated_gradient(U.double()), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or relative_error(found.double(), expected) < 1e-6
