"""Every layer kind beyond linear layers and convolutions, against the same dense oracle."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import SOLVERS, Owners, assert_directions, by_name, leading, oracle, randn, relative_error
from proxprop import CG, Exact
from proxprop.nn import TABLE, ProximalLayer
from proxprop.solvers import Sizes, Solver, plan


def second(groups: int) -> Owners:
    """A transposed convolution's weight is `[channels, outputs/groups, *kernel]`."""

    def owners(name: str, parameter: Tensor) -> Tensor:
        if name == "bias":
            return leading(name, parameter)
        channels, outputs = parameter.shape[:2]
        group = torch.arange(channels) // (channels // groups)
        owner = group[:, None] * outputs + torch.arange(outputs)
        return owner.repeat_interleave(parameter[0, 0].numel(), dim=1).flatten()

    return owners


def each(name: str, parameter: Tensor) -> Tensor:
    """Every number has an output of its own."""
    return torch.arange(parameter.numel())


def last(name: str, parameter: Tensor) -> Tensor:
    """A table's columns are the outputs."""
    return torch.arange(parameter.shape[-1]).repeat(parameter.numel() // parameter.shape[-1])


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    owners: Owners

    @property
    def kind(self) -> str:
        return type(self.make()).__name__


def x(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (randn(*shape, seed=1),)


def eval_mode(module: nn.Module) -> nn.Module:
    """Evaluation mode with running statistics that are not the default ones."""
    module.running_mean.uniform_(-1, 1)
    module.running_var.uniform_(0.5, 2)
    return module.eval()


INDEX = torch.tensor([[0, 2, 2], [4, 2, 0]])
OFFSETS = torch.tensor([0, 2, 2, 5])

CASES = [
    Case("transposed-1d", lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), x(2, 2, 4), second(1)),
    Case("transposed-2d", lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(1, 2), dilation=(2, 1)), x(2, 2, 3, 2), second(1)),
    Case("transposed-2d-groups", lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2, bias=False), x(2, 4, 2, 3), second(2)),
    Case("transposed-2d-wide-padding", lambda: nn.ConvTranspose2d(1, 2, 2, padding=2), x(2, 1, 5, 5), second(1)),
    Case("transposed-2d-unbatched", lambda: nn.ConvTranspose2d(2, 2, 3, padding=1), x(2, 3, 3), second(1)),
    Case("transposed-3d", lambda: nn.ConvTranspose3d(1, 2, 2, stride=(2, 1, 1)), x(1, 1, 2, 2, 2), second(1)),
    Case("bilinear", lambda: nn.Bilinear(2, 3, 4), lambda: (randn(5, 2, seed=1), randn(5, 3, seed=2)), leading),
    Case("bilinear-no-bias", lambda: nn.Bilinear(2, 2, 3, bias=False), lambda: (randn(2, 3, 2, seed=1), randn(2, 3, 2, seed=2)), leading),
    Case("layer-norm", lambda: nn.LayerNorm(4), x(3, 2, 4), each),
    Case("layer-norm-two-axes", lambda: nn.LayerNorm((2, 3)), x(4, 2, 3), each),
    Case("layer-norm-no-bias", lambda: nn.LayerNorm(4, bias=False), x(5, 4), each),
    Case("layer-norm-one-sample", lambda: nn.LayerNorm(4), x(4), each),
    Case("rms-norm", lambda: nn.RMSNorm(4), x(3, 2, 4), each),
    Case("group-norm", lambda: nn.GroupNorm(2, 4), x(3, 4, 2, 2), each),
    Case("batch-norm-1d", lambda: nn.BatchNorm1d(3), x(5, 3), each),
    Case("batch-norm-1d-sequence", lambda: nn.BatchNorm1d(3, momentum=None), x(4, 3, 2), each),
    Case("batch-norm-2d", lambda: nn.BatchNorm2d(3, track_running_stats=False), x(2, 3, 2, 2), each),
    Case("batch-norm-2d-eval", lambda: eval_mode(nn.BatchNorm2d(3)), x(2, 3, 2, 2), each),
    Case("batch-norm-3d", lambda: nn.BatchNorm3d(2), x(2, 2, 2, 2, 1), each),
    Case("instance-norm-1d", lambda: nn.InstanceNorm1d(3, affine=True), x(2, 3, 4), each),
    Case("instance-norm-2d-unbatched", lambda: nn.InstanceNorm2d(2, affine=True), x(2, 3, 3), each),
    Case("instance-norm-2d-eval", lambda: eval_mode(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)), x(2, 2, 3, 3), each),
    Case("instance-norm-3d", lambda: nn.InstanceNorm3d(2, affine=True), x(2, 2, 2, 2, 2), each),
    Case("embedding-bag-mean", lambda: nn.EmbeddingBag(5, 3), lambda: (INDEX,), last),
    Case("embedding-bag-offsets", lambda: nn.EmbeddingBag(5, 3, mode="sum"), lambda: (INDEX.flatten(), OFFSETS), last),
    Case("embedding-bag-last-offset", lambda: nn.EmbeddingBag(5, 3, include_last_offset=True), lambda: (INDEX.flatten(), torch.tensor([0, 2, 6])), last),
    Case("embedding-bag-weights", lambda: nn.EmbeddingBag(5, 3, mode="sum"), lambda: (INDEX, None, randn(2, 3, seed=3)), last),
]  # fmt: skip


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    module = case.make().double()
    for parameter in module.parameters():  # scales of 1 and shifts of 0 would hide mistakes
        torch.nn.init.normal_(parameter)
    return module


