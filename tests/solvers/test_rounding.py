"""Every space comes as close to the best point of a Krylov space as float32 allows, also where rounding matters."""

import warnings

import pytest
import torch

import proxprop
from proxprop import CG, Exact
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, SPACES
from solvers.krylov import (
    COLUMNS,
    IMAGES,
    REGIMES,
    System,
    assert_close,
    assert_descends,
    check_patches,
    direction,
    relative,
    system,
    system_of,
)

EVERY_SPACE = pytest.mark.parametrize("space", SPACES)
ITERATIONS = {1e-4: (1, 3, 40), 1.0: (1, 3, 10, 40), 1e4: (1, 3, 10, 40, 100)}
"""For each τ_θ: with a small one, CG is done after a step or two and has to stop."""


def check(of: System, space: str, iterations: int, outputs: int | None = None) -> None:
    D = direction(of, CG(iterations), space, outputs)
    assert_descends(D, of)
    assert_close(D, of, iterations)


@pytest.mark.parametrize("tau_theta", ITERATIONS)
@EVERY_SPACE
@pytest.mark.parametrize("regime", REGIMES)
def test_rounding_costs_no_more_than_it_has_to(regime: str, space: str, tau_theta: float) -> None:
    of = system(regime, tau_theta)
    for iterations in ITERATIONS[tau_theta]:
        check(of, space, iterations)
    check(of, space, iterations=10, outputs=1)


@pytest.mark.slow
@EVERY_SPACE
@pytest.mark.parametrize("sizes", [(48, 64), (120, 24), (24, 200), (200, 200)])
@pytest.mark.parametrize("regime", REGIMES)
def test_rounding_at_other_sizes(regime: str, sizes: tuple[int, int], space: str) -> None:
    for tau_theta in (1e-4, 1e-2, 1.0, 1e2, 1e4):
        for iterations in (1, 2, 3, 5, 10, 20, 40, 100):
            for outputs in (1, 32):
                check(system(regime, tau_theta, *sizes), space, iterations, outputs)


@pytest.mark.parametrize("iterations", [30, 50])
@EVERY_SPACE
def test_repeated_rows_with_more_iterations_than_they_have_directions(space: str, iterations: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64).repeat(4, 1)
    check(system_of(x, outputs=64), space, iterations)


@EVERY_SPACE
def test_a_mean_that_hides_the_differences(space: str) -> None:
    torch.manual_seed(0)
    x = 1 + 1e-3 * torch.randn(64, 256)
    check(system_of(x, outputs=256), space, iterations=10)


@EVERY_SPACE
def test_a_mean_that_hides_nearly_all_differences(space: str) -> None:
    torch.manual_seed(0)
    x = 1 + 1e-4 * torch.randn(64, 256)
    check(system_of(x, outputs=256), space, iterations=3)


@EVERY_SPACE
def test_a_mean_far_above_one(space: str) -> None:
    torch.manual_seed(0)
    check(system_of(torch.randn(64, 256) + 1000, outputs=256), space, iterations=3)


@EVERY_SPACE
def test_one_row_fifty_times(space: str) -> None:
    torch.manual_seed(0)
    check(system_of(torch.randn(1, 64).repeat(50, 1), outputs=64, tau_theta=1e4), space, iterations=20)


@pytest.mark.parametrize("space", [FEATURE, MATRIX_FREE])
def test_large_inputs_with_many_iterations(space: str) -> None:
    torch.manual_seed(0)
    check(system_of(1e6 * torch.randn(48, 64), outputs=32), space, iterations=40)


@EVERY_SPACE
def test_small_inputs(space: str) -> None:
    torch.manual_seed(0)
    for iterations in (1, 3, 10):
        check(system_of(1e-6 * torch.randn(48, 64), outputs=32, tau_theta=100.0), space, iterations)


def test_inputs_whose_squares_are_large_in_sample_space() -> None:
    torch.manual_seed(0)
    for iterations in (1, 3, 10):
        check(system_of(1e10 * torch.randn(48, 64), outputs=32), SAMPLE, iterations)


@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
def test_an_exact_direction_of_equal_rows(space: str) -> None:
    """In feature space rounding leaves a matrix that is singular, so a CPU solves again in float64."""
    torch.manual_seed(0)
    of = system_of(torch.full((50, 64), 3.0), outputs=32, tau_theta=1e4)
    D = direction(of, Exact(), space)
    assert_descends(D, of)
    assert relative(D, of.exact) < 1e-2


