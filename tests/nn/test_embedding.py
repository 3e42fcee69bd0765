"""Embeddings and bags: divided by counts, and sparse where torch's are."""

import copy

import pytest
import torch
from torch import nn

import proxprop
from cases import by_name, oracle, randn, relative_error
from layers import INDEX, converted, last
from proxprop import CG, Exact
from proxprop.solvers import Solver


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


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_indices_of_32_bits_give_the_directions_of_64(kind: type[nn.Module], sparse: bool) -> None:
    index, offsets = torch.tensor([0, 4, 4, 1, 2]), torch.tensor([0, 2, 2])
    found = []
    for dtype in (torch.int64, torch.int32):
        torch.manual_seed(0)
        layer = converted(kind(5, 3, sparse=sparse), Exact())
        given = (index, offsets) if kind is nn.EmbeddingBag else (index,)
        layer(*(tensor.to(dtype) for tensor in given)).square().sum().backward()
        found.append(layer.weight.grad.to_dense())
    assert torch.equal(*found)


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
