"""Every layer kind beyond linear layers and convolutions, against the same dense oracle."""

import copy
import pickle

import pytest
import torch
from torch import nn

import proxprop
from cases import CROSSED_SOLVERS, assert_directions, by_name, oracle, randn
from layers import CASES, INDEX, Calls, Case, converted, fresh
from proxprop import CG, Exact
from proxprop.nn import TABLE, ProximalLayer
from proxprop.solvers import Sizes, Solver, choose_plan


def compatibility(case: Case):
    return pytest.param(
        case, marks=pytest.mark.compatibility(f"nn.{case.kind}", section="Layers"), id=case.name
    )


@pytest.mark.parametrize("case", [compatibility(case) for case in CASES])
@pytest.mark.parametrize("solver", CROSSED_SOLVERS, **by_name)
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
def test_direction_equals_dense_oracle_in_every_space(case: Case, solver: Solver, scaling: str) -> None:
    plain, inputs = fresh(case), case.inputs()
    G = randn(*copy.deepcopy(plain)(*inputs).shape, seed=4)
    expected = oracle(copy.deepcopy(plain), inputs, G, solver, 0.7, scaling, case.owners)
    for space in (None, *(s for s in TABLE[type(plain)].spaces if s in solver.spaces)):
        layer = converted(plain, solver, tau_theta=0.7, scaling=scaling, space=space)
        layer(*inputs).backward(G)
        assert_directions(layer, expected)


