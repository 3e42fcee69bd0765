"""Gram matrices of convolutions from products of image rows, against unfolded patches."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import LAYERS, by_name, randn, relative_error
from proxprop import tuning
from proxprop.nn.conv import geometry
from proxprop.solvers import matmul
from proxprop.transfer import gram_image_rows
from proxprop.transfer.conv_geometry import Axis, patch_sums
from transfer.image_rows import ByImageRows

AXES = [Axis(12, 3, 1, 1, 1), Axis(8, 3, 1, 1, 1)]


class Peak(TorchDispatchMode):
    """Counts the bytes of arrays that were made within it and are alive, and keeps the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return out


def _storages(tree: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@given(
    sizes=st.tuples(*[st.integers(1, 7)] * 2),
    kernel=st.tuples(*[st.integers(1, 4)] * 2),
    stride=st.tuples(*[st.integers(1, 3)] * 2),
    padding=st.tuples(*[st.integers(0, 3)] * 2),
    channels=st.integers(1, 3),
    order=st.permutations(range(4)),
)
def test_equals_the_product_of_patches(sizes, kernel, stride, padding, channels, order) -> None:
    axes = [Axis(*axis) for axis in zip(sizes, kernel, stride, (1, 1), padding, strict=True)]
    assume(all(axis.size + 2 * axis.padding >= axis.taps for axis in axes))
    x = torch.randn(4, channels, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])  # in any layout
    A = functional.unfold(x, kernel, padding=padding, stride=stride).mT.flatten(0, 1)
    torch.testing.assert_close(gram_image_rows.gram(x[:, None], axes)[0], A.mT @ A)
    torch.testing.assert_close(patch_sums(x[:, None], axes)[0], A.sum(0))


@pytest.mark.parametrize(
    "numbers", [1, 5 * 8 * 96, 3 * 12 * 8 * 96], ids=["few rows", "5 rows", "3 channels"]
)
@pytest.mark.parametrize("batch", [1, 7, 12])
def test_a_few_channels_or_rows_at_a_time_are_as_good_as_all(numbers: int, batch: int) -> None:
    x = randn(batch, 4, 12, 8, seed=0)
    whole = gram_image_rows.gram(x[:, None], AXES)
    assert relative_error(gram_image_rows.gram(x[:, None], AXES, numbers), whole) < 1e-12


@pytest.mark.parametrize("longest", [1024, 4, 3])
def test_products_of_rows_in_terms(longest: int, monkeypatch) -> None:
    """As on a GPU, where images are split into terms some at a time, and the last time fewer."""
    split = pytest.importorskip("proxprop.kernels.split_bf16")
    monkeypatch.setattr(split, "terms", matmul.plain_terms)
    monkeypatch.setattr(matmul, "_terms_pay", lambda *_: True)
    monkeypatch.setattr(tuning, "TERMS_LONGEST_SUM", longest)
    monkeypatch.setattr(gram_image_rows, "multiply", lambda left, right: left.float() @ right.float())
    x = randn(7, 4, 12, 8, seed=0)
    A = functional.unfold(x, 3, padding=1).mT.flatten(0, 1)
    assert relative_error(gram_image_rows.gram(x[:, None].float(), AXES, 1)[0].double(), A.mT @ A) < 1e-6


@pytest.mark.parametrize("batch", [2, 64])
def test_temporaries_are_few_beside_the_input(batch: int) -> None:
    """The padded input, products of rows, and what becomes of them: no more than thrice the stated numbers."""
    x, most = randn(batch, 4, 12, 8, seed=0), 4096
    gram_image_rows.gram(x[:, None], AXES, most)  # makes what is cached
    with Peak() as peak:
        gram_image_rows.gram(x[:, None], AXES, most)
    all_products = 12 * 4 * 8 * 3 * 4 * 8
    assert peak.bytes <= 3 * 8 * max(most, x.numel())
    assert batch > 2 or 8 * all_products > 2 * peak.bytes


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("case", [c for c in LAYERS if isinstance(c.layer(), nn.Conv2d)], **by_name)
def test_a_convolution_forms_the_same_S(case) -> None:
    """On a GPU it multiplies rows where it can; here it is made to."""
    layer, x = case.layer(), case.input()
    shapes = [p.shape if p is not None else None for p in (layer.weight, layer.bias)]
    transfer = ByImageRows([x], layer(x), shapes, geometry(layer))
    ones = torch.ones(transfer.sizes.groups, transfer.sizes.samples, transfer.ones, dtype=torch.float64)
    A = torch.cat([transfer.rows(), ones], dim=-1)
    assert relative_error(transfer.gram(), A.mT @ A) < 1e-12
    by_rows = layer.groups == 1 and layer.dilation == (1, 1) and layer.kernel_size != (1, 1)
    assert (transfer.gram_method().name == "image rows") == by_rows
