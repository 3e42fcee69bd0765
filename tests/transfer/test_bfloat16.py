"""Bfloat16 inputs are multiplied as they are, without a float32 copy of all of them."""

import pytest
import torch
from torch import Tensor, nn

from cases import relative_error
from proxprop import tuning
from proxprop.nn.conv import geometry
from proxprop.transfer import ConvTransfer, ConvTransposeTransfer, LayerCall, LinearTransfer
from transfer.image_rows import ByImageRows


@pytest.mark.parametrize("transposed", [False, True])
def test_a_linear_transfer_takes_bfloat16_as_it_is(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    X, G, V = (torch.randn(*shape, generator=generator) for shape in ((5, 3, 7), (5, 3, 4), (1, 8, 4)))
    X, G = X.bfloat16(), G.bfloat16()
    shapes = [torch.Size([7, 4] if transposed else [4, 7]), torch.Size([4])]
    halved, whole = (LinearTransfer([x], G, shapes, transposed) for x in (X, X.float()))
    assert relative_error(halved.sample_gram(), whole.sample_gram()) < 1e-6
    assert relative_error(halved.gram(), whole.gram()) < 1e-6
    assert relative_error(halved.normal(V), whole.normal(V)) < 1e-6
    assert torch.equal(halved.to_samples(G), whole.to_samples(G.float()))
    for found, expected in zip(halved.gradient(G), whole.gradient(G.float()), strict=True):
        assert found.dtype == torch.float32
        assert relative_error(found, expected) < 1e-6


CONVOLUTIONS = {
    "short rows": nn.Conv2d(3, 4, 3, padding=1),
    "strided": nn.Conv2d(3, 4, 3, stride=2),
    "groups": nn.Conv2d(4, 6, 3, groups=2),
    "circular": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "large kernel": nn.Conv1d(2, 3, 9, padding=4),
    "volume": nn.Conv3d(2, 3, 2),
    "few samples": nn.Conv2d(30, 4, 7),
    "no bias": nn.Conv2d(3, 4, 1, bias=False),
    "transposed": nn.ConvTranspose2d(3, 4, 3, stride=2),
}


def convolution(name: str, X: Tensor, G: Tensor, kind: type[ConvTransfer] = ConvTransfer) -> ConvTransfer:
    layer = CONVOLUTIONS[name]
    kind = ConvTransposeTransfer if name == "transposed" else kind
    shapes = [p.shape if p is not None else None for p in (layer.weight, layer.bias)]
    return kind([X], G, shapes, geometry(layer))


def test_a_bias_alone_is_solved_in_float32() -> None:
    layer, G = CONVOLUTIONS["groups"], torch.randn(5, 6, 6, 6).bfloat16()
    X = torch.randn(5, 4, 8, 8).bfloat16()
    transfer = LayerCall(ConvTransfer, (geometry(layer),)).transfer([X], G, [None, layer.bias.shape])
    weight, bias = transfer.gradient(G)
    assert weight is None
    assert bias.dtype == transfer.gram().dtype == torch.float32
    assert relative_error(bias, G.float().sum((0, 2, 3))) < 1e-6
    assert torch.equal(transfer.gram(), torch.full((6, 1, 1), 5.0 * 6 * 6))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("kind", [ConvTransfer, ByImageRows], ids=["as on a CPU", "as on a GPU"])
def test_a_convolution_takes_bfloat16_as_it_is(
    name: str, kind: type[ConvTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "PATCHES_MOST_NUMBERS", 2**11)  # a few images
    monkeypatch.setattr(tuning, "FLOAT32_COPY_MOST_NUMBERS", 2**9)
    if kind is ByImageRows:
        monkeypatch.setattr(tuning, "CPU_PATCHES_MOST_NUMBERS", 0)
    layer, generator = CONVOLUTIONS[name], torch.Generator().manual_seed(0)
    dimensions = len(layer.kernel_size)
    X = torch.randn(5, layer.in_channels, *[8] * dimensions, generator=generator).bfloat16()
    G = torch.randn(layer(X.float()).shape, generator=generator).bfloat16()
    halved, whole = (convolution(name, x, G, kind) for x in (X, X.float()))
    groups, _, features, outputs = whole.sizes
    V = torch.randn(groups, features, outputs, generator=generator)
    assert halved.coarse
    S, B = halved.normal_equations(G)
    together = halved.from_features(B)
    for found, expected in (
        (halved.sample_gram(), whole.sample_gram()),
        (halved.gram(), whole.gram()),
        (S, whole.gram()),
        *zip(together, whole.gradient(G.float()), strict=True),
        *zip(halved.gradient(whole.from_samples(whole.to_samples(G.float()))), together, strict=True),
        (halved.normal(V), whole.normal(V)),
        (halved.to_samples(G), whole.to_samples(G.float())),
        *zip(halved.gradient(G), whole.gradient(G.float()), strict=True),
    ):
        if expected is None:
            assert found is None
            continue
        assert found.dtype == torch.float32
        assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("name", ["short rows", "transposed"])
def test_bfloat16_images_are_in_float32_a_few_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own size or that of their output, whichever is larger."""
    layer = CONVOLUTIONS[name]
    X = torch.randn(5, layer.in_channels, 8, 8).bfloat16()
    G = layer(X.float()).bfloat16()
    monkeypatch.setattr(tuning, "FLOAT32_COPY_MOST_NUMBERS", 2 * G[0].numel())
    counts, own = [], ConvTransfer._own_weight_gradient
    monkeypatch.setattr(
        ConvTransfer, "_own_weight_gradient", lambda transfer, G: counts.append(len(G)) or own(transfer, G)
    )
    transfer = convolution(name, X, G)
    transfer.gradient(G)
    transfer.normal(torch.randn(1, transfer.sizes.features, transfer.sizes.outputs))
    assert counts == [2, 2, 1] * 2


@pytest.mark.parametrize("name", ["short rows", "transposed"])
def test_no_images_at_all_give_no_gradient_in_bfloat16_either(name: str) -> None:
    layer = CONVOLUTIONS[name]
    X = torch.empty(0, layer.in_channels, 8, 8).bfloat16()
    G = layer(X.float()).bfloat16()
    found = convolution(name, X, G).gradient(G)
    assert [gradient.dtype for gradient in found] == [torch.float32] * 2
    assert not any(bool(gradient.any()) for gradient in found)


@pytest.mark.parametrize(("kernel", "transforms"), [(3, False), (31, True)])
def test_large_kernels_are_worth_a_transform_in_bfloat16_too(kernel: int, transforms: bool) -> None:
    layer = nn.Conv2d(2, 4, kernel, padding=kernel // 2)
    X = torch.randn(4, 2, 32, 32).bfloat16()
    shapes = [layer.weight.shape, layer.bias.shape]
    found = ConvTransfer([X], torch.empty(4, 4, 32, 32), shapes, geometry(layer))
    assert (found.gram_method().flops is not None) == transforms