@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
@pytest.mark.parametrize("scale", [1e19, 1e25])
def test_an_exact_direction_of_inputs_whose_squares_overflow(space: str, scale: float) -> None:
    """A CPU solves again in float64."""
    torch.manual_seed(0)
    of = system_of(scale * torch.randn(6 if space == SAMPLE else 12, 8), outputs=4)
    A = of.A.double()
    exact = torch.linalg.solve(torch.eye(9) + A.T @ A, of.gradient) if space == FEATURE else of.exact
    assert relative(direction(of, Exact(), space), exact) < 1e-6


@EVERY_SPACE
@pytest.mark.parametrize("scale", [1e18, 1.8e18, 1e19, 1e25, 1e30])
def test_conjugate_gradients_for_inputs_whose_squares_overflow(space: str, scale: float) -> None:
    torch.manual_seed(0)
    of = system_of(scale * torch.randn(48, 64), outputs=32)
    for iterations in (1, 3, 10):
        D = direction(of, CG(iterations), space)
        assert bool(((D * of.gradient).sum(0) > 0).all())
        assert relative(D[:, :COLUMNS], of.best(iterations)) < 0.05


@pytest.mark.parametrize(
    ("solver", "space"),
    [*[(CG(k), s) for k in (1, 3) for s in SPACES], (Exact(), SAMPLE), (Exact(), FEATURE)],
    ids=str,
)
def test_what_overflows_in_float64_too_is_said_once(solver: proxprop.Solver, space: str) -> None:
    layer = proxprop.nn.Linear(8, 4, solver=solver, space=space, dtype=torch.float64)
    x = 1e160 * torch.randn(6, 8, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="inputs of very large"):
        layer(x).backward(torch.ones(6, 4, dtype=torch.float64))
    layer(x).backward(torch.ones(6, 4, dtype=torch.float64))


@pytest.mark.parametrize("space", [SAMPLE, FEATURE])
def test_inputs_whose_squares_overflow_for_so_many_outputs_that_an_eigenbasis_pays(space: str) -> None:
    torch.manual_seed(0)
    of = system_of(1e20 * torch.randn(1, 40).repeat(48, 1), outputs=130)
    assert relative(direction(of, CG(30), space), of.exact) < 1e-4


@EVERY_SPACE
@pytest.mark.parametrize(("scale", "tau_theta"), [(2e18, 2e3), (3e17, 3e3), (1.0, 1e39)])
def test_a_damping_that_is_nothing_beside_the_matrix(space: str, scale: float, tau_theta: float) -> None:
    torch.manual_seed(0)
    of = system_of(scale * torch.randn(48, 64), outputs=32, tau_theta=tau_theta)
    for iterations in (1, 3):
        D = direction(of, CG(iterations), space)
        assert relative(D[:, :COLUMNS], of.best(iterations)) < 0.05


@EVERY_SPACE
def test_a_column_that_is_rounding_alone_stays_finite(space: str) -> None:
    """Rows are equal and G sums to zero, so products with large inputs are noise that later steps magnify."""
    for seed in range(10):
        torch.manual_seed(seed)
        of = system_of(6e13 * torch.randn(1, 40).repeat(5, 1), outputs=3, tau_theta=200.0)
        of.G.sub_(of.G.mean(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert bool(direction(of, CG(5), space).isfinite().all())


@pytest.mark.parametrize("rows", [100, 1_000, 100_000])
@pytest.mark.parametrize("features", [2, 8])
def test_an_exact_direction_of_very_many_equal_rows(features: int, rows: int) -> None:
    """Equal rows round in the same direction, which a matrix that is summed from them does not show."""
    torch.manual_seed(0)
    for scale, tau_theta in [(1e6, 1.0), (1e2, 1e-2), (1.0, 1.0), (1e-2, 1e4)]:
        x = scale * torch.randn(1, features).expand(rows, features)
        of = system_of(x, outputs=4, tau_theta=tau_theta)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            D = direction(of, Exact(), FEATURE)
        assert caught or relative(D, of.exact) < 3


@pytest.mark.parametrize("solver", [Exact(), CG(1)], ids=str)
@pytest.mark.parametrize("images", IMAGES)
def test_convolutions_in_sample_space_multiply_by_rotated_patches(
    solver: proxprop.Solver, images: str
) -> None:
    check_patches(solver, images, "cpu")