@pytest.mark.parametrize("case", CASES, **by_name)
def test_forward_input_gradient_and_buffers_are_torchs(case: Case) -> None:
    plain = fresh(case)
    layer = converted(plain, CG(2))
    results = []
    for module in (plain, layer):
        inputs = [
            t.clone().requires_grad_() if t is not None and t.is_floating_point() else t
            for t in case.inputs()
        ]
        output = module(*inputs)
        output.backward(randn(*output.shape, seed=4))
        grads = [t.grad for t in inputs if t is not None and t.requires_grad]
        results.append([output, *grads, *module.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("case", [c for c in CASES if getattr(c.make(), "bias", None) is not None], **by_name)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("solver", [Exact(), CG(2)], **by_name)
def test_only_what_is_trained_is_solved_for(case: Case, frozen: str, solver: Solver) -> None:
    plain, inputs = fresh(case), case.inputs()
    plain.get_parameter(frozen).requires_grad_(False)
    G = randn(*copy.deepcopy(plain)(*inputs).shape, seed=4)
    expected = oracle(copy.deepcopy(plain), inputs, G, solver, 0.7, owners=case.owners)
    for space in (None, *(s for s in TABLE[type(plain)].spaces if s in solver.spaces)):
        layer = converted(plain, solver, tau_theta=0.7, space=space)
        layer(*inputs).backward(G)
        assert_directions(layer, expected)


@pytest.mark.parametrize("case", CASES, **by_name)
def test_settings_survive_pickling_and_revert_restores_the_class(case: Case) -> None:
    layer = converted(fresh(case), CG(2), tau_theta=0.3)
    clone = pickle.loads(pickle.dumps(layer))
    assert (type(clone), clone.tau_theta, clone.solver) == (type(layer), 0.3, CG(2))
    assert type(proxprop.revert(layer)) is type(case.make())


@pytest.mark.compatibility("nn.LazyLinear, nn.LazyConv", section="Layers", note="after materialising")
def test_lazy_layers_convert_once_materialised() -> None:
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(4), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"lazy layers is not known yet: run the model once"):
        proxprop.convert(model)
    model(torch.ones(2, 1, 5, 5))
    proxprop.convert(model)
    assert [isinstance(m, ProximalLayer) for m in model] == [True, False, True, False]


@pytest.mark.compatibility(
    "weight norm, spectral norm",
    section="Layers",
    status="explicit",
    note="the output is not linear in what is trained",
)
@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrized_layers_stay_explicit_and_say_why(parametrize) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrize(nn.Linear(3, 3)), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    plain = copy.deepcopy(model)
    proxprop.convert(model, Exact())
    assert [isinstance(m, ProximalLayer) for m in model] == [False, True, False]
    for net in (plain, model):
        net(randn(4, 3, seed=1)).square().sum().backward()
    for left, right in zip(plain[0].parameters(), model[0].parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    reasons = {row.name: row.reason for row in proxprop.summary(model, randn(4, 3, seed=1)).rows}
    assert "parametrization" in reasons["0"]


@pytest.mark.parametrize(("kind", "sizes", "option", "example", "why"), [
    (nn.EmbeddingBag, (5, 2), {"mode": "max"}, (INDEX,), "mode='max' is not linear in its parameters"),
    (nn.Embedding, (5, 2), {"scale_grad_by_freq": True}, (INDEX,), "scale_grad_by_freq=True rescales"),
    (nn.MultiheadAttention, (4, 2), {"add_bias_kv": True}, (torch.ones(2, 4),) * 3, "add_bias_kv and add_zero_attn"),
    (nn.BatchNorm1d, (4,), {"affine": False}, (torch.ones(2, 4),), "it has no scale to train"),
])  # fmt: skip
def test_options_that_are_not_linear_are_refused_with_a_reason(
    kind, sizes, option, example, why: str
) -> None:
    model = Calls(kind(*sizes, **option))
    with pytest.raises(ValueError, match=f"nothing is left to convert.*{why}"):
        proxprop.convert(model, module_types=[kind])
    with pytest.raises(ValueError, match=f"can't be proximal: {why}"):
        TABLE[kind](*sizes, **option)
    reasons = [row.reason for row in proxprop.summary(model, example).rows if row.name == "inner"]
    assert all(why in reason for reason in reasons)
    assert len(reasons) == bool(list(model.inner.parameters()))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_layers_with_nothing_in_a_parameter_stay_explicit() -> None:
    empty: list[tuple[nn.Module, tuple[int, ...]]]
    empty = [(nn.Linear(0, 3), (4, 0)), (nn.Linear(3, 0), (4, 3)), (nn.LayerNorm(0), (4, 0))]
    for layer, shape in empty:
        model = proxprop.convert(
            nn.ModuleList([layer, nn.Linear(3, 3)]), CG(2), include_last=True, module_types="all"
        )
        assert not isinstance(layer, ProximalLayer)
        layer(torch.ones(shape)).sum().backward()
        reasons = {row.name: row.reason for row in proxprop.summary(Calls(layer), (torch.ones(shape),)).rows}
        assert "has no entries" in reasons["inner"]
        assert isinstance(model[1], ProximalLayer)


def test_module_types_decide_what_is_converted() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))

    def names(**how) -> list[str]:
        return [
            n for n, m in proxprop.convert(model(), **how).named_modules() if isinstance(m, ProximalLayer)
        ]

    assert names() == ["0", "2"]
    assert names(module_types="all") == ["0", "1", "2"]
    assert names(module_types=[nn.LayerNorm]) == ["1"]
    with pytest.raises(
        ValueError, match="module_types should be \"all\", a list of module classes or None but is 'norm'"
    ):
        names(module_types="norm")


def test_table_and_plans_know_every_kind() -> None:
    """Each class stands for its own torch class, and each can be planned with some solver."""
    for plain, layer in TABLE.items():
        assert layer.plain is plain
        assert issubclass(layer, plain)
        sizes = Sizes(1, 4, 3, 2)
        assert choose_plan(sizes, CG(2), available=layer.spaces).space in layer.spaces


def test_stand_in_tensors_leave_nothing_behind_for_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = proxprop.nn.Conv2d(2, 3, 3, padding=1, solver=CG(2), space="feature")
        layer(torch.ones(2, 2, 5, 5)).sum().backward()
    real = proxprop.nn.Conv2d(2, 3, 3, padding=1, solver=CG(2), space="feature")
    real(torch.ones(2, 2, 5, 5)).sum().backward()
    assert bool(real.weight.grad.isfinite().all())