def converted(module: nn.Module, solver: Solver, **settings) -> nn.Module:
    return proxprop.convert(copy.deepcopy(module), solver, include_last=True, module_types="all", **settings)


def compatibility(case: Case):
    return pytest.param(
        case, marks=pytest.mark.compatibility(f"nn.{case.kind}", section="Layers"), id=case.name
    )


@pytest.mark.parametrize("case", [compatibility(case) for case in CASES])
@pytest.mark.parametrize("solver", SOLVERS, **by_name)
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
    for space in (s for s in TABLE[type(plain)].spaces if s in solver.spaces):
        layer = converted(plain, solver, tau_theta=0.7, space=space)
        layer(*inputs).backward(G)
        assert_directions(layer, expected)


@pytest.mark.parametrize("case", CASES, **by_name)
def test_settings_survive_pickling_and_revert_restores_the_class(case: Case) -> None:
    layer = converted(fresh(case), CG(2), tau_theta=0.3)
    clone = pickle.loads(pickle.dumps(layer))
    assert (type(clone), clone.tau_theta, clone.solver) == (type(layer), 0.3, CG(2))
    assert type(proxprop.revert(layer)) is type(case.make())


@pytest.mark.compatibility("nn.Embedding", section="Layers", note="closed form, whichever solver")
@pytest.mark.parametrize("solver", [Exact(), CG(1)], **by_name)
@pytest.mark.parametrize("scaling", ["paper", "gradient"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_is_divided_by_its_counts(
    solver: Solver, scaling: str, padding: int | None, sparse: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(6, 3, padding_idx=padding, sparse=sparse).double()
    G = randn(2, 3, 3, seed=4)
    expected = oracle(plain, INDEX, G, Exact(), 0.7, scaling, last)["weight"]
    if padding is not None:
        expected[padding] = 0.0
    layer = converted(plain, solver, tau_theta=0.7, scaling=scaling)
    output = layer(INDEX)
    assert torch.equal(output, plain(INDEX))
    output.backward(G)
    assert layer.weight.grad.is_sparse == sparse
    assert relative_error(layer.weight.grad.to_dense(), expected) < 1e-12


@pytest.mark.compatibility("nn.Embedding", section="Layers")
def test_sparse_embedding_trains_under_sparse_adam() -> None:
    torch.manual_seed(0)
    model = proxprop.convert(
        nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 1)), module_types="all"
    )
    sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        sparse.zero_grad()
        loss = model(INDEX).square().sum()
        loss.backward()
        sparse.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.compatibility("nn.EmbeddingBag", section="Layers")
def test_embedding_bag_leaves_padding_out_and_keeps_sparse_gradients() -> None:
    torch.manual_seed(0)
    dense = nn.EmbeddingBag(5, 3, padding_idx=2).double()
    A = torch.zeros(2, 5, dtype=torch.float64)
    A[0, 0], A[1, 4], A[1, 0] = 1.0, 0.5, 0.5  # means over what is not padding
    G = randn(2, 3, seed=4)
    expected = torch.linalg.solve(torch.eye(5).double() + A.T @ A, A.T @ G)
    for sparse in (False, True):
        plain = copy.deepcopy(dense)
        plain.sparse = sparse
        layer = converted(plain, Exact())
        layer(INDEX).backward(G)
        assert layer.weight.grad.is_sparse == sparse
        assert relative_error(layer.weight.grad.to_dense(), expected) < 1e-12


MASKS = {
    "none": {},
    "causal": {"attn_mask": torch.ones(4, 4).triu(1).bool(), "is_causal": True},
    "additive": {"attn_mask": torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)},
    "per head": {"attn_mask": torch.ones(6, 4, 4).tril(-2).bool()},
    "padding": {
        "key_padding_mask": torch.tensor(
            [[False] * 4, [False, False, True, True], [True, False, False, False]]
        )
    },
    "both": {
        "attn_mask": torch.ones(4, 4).triu(1).bool(),
        "key_padding_mask": torch.tensor(
            [[False] * 4, [False, False, False, True], [False, True, False, False]]
        ),
    },
}


