"""A CPU that watches for rounding only where it can matter finds what it would have found by watching always."""

import gc

import pytest
import torch

import proxprop
from calls import torch_calls
from proxprop import CG
from proxprop.solvers import FEATURE, SAMPLE, SPACES
from proxprop.solvers.conjugate_gradients import ConjugateGradients
from proxprop.solvers.watching import Bounds, Watch
from solvers.krylov import FLOAT32, REGIMES, System, assert_descends, relative, system
from solvers.systems import problem

BOTH = pytest.mark.parametrize("space", [SAMPLE, FEATURE])


def solved(of: System, space: str, iterations: int, bounded: bool) -> tuple[torch.Tensor, bool]:
    """D, and whether a column was flagged; watched from the beginning unless W is bounded."""
    A, G = of.A[None], of.G[None]
    M, B = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    diagonal = M.diagonal(dim1=-2, dim2=-1)[..., None]
    most = float(diagonal.amax())
    found = ConjugateGradients(
        M.matmul, B, 1 / of.tau_theta, iterations, (-2,), diagonal if space == SAMPLE else None,
        bounds=Bounds(most, most * M.shape[-1]) if bounded else None,
    ).solve()  # fmt: skip
    value = A.mT @ found.solution if space == SAMPLE else found.solution
    return value[0].double(), found.lost is not None and bool(found.lost.any())


@BOTH
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("tau_theta", [1e-2, 1.0, 1e4])
def test_watching_later_changes_nothing_that_counts(regime: str, space: str, tau_theta: float) -> None:
    of = system(regime, tau_theta)
    for iterations in (1, 2, 3, 4, 10, 40):
        (always, lost_always), (later, lost_later) = (
            solved(of, space, iterations, bounded) for bounded in (False, True)
        )
        assert lost_always == lost_later
        if not lost_always:
            assert relative(later, always) <= max(of.allowed_error(iterations, 4, FLOAT32), 1e-6)


@BOTH
@pytest.mark.parametrize("iterations", [1, 2, 3, 10])
def test_a_calm_iteration_is_the_watched_one_to_rounding(space: str, iterations: int) -> None:
    of = system("relu", 1e-2)
    later, always = (solved(of, space, iterations, bounded)[0] for bounded in (True, False))
    assert_descends(later, of)
    assert relative(later, always) < 1e-4


@BOTH
def test_harmless_numbers_are_not_watched_and_others_are(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Watch] = []
    begin = Watch.__init__

    def noted(self: Watch, *args: object) -> None:
        begun.append(self)
        begin(self, *args)

    monkeypatch.setattr(Watch, "__init__", noted)
    solved(system("normal", 1e-2), space, 3, bounded=True)
    assert not begun
    solved(system("mean, spread 1e-03", 1.0), space, 3, bounded=True)
    assert len(begun) == 1


@BOTH
def test_an_output_without_a_gradient_does_not_disturb_the_calm(space: str) -> None:
    A, G = problem((1, 40, 50, 6), seed=0, dtype=torch.float32)
    M, B = (A @ A.mT, G) if space == SAMPLE else (A.mT @ A, A.mT @ G)
    solve = CG(3).samples if space == SAMPLE else CG(3).features
    all_alive = torch_calls(lambda: solve(M, B, 1.0))
    B = B.clone()
    B[..., 2] = 0.0
    assert torch_calls(lambda: solve(M, B, 1.0)) == all_alive
    assert not solve(M, B, 1.0).value[..., 2].any()


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rows", ["normal", "equal"])
def test_a_solve_keeps_no_arrays_until_the_garbage_collector_runs(space: str, rows: str) -> None:
    input = torch.randn(20, 32) if rows == "normal" else torch.ones(20, 32)
    gc.collect()
    gc.disable()
    try:
        proxprop.nn.Linear(32, 16, solver=CG(10), space=space)(input).sum().backward()
        assert not [kept for kept in gc.get_objects() if type(kept) in (ConjugateGradients, Watch)]
    finally:
        gc.enable()
