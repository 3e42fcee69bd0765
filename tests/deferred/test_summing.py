"""Deferred mode: one step does not depend on how the batch was cut, for every layer, solver and scaling."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import proxprop
from cases import (
    CROSSED_SOLVERS,
    LAYERS,
    LayerCase,
    assert_directions,
    by_name,
    randn,
    relative_error,
    summed_oracle,
)
from layers import CASES, Case, attention_inputs, converted, fresh, last
from proxprop import CG, Exact, Running
from proxprop.solvers import DIAGONAL, FEATURE, Solver
from quiet import quiet_dynamo
from training import (
    Tied,
    assert_same,
    attached,
    directions,
    grads,
    images,
    loss_of,
    plain_model,
    small_model,
    targets,
)

works = pytest.mark.compatibility
SCALINGS = pytest.mark.parametrize("scaling", ["paper", "gradient"])
FEW = pytest.mark.parametrize("solver", [Exact(), CG(2)], ids=str)


def steps_of(layer: nn.Module, calls: list[tuple[tuple[Tensor, ...], Tensor]], **options) -> None:
    """Leave in `.grad` what one step makes of several backward passes."""
    optimizer = attached(layer, **options)
    for inputs, G in calls:
        layer(*inputs).backward(G)
    optimizer.step()


def two_calls(
    plain: nn.Module, inputs: tuple[Tensor, ...], batched: bool = True
) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """The inputs, and half as many of twice the size."""
    doubled = tuple(t * 2 if t is not None and t.is_floating_point() else t for t in inputs)
    if batched and len(doubled[0]) > 1:
        doubled = tuple(t[: (len(t) + 1) // 2] if t is not None else None for t in doubled)
    calls = [inputs, doubled]
    outputs = [copy.deepcopy(plain)(*call) for call in calls]
    return [
        (call, randn(*y.shape, seed=4 + i)) for i, (call, y) in enumerate(zip(calls, outputs, strict=True))
    ]


def row(kind: str):
    return works(f"nn.{kind}", section="Layers", mode="deferred")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=row(type(c.make()).__name__), id=c.name) for c in LAYERS]
)
@pytest.mark.parametrize("solver", [Exact(), CG(2), CG(3, per_output=False)], ids=str)
def test_linear_and_convolutional_layers_solve_the_sum(case: LayerCase, solver: Solver) -> None:
    plain = case.layer()
    calls = two_calls(plain, (case.input(),), "unbatched" not in case.name)
    expected = summed_oracle(plain, calls, solver, 0.7)
    layer = converted(plain, solver, tau_theta=0.7)
    steps_of(layer, calls)
    assert_directions(layer, expected)


SUMMED = [c for c in CASES if FEATURE in proxprop.nn.TABLE[type(c.make())].spaces]


@pytest.mark.parametrize("case", [pytest.param(c, marks=row(c.kind), id=c.name) for c in SUMMED])
@pytest.mark.parametrize("solver", [Exact(), CG(2), CG(3, per_output=False)], ids=str)
@SCALINGS
def test_other_layers_solve_the_sum(case: Case, solver: Solver, scaling: str) -> None:
    plain = fresh(case)
    calls = two_calls(plain, case.inputs(), "unbatched" not in case.name and "one-sample" not in case.name)
    expected = summed_oracle(copy.deepcopy(plain), calls, solver, 0.7, scaling, case.owners)
    layer = converted(plain, solver, tau_theta=0.7, scaling=scaling)
    steps_of(layer, calls)
    assert_directions(layer, expected)


@works("nn.Embedding", section="Layers", mode="deferred")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@SCALINGS
def test_an_embedding_sums_its_counts(sparse: bool, padding: int | None, scaling: str) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(6, 3, padding_idx=padding, sparse=sparse).double()
    calls = [
        ((torch.tensor([[0, 2, 2], [4, 2, 0]]),), randn(2, 3, 3, seed=4)),
        ((torch.tensor([1, 2, 0]),), randn(3, 3, seed=5)),
    ]
    expected = summed_oracle(plain, calls, Exact(), 0.7, scaling, last)["weight"]
    if padding is not None:
        expected[padding] = 0.0
    layer = converted(plain, CG(1), tau_theta=0.7, scaling=scaling)
    steps_of(layer, calls)
    assert layer.weight.grad.is_sparse == sparse
    assert relative_error(layer.weight.grad.to_dense(), expected) < 1e-12


@works("nn.MultiheadAttention", section="Layers", mode="deferred")
@pytest.mark.parametrize("inputs", ["self", "key is value", "all different", "other widths"])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_solves_the_sum(inputs: str, bias: bool) -> None:
    """Sequences of a batch do not see one another, so cutting it changes nothing but the sums."""
    torch.manual_seed(0)
    widths = {"kdim": 5, "vdim": 3} if inputs == "other widths" else {}
    plain = nn.MultiheadAttention(6, 2, batch_first=True, bias=bias, **widths).double()
    qkv = attention_inputs(inputs)
    whole = converted(plain, Exact(), tau_theta=0.7)
    whole(*qkv)[0].square().sum().backward()
    layer = converted(plain, Exact(), tau_theta=0.7)
    optimizer = attached(layer)
    for part in (slice(0, 1), slice(1, 3)):
        cut = {id(x): x[part] for x in qkv}
        layer(*(cut[id(x)] for x in qkv))[0].square().sum().backward()
    optimizer.step()
    assert_same(grads(layer), grads(whole), tolerance=1e-9)


@pytest.mark.parametrize("frozen", ["in_proj", "out_proj"])
@pytest.mark.parametrize("running", [None, Running(decay=0.0, update_every=2, invert_every=2, damping=None)])
def test_attention_of_which_a_part_is_frozen(frozen: str, running: Running | None) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(6, 2, batch_first=True).double()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    whole, layer = (converted(plain, Exact(), tau_theta=0.7) for _ in range(2))
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.0)
    proxprop.attach(optimizer, layer, running=running)
    x = randn(3, 4, 6, seed=1)
    whole(x, x, x)[0].square().sum().backward()
    for _ in range(2):  # with averages, the second step rests
        optimizer.zero_grad()
        layer(x, x, x)[0].square().sum().backward()
        optimizer.step()
        assert_same(grads(layer), grads(whole), tolerance=1e-9)
    assert 0 < len(grads(layer)) < 4


@works("nn.MultiheadAttention", section="Layers", mode="deferred")
@pytest.mark.parametrize("bias", [True, False])
def test_attention_that_is_called_in_both_ways_solves_each_projections_sum(bias: bool) -> None:
    torch.manual_seed(0)
    layer = converted(
        nn.MultiheadAttention(6, 2, batch_first=True, bias=bias).double(), Exact(), tau_theta=0.7
    )
    optimizer = attached(layer)
    q, k = randn(3, 4, 6, seed=1), randn(3, 5, 6, seed=2)
    (layer(q, q, q)[0].square().sum() + layer(q, k, k)[0].sum()).backward()
    B = grads(layer)
    optimizer.step()
    rows = {"q": torch.cat([q, q], 1), "k": torch.cat([q, k], 1), "v": torch.cat([q, k], 1)}
    for i, name in enumerate("qkv"):
        A = rows[name].flatten(0, 1)
        A = torch.cat([A, torch.ones(len(A), 1).double()], 1) if bias else A
        piece = slice(6 * i, 6 * i + 6)
        right = [B["in_proj_weight"][piece].T] + ([B["in_proj_bias"][None, piece]] if bias else [])
        D = torch.linalg.solve(torch.eye(A.shape[1]).double() / 0.7 + A.T @ A, torch.cat(right))
        assert relative_error(layer.in_proj_weight.grad[piece], D[:6].T) < 1e-9
        if bias:
            assert relative_error(layer.in_proj_bias.grad[piece], D[6]) < 1e-9


def accumulate(model: nn.Module, cuts: list[int], call=None) -> None:
    """One batch of six in micro-batches; each mean is weighted by its share of the samples."""
    for input, wanted in zip(images().split(cuts), targets().split(cuts), strict=True):
        loss = ((call or model)(input) - wanted).square().mean()
        (loss * len(input) / 6).backward()


@works("Gradient accumulation", mode="deferred")
@pytest.mark.parametrize("cuts", [[6], [3, 3], [1, 5], [2, 1, 3], [1] * 6], ids=str)
@pytest.mark.parametrize("solver", CROSSED_SOLVERS, **by_name)
@SCALINGS
def test_a_step_does_not_depend_on_how_the_batch_is_cut(
    cuts: list[int], solver: Solver, scaling: str
) -> None:
    model = proxprop.convert(plain_model(), solver, 0.7, scaling=scaling)
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    accumulate(model, cuts)
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)


@works("Gradient accumulation", mode="deferred")
def test_a_sum_as_loss_needs_no_weights() -> None:
    model = small_model(Exact())
    whole = copy.deepcopy(model)
    (whole(images()) - targets()).square().sum().backward()
    optimizer = attached(model)
    for part in (slice(0, 1), slice(1, 6)):
        (model(images()[part]) - targets()[part]).square().sum().backward()
    optimizer.step()
    assert_same(grads(model), grads(whole), tolerance=1e-9)


@works("Gradient accumulation", mode="deferred")
def test_backward_leaves_the_plain_gradient() -> None:
    model, plain = small_model(), plain_model()
    attached(model)
    assert_same(directions(model, images()), directions(plain, images()))


@works("Layer called several times in a pass", mode="deferred")
@FEW
def test_a_recurrent_cell_solves_the_sum_of_its_steps(solver: Solver) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).double()
    calls, G = [], []
    state = randn(3, 4, seed=1)
    for _ in range(3):
        calls.append(state.detach())
        output = plain(state)
        output.register_hook(G.append)
        state = output.tanh()
    state.square().sum().backward()
    plain.zero_grad()
    expected = summed_oracle(plain, list(zip(calls, reversed(G), strict=True)), solver, 0.7)
    layer = converted(plain, solver, tau_theta=0.7)
    optimizer = attached(layer)
    state = randn(3, 4, seed=1)
    for _ in range(3):
        state = layer(state).tanh()
    state.square().sum().backward()
    optimizer.step()
    assert_directions(layer, expected)


@works("Tied weights", mode="deferred")
@pytest.mark.parametrize("biases", ["own", "none", "same"])
@FEW
def test_tied_weights_solve_the_sum(biases: str, solver: Solver) -> None:
    plain = Tied(biases)
    model = proxprop.convert(copy.deepcopy(plain), solver, tau_theta=0.7)
    optimizer = attached(model)
    rows = []
    for layer in (plain.first, plain.second):
        layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].detach()))
    plain(randn(6, 4, seed=1)).sum().backward()
    for part in (slice(0, 2), slice(2, 6)):
        model(randn(6, 4, seed=1)[part]).sum().backward()
    optimizer.step()
    B = [plain.first.weight.grad.T]
    A = torch.cat(rows)
    zero, one = torch.zeros(6, 1).double(), torch.ones(6, 1).double()
    if biases == "own":
        A = torch.cat([A, torch.cat([one, zero]), torch.cat([zero, one])], 1)
        B += [plain.first.bias.grad[None], plain.second.bias.grad[None]]
    elif biases == "same":
        A = torch.cat([A, torch.cat([one, one])], 1)
        B += [plain.first.bias.grad[None]]
    M, B = torch.eye(A.shape[1]).double() / 0.7 + A.T @ A, torch.cat(B)
    D = (
        solver.features((A.T @ A)[None], B[None], 1 / 0.7).value[0]
        if isinstance(solver, CG)
        else torch.linalg.solve(M, B)
    )
    assert relative_error(model.first.weight.grad, D[:4].T) < 1e-9
    for row_of_bias, layer in zip(range(4, len(D)), (model.first, model.second), strict=False):
        assert relative_error(layer.bias.grad, D[row_of_bias]) < 1e-9


@works("Tied weights", mode="deferred")
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_tables_sum_their_counts(sparse: bool) -> None:
    torch.manual_seed(0)
    index, others = torch.tensor([0, 2, 2, 4]), torch.tensor([2, 1])
    one, two = (nn.Embedding(6, 3, sparse=sparse).double() for _ in range(2))
    two.weight = one.weight
    layer = converted(one, CG(1), tau_theta=0.7)
    steps_of(layer, [((torch.cat([index, others]),), torch.ones(6, 3).double())])
    model = proxprop.convert(
        nn.ModuleList([one, two]), CG(1), 0.7, module_types=[nn.Embedding], include_last=True
    )
    optimizer = attached(model)
    (model[0](index).sum() + model[1](others).sum()).backward()
    optimizer.step()
    assert relative_error(one.weight.grad.to_dense(), layer.weight.grad.to_dense()) < 1e-12


@works("Activation checkpointing, reentrant and not", mode="deferred")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_counts_once(use_reentrant: bool) -> None:
    model = small_model(Exact())
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    accumulate(model, [2, 4], lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant))
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)


@works("Activation checkpointing, reentrant and not", mode="deferred")
@pytest.mark.parametrize("space", [None, FEATURE], ids=["rows", "S"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_used_inside_and_outside_of_a_checkpoint(use_reentrant: bool, space: str | None) -> None:
    """A reentrant checkpoint runs a backward pass of its own in the midst of another, which has added to S by then.

    The gradient of the other pass comes only after that, because the first call adds to it too.
    """
    x, G = randn(2, 20, seed=1), randn(2, 20, seed=2)
    plain = nn.Linear(20, 20).double()
    layer = converted(plain, Exact(), tau_theta=0.7, space=space)
    optimizer = attached(layer)
    for _ in range(2):
        optimizer.zero_grad()
        first = layer(x)
        second = checkpoint(layer, first, use_reentrant=use_reentrant)
        layer(second).backward(G)
        optimizer.step()
        second_G = G @ plain.weight
        calls = [(x, second_G @ plain.weight), (first.detach(), second_G), (second.detach(), G)]
        assert_directions(layer, summed_oracle(plain, calls, Exact(), 0.7))


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    """Neither its S nor the belief that it is still running."""
    calls = two_calls(nn.Linear(5, 3).double(), (randn(6, 5, seed=1),))
    plain = nn.Linear(5, 3).double()
    layer = converted(plain, Exact(), tau_theta=0.7, space=FEATURE)
    optimizer = attached(layer)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    (x,), G = calls[0]
    hidden = layer(x.clone().requires_grad_())
    hook = layer.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyboardInterrupt) as failed:  # held on to, as an interactive shell does
        hidden.backward(G)
    hook.remove()
    for (y,), H in calls:
        optimizer.zero_grad()
        layer(y).backward(H)
        optimizer.step()
        assert_directions(layer, summed_oracle(plain, [((y,), H)], Exact(), 0.7))
    assert failed.value is not None


@works("`torch.compile` of the model, with and without `fullgraph`", mode="deferred")
@quiet_dynamo
@FEW
@SCALINGS
def test_a_compiled_model_sums_too(solver: Solver, scaling: str) -> None:
    model = proxprop.convert(plain_model(), solver, 0.7, scaling=scaling)
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first round is given up without a step
        optimizer.zero_grad()
        accumulate(model, [2, 4], compiled)
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)


@works("Frozen layers (fine-tuning)", mode="deferred")
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@FEW
def test_only_what_is_trained_is_solved_for(frozen: str, solver: Solver) -> None:
    plain = nn.Linear(5, 3).double()
    plain.get_parameter(frozen).requires_grad_(False)
    calls = two_calls(plain, (randn(6, 5, seed=1),))
    expected = summed_oracle(plain, calls, solver, 0.7)
    layer = converted(plain, solver, tau_theta=0.7)
    steps_of(layer, calls)
    assert_directions(layer, expected)


@works("Frozen layers (fine-tuning)", mode="deferred")
def test_a_parameter_frozen_after_attach_drops_out() -> None:
    plain = nn.Linear(5, 3).double()
    layer = converted(plain, Exact(), tau_theta=0.7)
    optimizer = attached(layer)
    for each in (plain, layer):
        each.bias.requires_grad_(False)
    calls = two_calls(plain, (randn(6, 5, seed=1),))
    for inputs, G in calls:
        layer(*inputs).backward(G)
    optimizer.step()
    assert_directions(layer, summed_oracle(plain, calls, Exact(), 0.7))


@works("Inference under `no_grad` and `inference_mode`, at no cost", mode="deferred")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_adds_nothing(mode) -> None:
    model = small_model(Exact())
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    accumulate(model, [3, 3])
    with mode():
        model(images(seed=9))
    model(images(seed=8))  # a forward without its backward
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)


@works(
    "`torch.autograd.grad`",
    mode="deferred",
    note="gives the plain gradient and sums nothing, in deferred mode",
)
def test_autograd_grad_sums_nothing() -> None:
    model, plain = small_model(Exact()), plain_model()
    expected = directions(copy.deepcopy(model), images())
    optimizer = attached(model)
    accumulate(model, [2, 4])
    found = torch.autograd.grad(loss_of(model, images(seed=5)), list(model.parameters()))
    plainly = torch.autograd.grad(loss_of(plain, images(seed=5)), list(plain.parameters()))
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(found, plainly, strict=True))
    optimizer.step()
    assert_same(grads(model), expected, tolerance=1e-9)


@works("`backward(inputs=...)`")
def test_backward_with_inputs_gives_directions_in_immediate_mode() -> None:
    model = small_model()
    expected = directions(copy.deepcopy(model), images())
    loss_of(model, images()).backward(inputs=list(model.parameters()))
    assert_same(grads(model), expected)


@works(
    "`backward(inputs=...)`",
    status="explicit",
    note="in deferred mode it adds to the gradient but not to S, and a warning says so",
    mode="deferred",
)
def test_backward_with_inputs_is_warned_about() -> None:
    model = small_model()
    optimizer = attached(model)
    for name in ("3", "0"):
        with pytest.warns(
            RuntimeWarning, match=rf"^{name}: a backward pass added to the gradient but not to S"
        ):
            loss_of(model, images()).backward(inputs=list(model.get_submodule(name).parameters()))
    loss_of(model, images()).backward(inputs=list(model.parameters()))  # said once
    found = grads(model)
    optimizer.step()
    assert_same(grads(model), found, tolerance=0.0)


@works("Empty batches", section="Input", mode="deferred")
@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv2d(1, 2, 2)], ids=["linear", "conv"])
def test_an_empty_micro_batch_adds_nothing(layer: nn.Module) -> None:
    plain = layer.double()
    shape = (3,) if isinstance(plain, nn.Linear) else (1, 3, 3)
    filled = two_calls(plain, (randn(4, *shape, seed=1),))
    expected = summed_oracle(plain, filled, Exact(), 1.0)
    layer = converted(plain, Exact())
    empty = torch.zeros(0, *shape).double()
    steps_of(layer, [((empty,), plain(empty)), *filled])
    assert_directions(layer, expected)


@works("Autocast to bfloat16 and float16 with `GradScaler`", mode="deferred")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_solved_in_float32(dtype: torch.dtype) -> None:
    model = small_model(Exact(), torch.float32).to(dtype)
    handle = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.0), model)
    loss_of(model, images(dtype=dtype)).backward()
    assert {system.S.dtype for system in handle.systems} == {torch.float32}
    handle.solve()
    wide = copy.deepcopy(model).double()
    expected = directions(wide, images(dtype=dtype).double())
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == dtype
        assert relative_error(parameter.grad.double(), expected[name]) < 0.1


@works("Autocast to bfloat16 and float16 with `GradScaler`", mode="deferred")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_what_immediate_mode_gives(dtype: torch.dtype) -> None:
    model = small_model(Exact(), torch.float32)
    whole = copy.deepcopy(model)
    optimizer = attached(model)
    for each in (whole, model):
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(each, images(dtype=torch.float32)).float()
        loss.backward()
    optimizer.step()
    assert_same(grads(model), grads(whole), tolerance=0.02)  # torch's own gradient is rounded to 16 bits


def test_every_known_layer_says_what_it_sums_or_nothing() -> None:
    summing = {
        kind.__name__
        for kind, layer in proxprop.nn.TABLE.items()
        if FEATURE in layer.spaces or DIAGONAL in layer.spaces
    }
    assert {"Linear", "Embedding", "LayerNorm"} <= summing
    assert "EmbeddingBag" not in summing
    for kind in (nn.Linear(3, 2), nn.Bilinear(2, 2, 2), nn.LayerNorm(3), nn.Embedding(3, 2)):
        assert converted(kind, CG(1))._parts()


class Around(nn.Module):
    """A layer that is used before, inside and behind a checkpoint."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.often, self.once = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor, recomputes: bool) -> Tensor:
        x = self.often(x).tanh()
        x = checkpoint(self._inside, x, use_reentrant=True) if recomputes else self._inside(x)
        return self.often(x).tanh()

    def _inside(self, x: Tensor) -> Tensor:
        return self.once(self.often(x).tanh()).tanh()


@pytest.mark.parametrize("features", [6, 200], ids=["S", "rows"])
@pytest.mark.parametrize("running", [None, Running(update_every=1, invert_every=1)])
def test_a_pass_inside_another_leaves_what_the_other_has_summed(
    features: int, running: Running | None
) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = proxprop.convert(Around(features).double(), Exact(), include_last=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        proxprop.attach(optimizer, model, running=running)
        for seed in range(2):
            x = randn(5, features, seed=seed).requires_grad_()
            model(x, recomputes).square().sum().backward()
        optimizer.step()
        found.append(grads(model))
    assert_same(*found, tolerance=1e-9)
