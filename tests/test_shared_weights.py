"""One parameter, several calls: in immediate mode each call solves its own system, and the directions add up.

With `Sᵢ = AᵢᵀAᵢ` and `Bᵢ = AᵢᵀGᵢ` of call i, `S = ΣSᵢ`, `M = λI + S`, immediate mode gives `ΣDᵢ`,
`Dᵢ = (λI + Sᵢ)⁻¹Bᵢ`, where the summed system has `M⁻¹ΣBᵢ`. The two differ by exactly

    ΣDᵢ − M⁻¹ΣBᵢ = M⁻¹ Σᵢ (S − Sᵢ)Dᵢ

because `(λI + Sᵢ)⁻¹ − M⁻¹ = M⁻¹(S − Sᵢ)(λI + Sᵢ)⁻¹`. As `0 ⪯ S − Sᵢ ⪯ S`, the difference is at most
`σ/(λ + σ)·Σᵢ‖Dᵢ‖` in the norm of M, with σ the largest eigenvalue of S: it vanishes with τ_θ, and for calls
whose inputs are orthogonal.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import assert_directions, oracle, randn, relative_error
from proxprop import CG, Exact
from training import images, loss_of, small_model

NOTE = (
    "every call solves its own system and the directions add up; with c equal calls the sum is 1 to c times as long "
    "as the summed system's direction along each eigenvector; in general it is off by `(λI + S)⁻¹Σᵢ(S − Sᵢ)Dᵢ`, at most "
    "`σ/(λ + σ)·Σᵢ‖Dᵢ‖` in the norm of `λI + S`, σ the largest eigenvalue of S; calls of unlike scale that disagree can "
    "make it point uphill"
)
repeated = pytest.mark.compatibility("Layer called several times in a pass", status="approximate", note=NOTE)
tied = pytest.mark.compatibility(
    "Tied weights", status="approximate", note="as for a layer called several times"
)
accumulated = pytest.mark.compatibility(
    "Gradient accumulation", status="approximate", note="as for a layer called several times"
)


def system(input: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """S and B of one call of a linear layer without bias."""
    return input.T @ input, input.T @ G


def immediate(calls: list[tuple[Tensor, Tensor]], tau_theta: float) -> Tensor:
    """What the library leaves in `.grad` after all calls, as `[features, outputs]`."""
    (input, G), *_ = calls
    layer = proxprop.nn.Linear(
        input.shape[1],
        G.shape[1],
        bias=False,
        solver=Exact(),
        tau_theta=tau_theta,
        dtype=torch.float64,
    )
    sum((layer(input) * G).sum() for input, G in calls).backward()
    return layer.weight.grad.T


def some_calls(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (randn(3 + i, 5, seed=seed + i) * (1 + i), randn(3 + i, 2, seed=seed + 50 + i)) for i in range(count)
    ]


@repeated
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("tau_theta", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_difference_to_the_summed_system_is_as_stated(count: int, tau_theta: float, seed: int) -> None:
    calls = some_calls(count, seed)
    found = immediate(calls, tau_theta)
    eye = torch.eye(5, dtype=torch.float64)
    systems = [system(*call) for call in calls]
    S, B = sum(S for S, _ in systems), sum(B for _, B in systems)
    M = eye / tau_theta + S
    parts = [torch.linalg.solve(eye / tau_theta + S_i, B_i) for S_i, B_i in systems]
    difference = found - torch.linalg.solve(M, B)
    stated = torch.linalg.solve(M, sum((S - S_i) @ D for (S_i, _), D in zip(systems, parts, strict=True)))
    assert relative_error(difference, stated) < 1e-8

    def size(D: Tensor) -> float:
        return float((D * (M @ D)).sum().sqrt())

    largest = float(torch.linalg.eigvalsh(S)[-1])
    bound = largest / (1 / tau_theta + largest) * sum(map(size, parts))
    assert size(difference) <= bound * (1 + 1e-9)


@repeated
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("tau_theta", [1e-3, 1.0, 100.0])
def test_equal_calls_are_one_to_count_times_as_long_along_each_eigenvector(
    count: int, tau_theta: float
) -> None:
    input, G = some_calls(1, seed=7)[0]
    S, B = system(input, G)
    eigenvalues, Q = torch.linalg.eigh(S)
    found = Q.T @ immediate([(input, G)] * count, tau_theta)
    summed = Q.T @ torch.linalg.solve(torch.eye(5) / tau_theta + count * S, count * B)
    reached = eigenvalues > 1e-9 * eigenvalues[-1]
    ratio = (found / summed)[reached]
    assert bool((ratio > 1 - 1e-6).all())
    assert bool((ratio < count * (1 + 1e-6)).all())
    exact = (1 + tau_theta * count * eigenvalues) / (1 + tau_theta * eigenvalues)
    assert relative_error(ratio, exact[reached, None].expand_as(ratio)) < 1e-6


@repeated
def test_calls_with_orthogonal_inputs_give_the_summed_systems_direction() -> None:
    first, second = randn(3, 6, seed=1), randn(4, 6, seed=2)
    first[:, 3:], second[:, :3] = 0, 0
    G_first, G_second = randn(3, 2, seed=3), randn(4, 2, seed=4)
    together = torch.cat([first, second]), torch.cat([G_first, G_second])
    expected = immediate([together], tau_theta=2.0)
    assert relative_error(immediate([(first, G_first), (second, G_second)], tau_theta=2.0), expected) < 1e-12


@repeated
def test_calls_that_disagree_can_make_the_sum_point_uphill() -> None:
    """Why the note warns: a steep call is damped more than a flat one, and the flat one wins."""
    steep = torch.tensor([[10.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    flat = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[-5.0]], dtype=torch.float64)
    gradient = sum(system(*call)[1] for call in (steep, flat))
    direction = immediate([steep, flat], tau_theta=1.0)
    assert float(gradient) == 5.0
    assert float(direction) == pytest.approx(10 / 101 - 5 / 2)


@repeated
@pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)
def test_a_recurrent_cell_sums_the_directions_of_its_steps(solver) -> None:
    """Each step's output is the next one's input, so the calls lie behind one another in the graph."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, include_last=True)
    seen, gradients = [], []

    def run(cell: nn.Module, record: bool) -> Tensor:
        state = randn(3, 4, seed=1)
        for _ in range(3):
            output = cell(state)
            if record:
                seen.append(state.detach())
                output.register_hook(gradients.append)
            state = output.tanh()
        return state.square().sum()

    run(plain, record=True).backward()
    run(layer, record=False).backward()
    plain.zero_grad()
    parts = [oracle(plain, x, G, solver, 1.0) for x, G in zip(seen, reversed(gradients), strict=True)]
    assert_directions(layer, {name: sum(part[name] for part in parts) for name in parts[0]})


