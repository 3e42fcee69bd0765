"""Packing symmetric matrices, and how they are put into buckets."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from proxprop.deferred.collectives import buckets, pack, packed_size, unpack


def packed(S: Tensor) -> Tensor:
    out = torch.full((packed_size(S.shape),), torch.nan, dtype=S.dtype)
    pack(S, out)
    return out


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2**32))
def test_unpack_undoes_pack(groups: int, features: int, seed: int) -> None:
    A = torch.randn(groups, 4, features, generator=torch.Generator().manual_seed(seed))
    S, back = A.mT @ A, torch.full((groups, features, features), torch.nan)
    S = (S + S.mT) / 2
    unpack(packed(S), back)
    assert torch.equal(back, S)


@given(st.integers(1, 9))
def test_a_triangle_is_sent_and_nothing_twice(features: int) -> None:
    numbers = torch.arange(features * (features + 1) // 2, dtype=torch.float64)
    S = torch.zeros(1, features, features, dtype=torch.float64)
    S[0][torch.triu_indices(features, features).unbind()] = numbers
    S = S + S.triu(1).mT
    assert torch.equal(packed(S).sort().values, numbers)


@given(st.integers(1, 6), st.data())
def test_non_finite_entries_stay_where_they_are(features: int, data: st.DataObject) -> None:
    row, column = (data.draw(st.integers(0, features - 1)) for _ in range(2))
    S, back = torch.ones(1, features, features), torch.empty(1, features, features)
    S[0, row, column] = S[0, column, row] = torch.inf
    unpack(packed(S), back)
    assert torch.equal(back, S)


@given(st.lists(st.integers(0, 5), max_size=2))
def test_other_tensors_are_sent_whole(shape: list[int]) -> None:
    tensor = torch.randn(shape)
    back = torch.empty(shape)
    unpack(packed(tensor), back)
    assert torch.equal(back, tensor)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 2)), max_size=12),
    st.integers(1, 300),
)
def test_buckets_have_one_owner_and_type_and_a_limit(parts: list[tuple[int, bool, int]], limit: int) -> None:
    tensors = [torch.zeros(size, dtype=torch.float64 if wide else torch.float32) for size, wide, _ in parts]
    kinds = [(wide, owner) for _, wide, owner in parts]
    found = buckets(tensors, [owner for *_, owner in parts], limit)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(tensors)))
    assert [bucket[-1] for bucket in found] == sorted(bucket[-1] for bucket in found)
    for bucket in found:
        assert len({kinds[i] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(tensors[i].nbytes for i in bucket) <= limit
    for kind in set(kinds):
        own = [bucket for bucket in found if kinds[bucket[0]] == kind]
        assert [i for bucket in own for i in bucket] == [i for i, k in enumerate(kinds) if k == kind]
        for bucket, following in pairwise(own):
            assert sum(tensors[i].nbytes for i in (*bucket, following[0])) > limit
