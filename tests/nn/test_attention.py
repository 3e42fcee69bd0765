"""`nn.MultiheadAttention`: torch's forward, and for each projection the direction of a linear layer."""

import pytest
import torch
from torch import Tensor, nn

import proxprop
from cases import randn, relative_error
from layers import Calls, attention_inputs, converted
from proxprop import CG, Exact

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


def test_attention_refuses_other_calls_that_torch_refuses() -> None:
    plain = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = randn(3, 4, 6, seed=1)
    for module in (plain, converted(plain, CG(1))):
        with pytest.raises(RuntimeError, match=r"Need attn_mask if specifying the is_causal hint"):
            module(x, x, x, is_causal=True)
        with pytest.raises((RuntimeError, AssertionError)):
            module(x, x[:2], x[:2])


def test_attention_pads_the_keys_of_an_unbatched_call_as_torch_does() -> None:
    plain = nn.MultiheadAttention(6, 2).double()
    x, padding = randn(4, 6, seed=1), torch.tensor([False, False, True, False])
    results = [m(x, x, x, key_padding_mask=padding) for m in (plain, converted(plain, CG(1)))]
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < 1e-12


def test_attention_trusts_the_causal_hint_as_torch_does() -> None:
    plain = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x, other = randn(3, 4, 6, seed=1), torch.zeros(4, 4).bool()
    outputs = [
        m(x, x, x, attn_mask=other, is_causal=True, need_weights=False)[0]
        for m in (plain, converted(plain, CG(1)))
    ]
    assert relative_error(outputs[1], outputs[0]) < 1e-12


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