@tied
def test_tied_weights_sum_the_directions_of_their_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[2].weight = model[0].weight
    keys = list(model.state_dict())
    plain = copy.deepcopy(model)
    proxprop.convert(model, CG(2), tau_theta=0.5)
    assert model[2].weight is model[0].weight
    assert list(model.state_dict()) == keys
    input = randn(6, 4, seed=1)
    model(input).sum().backward()
    hidden = plain[0](input)
    outputs = [hidden, plain[2](hidden.tanh())]
    G = torch.autograd.grad(plain[3](outputs[1]).sum(), outputs)
    first = oracle(plain[0], input, G[0], CG(2), 0.5)
    second = oracle(plain[2], hidden.tanh().detach(), G[1], CG(2), 0.5)
    assert relative_error(model[0].weight.grad, first["weight"] + second["weight"]) < 1e-9
    assert relative_error(model[0].bias.grad, first["bias"]) < 1e-9
    assert relative_error(model[2].bias.grad, second["bias"]) < 1e-9


@accumulated
def test_accumulation_sums_the_directions_of_the_micro_batches() -> None:
    model, micro_batches = small_model(), [images(3, seed=5), images(4, seed=6)]
    separate = []
    for input in micro_batches:
        model.zero_grad()
        loss_of(model, input).backward()
        separate.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for input in micro_batches:
        loss_of(model, input).backward()
    for parameter, *parts in zip(model.parameters(), *separate, strict=True):
        assert relative_error(parameter.grad, sum(parts)) < 1e-12