@pytest.mark.compatibility("nn.MultiheadAttention", section="Layers", note="input and output projections")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_attention_forward_is_torchs(
    masks: str, need_weights: bool, batch_first: bool, dropout: float
) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=batch_first).double()
    layer = converted(plain, CG(1))
    x = randn(3, 4, 6, seed=1) if batch_first else randn(4, 3, 6, seed=1)
    results = []
    for module in (plain, layer):
        torch.manual_seed(1)
        input = x.clone().requires_grad_()
        output, weights = module(input, input, input, need_weights=need_weights, **MASKS[masks])
        output.square().sum().backward()
        results.append((output, weights, input.grad))
    for left, right in zip(*results, strict=True):
        assert (left is None) == (right is None)
        assert left is None or relative_error(right, left) < 1e-12


@pytest.mark.compatibility("nn.MultiheadAttention", section="Layers")
@pytest.mark.parametrize("inputs", ["self", "key is value", "all different", "unbatched", "other widths"])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_projections_are_linear_layers_directions(inputs: str, bias: bool) -> None:
    """Each projection equals an nn.Linear fed the same rows and the same output gradient."""
    torch.manual_seed(0)
    widths = {"kdim": 5, "vdim": 3} if inputs == "other widths" else {}
    plain = nn.MultiheadAttention(6, 2, batch_first=True, bias=bias, **widths).double()
    layer = converted(plain, Exact(), tau_theta=0.7)
    q, k, v = attention_inputs(inputs)
    output, _ = layer(q, k, v)
    output.square().sum().backward()
    rows, grads = captured_projections(plain, q, k, v)
    pieces = {"self": [(0, 18)], "unbatched": [(0, 18)], "key is value": [(0, 6), (6, 18)]}
    for start, stop in pieces.get(inputs, [(0, 6), (6, 12), (12, 18)]):
        A, G = rows[start // 6], torch.cat(grads[start // 6 : stop // 6], dim=-1)
        weight, shift = linear_direction(A, G, bias)
        if inputs == "other widths":
            found = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight][start // 6].grad
        else:
            found = layer.in_proj_weight.grad[start:stop]
        assert relative_error(found, weight) < 1e-9
        if bias:
            assert relative_error(layer.in_proj_bias.grad[start:stop], shift) < 1e-9
    weight, shift = linear_direction(rows[3], grads[3], bias)
    assert relative_error(layer.out_proj.weight.grad, weight) < 1e-9


def attention_inputs(inputs: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = randn(3, 4, 6, seed=1), randn(3, 5, 6, seed=2), randn(3, 5, 6, seed=3)
    return {
        "self": (q, q, q),
        "key is value": (q, k, k),
        "all different": (q, k, v),
        "unbatched": (q[0],) * 3,
        "other widths": (q, randn(3, 5, 5, seed=4), randn(3, 5, 3, seed=5)),
    }[inputs]


def captured_projections(plain: nn.MultiheadAttention, *qkv: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and output gradients of the q, k, v and output projections, by attention written out."""
    if plain.in_proj_weight is None:
        weights = [plain.q_proj_weight, plain.k_proj_weight, plain.v_proj_weight]
    else:
        weights = list(plain.in_proj_weight.chunk(3))
    biases = list(plain.in_proj_bias.chunk(3)) if plain.in_proj_bias is not None else [0.0] * 3
    rows = [t if t.dim() == 3 else t[None] for t in qkv]
    projected = [
        (a @ w.T + b).detach().requires_grad_() for a, w, b in zip(rows, weights, biases, strict=True)
    ]
    q, k, v = (p.unflatten(-1, (2, 3)).transpose(1, 2) for p in projected)
    mixed = (torch.softmax(q @ k.mT / 3**0.5, -1) @ v).transpose(1, 2).flatten(-2)
    bias = plain.out_proj.bias if plain.out_proj.bias is not None else 0.0
    output = mixed @ plain.out_proj.weight.T + bias
    grads = torch.autograd.grad(output.square().sum(), [*projected, output])
    return [*rows, mixed.detach()], [g.detach() for g in grads]


def linear_direction(A: Tensor, G: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    A, G = A.reshape(-1, A.shape[-1]), G.reshape(-1, G.shape[-1])
    if bias:
        A = torch.cat([A, torch.ones(len(A), 1, dtype=A.dtype)], dim=1)
    D = torch.linalg.solve(torch.eye(A.shape[1], dtype=A.dtype) / 0.7 + A.T @ A, A.T @ G)
    return (D[:-1].T, D[-1]) if bias else (D.T, D[-1])


@pytest.mark.compatibility("nn.MultiheadAttention", section="Layers")
def test_a_transformer_encoder_layer_converts_and_is_summarised() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), nn.Linear(8, 2)
    )
    proxprop.convert(model, CG(3))
    rows = {row.name: row for row in proxprop.summary(model, torch.randn(3, 5, 8)).rows}
    assert rows["0.self_attn"].status == rows["0.self_attn.out_proj"].status == "converted"
    assert rows["0.self_attn.out_proj"].reason == "solved by the module around it"
    assert rows["0.norm1"].status == "explicit"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(randn(3, 5, 8, seed=1).float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


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


class Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2)

    def forward(self, *arguments: Tensor):
        return self.inner(*arguments)


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


class Transposed(nn.Module):
    """A linear layer that stores its weight the other way round, as Hugging Face's Conv1D does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs)),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, input: Tensor) -> Tensor:
        return torch.addmm(self.bias, input.view(-1, input.size(-1)), self.weight).view(*input.shape[:-1], -1)


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


@pytest.fixture
def registry():
    """Registrations made in a test end with it."""
    table = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(table)


@pytest.mark.compatibility(
    "third-party linear layers", section="Layers", note="one call of `proxprop.register`"
)
@pytest.mark.parametrize(("solver", "space"), [(s, sp) for s in SOLVERS for sp in s.spaces], **by_name)
@pytest.mark.usefixtures("registry")
def test_registered_layers_are_solved_like_linear_ones(solver: Solver, space: str) -> None:
    proxprop.register(Transposed, transposed=True)
    torch.manual_seed(0)
    plain = Transposed(3, 4).double()
    layer = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7, space=space, include_last=True)
    input, G = randn(2, 5, 4, seed=1), randn(2, 5, 3, seed=2)
    layer(input).backward(G)
    assert_directions(layer, oracle(plain, input, G, solver, 0.7, owners=last))
    assert pickle.loads(pickle.dumps(layer)).tau_theta == 0.7
    assert type(proxprop.revert(layer)) is Transposed


@pytest.mark.usefixtures("registry")
def test_registering_what_is_not_linear_is_told() -> None:
    proxprop.register(Halved)
    model = proxprop.convert(nn.Sequential(Halved(3, 3), nn.Linear(3, 1)))
    with pytest.raises(
        ValueError, match=r"Halved was registered as a layer that computes x Wᵀ \+ b but its forward"
    ):
        model(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"Linear is built in and can't be registered"):
        proxprop.register(nn.Linear)
    with pytest.raises(TypeError, match=r"register should be given a module class but was given 'Conv1D'"):
        proxprop.register("Conv1D")


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
        assert plan(sizes, CG(2), available=layer.spaces).space in layer.spaces


@pytest.mark.compatibility("nn.EmbeddingBag", section="Layers")
def test_sparse_bags_stay_sparse_at_every_size_and_step_inside_backward() -> None:
    layer = converted(nn.EmbeddingBag(50, 1, sparse=True), CG(3))
    layer(torch.randint(50, (64, 3))).sum().backward()
    assert layer.weight.grad.is_sparse
    dense = converted(nn.EmbeddingBag(5, 2, mode="sum"), CG(3))
    weights = torch.ones(2, 3, requires_grad=True)
    step = torch.optim.SGD(dense.parameters(), lr=0.1)
    dense.weight.register_post_accumulate_grad_hook(lambda _: step.step())
    dense(INDEX, None, weights).sum().backward()
    assert weights.grad is not None


@pytest.mark.parametrize(
    "masks",
    [
        {"attn_mask": torch.zeros(4, 4, dtype=torch.uint8)},
        {"attn_mask": torch.zeros(1, 4).bool()},
        {"key_padding_mask": torch.zeros(1, 4).bool()},
    ],
)
def test_attention_refuses_the_masks_that_torch_refuses(masks) -> None:
    plain = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = randn(3, 4, 6, seed=1)
    for module in (plain, converted(plain, CG(1))):
        with pytest.raises((RuntimeError, AssertionError)):
            module(x, x, x, **masks)


def test_attention_trusts_the_causal_hint_as_torch_does() -> None:
    plain = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x, other = randn(3, 4, 6, seed=1), torch.zeros(4, 4).bool()
    outputs = [
        m(x, x, x, attn_mask=other, is_causal=True, need_weights=False)[0]
        for m in (plain, converted(plain, CG(1)))
    ]
    assert relative_error(outputs[1], outputs[0]) < 1e-12


def test_summary_adds_up_every_system_of_a_layer() -> None:
    model = Calls(converted(nn.MultiheadAttention(6, 2, batch_first=True), CG(3)))
    rows = {
        r.name: r
        for r in proxprop.summary(
            model, (randn(2, 3, 6, seed=1).float(), *[randn(2, 50, 6, seed=2).float()] * 2)
        ).rows
    }
    assert rows["inner"].calls == 2
    assert len({plan.sizes for plan in rows["inner"].plans}) == 2


@pytest.mark.usefixtures("registry")
def test_a_registered_layer_takes_a_first_batch_of_nan() -> None:
    proxprop.register(Transposed, transposed=True)
    layer = proxprop.convert(Transposed(3, 4), include_last=True)
    layer(torch.full((2, 4), float("nan"))).sum().backward()
    assert not bool(layer.weight.grad.isfinite().any())


def test_stand_in_tensors_leave_nothing_behind_for_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = proxprop.nn.Conv2d(2, 3, 3, padding=1, solver=CG(2), space="feature")
        layer(torch.ones(2, 2, 5, 5)).sum().backward()
    real = proxprop.nn.Conv2d(2, 3, 3, padding=1, solver=CG(2), space="feature")
    real(torch.ones(2, 2, 5, 5)).sum().backward()
    assert bool(real.weight.grad.isfinite().all())
