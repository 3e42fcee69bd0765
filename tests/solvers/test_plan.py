"""The plan picks the cheapest space by its own numbers, says so, and can be overridden."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import proxprop
from proxprop import CG, Exact, Solver
from proxprop.direction import planned
from proxprop.settings import Settings
from proxprop.solvers import FEATURE, MATRIX_FREE, SAMPLE, Sizes, choose_plan
from proxprop.transfer import LinearTransfer


@pytest.mark.parametrize(("sizes", "solver", "space"), [
    (Sizes(1, 500, 3073, 4000), CG(3), SAMPLE),
    (Sizes(1, 500, 3073, 4000), Exact(), SAMPLE),
    (Sizes(1, 512_000, 76, 16), CG(10), FEATURE),
    (Sizes(1, 512_000, 76, 16), Exact(), FEATURE),
    (Sizes(1, 4096, 4096, 64), CG(1), MATRIX_FREE),
])  # fmt: skip
def test_the_cheapest_space_is_chosen_for_typical_sizes(sizes, solver, space) -> None:
    assert choose_plan(sizes, solver).space == space


@given(sizes=st.builds(Sizes, *[st.integers(1, 5000)] * 4), k=st.integers(1, 20))
def test_no_space_is_cheaper_than_the_chosen_one(sizes, k) -> None:
    for solver in (CG(k), Exact()):
        chosen = choose_plan(sizes, solver)
        assert chosen.flops == min(cost.flops for cost in chosen.costs.values())


def test_flops_are_the_documented_ones() -> None:
    N, n, m, k = 500, 3073, 4000, 3
    costs = choose_plan(Sizes(1, N, n, m), CG(k)).costs
    assert costs[SAMPLE].flops == 2 * N**2 * n + 2 * k * N**2 * m
    assert costs[FEATURE].flops == 2 * N * n**2 + 2 * k * n**2 * m
    assert costs[MATRIX_FREE].flops == 4 * k * N * n * m


def test_a_plan_prints_its_reasons_and_can_be_pinned() -> None:
    sizes = Sizes(1, 10, 100, 5)
    assert str(choose_plan(sizes, CG(2))).startswith(
        "sample (fewest FLOPs; beyond BackProp: sample 0.733x, matrix_free"
    )
    pinned = choose_plan(sizes, CG(2), FEATURE)
    assert pinned.space == FEATURE
    assert str(pinned).startswith("feature (pinned; ")


def test_prices_change_the_choice_and_are_named() -> None:
    sizes = Sizes(1, 5000, 4001, 1000)
    assert choose_plan(sizes, CG(3)).space == MATRIX_FREE
    priced = choose_plan(sizes, CG(3), own_price=2.0)
    assert priced.space == FEATURE
    assert str(priced).startswith("feature (fewest FLOPs by their price on this device; ")
    assert priced.costs[MATRIX_FREE].flops == choose_plan(sizes, CG(3)).costs[MATRIX_FREE].flops
    assert choose_plan(sizes, CG(3), gram_flops=1e9, own_price=2.0).space == FEATURE
    assert choose_plan(sizes, CG(3), gram_flops=1e9, gram_price=1000.0, own_price=2.0).space == SAMPLE


@pytest.mark.parametrize(("dtype", "space"), [(torch.float32, MATRIX_FREE), (torch.bfloat16, FEATURE)])
def test_a_gpu_forms_S_of_bfloat16_inputs_rather_than_copy_them_to_float32(
    dtype: torch.dtype, space: str
) -> None:
    with FakeTensorMode():
        rows, output = (torch.empty(8192, size, dtype=dtype, device="cuda") for size in (3072, 768))
    transfer = LinearTransfer([rows], output, [torch.Size([768, 3072]), torch.Size([768])])
    assert planned(transfer, Settings(CG(1))).space == space


def model_and_input() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    )  # fmt: skip
    return model, torch.randn(5, 1, 4, 4)


def test_summary_shows_every_module_with_parameters() -> None:
    model, input = model_and_input()
    model[5].requires_grad_(False)
    proxprop.convert(model, CG(3), exclude=["4"])
    summary = proxprop.summary(model, input)
    assert [row.name for row in summary.rows] == ["0", "1", "4", "5", "6"]
    assert [row.status for row in summary.rows] == [
        "converted",
        "explicit",
        "explicit",
        "converted",
        "explicit",
    ]
    assert sum(row.parameters for row in summary.rows) == sum(p.numel() for p in model.parameters())
    reasons = [row.reason for row in summary.rows]
    assert reasons[0] == ""
    assert "BatchNorm2d is converted when asked for" in reasons[1]
    assert "left out of convert" in reasons[2]
    assert "frozen" in reasons[3]
    assert "the last layer" in reasons[4]
    sizes = summary.rows[0].plan.sizes
    assert sizes == Sizes(groups=1, samples=20, features=10, outputs=4)
    text = str(summary)
    assert text.splitlines()[0].split()[:3] == ["layer", "kind", "parameters"]
    assert "BackProp's for the converted layers" in text


def test_summary_matches_what_backward_does() -> None:
    model, input = model_and_input()
    proxprop.convert(model, Exact())
    planned = {row.name: row.plan for row in proxprop.summary(model, input).rows if row.plan}
    with proxprop.diagnostics.observe(model) as reports:
        model(input).sum().backward()
    assert {name: r[0].plan for name, r in reports.items()} == planned


def test_summary_leaves_the_model_and_the_random_state_alone() -> None:
    model, input = model_and_input()
    proxprop.convert(model)
    model[1].eval()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    proxprop.summary(model, input)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training
    assert not model[1].training
    assert all(not module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.head(self.used(left + right))


@pytest.mark.parametrize(
    "example", [(torch.ones(2, 3), torch.ones(2, 3)), {"left": torch.ones(2, 3), "right": torch.ones(2, 3)}]
)
def test_summary_takes_several_arguments_and_names_layers_that_were_not_reached(example) -> None:
    rows = proxprop.summary(proxprop.convert(TwoInputs()), example).rows
    assert [row.reason[:27] for row in rows] == [
        "",
        "the example did not reach i",
        "the last layer: explicit in",
    ]


def test_a_users_solver_need_not_be_hashable() -> None:
    class Mine(Exact):
        __hash__ = None

    directions = []
    for solver in (Exact(), Mine()):
        layer = proxprop.nn.Linear(4, 3, bias=False, solver=solver)
        layer(torch.eye(4)).sum().backward()
        directions.append(layer.weight.grad)
    assert torch.equal(*directions)


def test_a_solver_names_the_space_that_it_lacks() -> None:
    class Nowhere(Solver):
        spaces = ()

        def flops(self, sizes: Sizes, space: str) -> float:
            return 0.0

        def __repr__(self) -> str:
            return "Nowhere()"

    M, B = torch.eye(2)[None], torch.ones(1, 2, 1)
    for solve, space in ((Nowhere().samples, "in sample space"), (Nowhere().features, "in feature space")):
        with pytest.raises(NotImplementedError, match=rf"^Nowhere\(\) does not work {space}"):
            solve(M, B, 1.0)
    with pytest.raises(NotImplementedError, match=r"^Nowhere\(\) does not work matrix-free"):
        Nowhere().matrix_free(lambda V: V, B, 1.0)


def test_summary_of_a_plain_model_and_of_no_model() -> None:
    model, input = model_and_input()
    assert {row.status for row in proxprop.summary(model, input).rows} == {"explicit"}
    with pytest.raises(TypeError, match=r"summary should be given a torch.nn.Module but was given str"):
        proxprop.summary("model", input)
