"""Who owns a layer's statistics, and what travels: pure functions of sizes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxprop import Running
from proxprop.deferred.owners import Load, assign, moved, routes

LOADS = st.lists(
    st.builds(
        Load,
        name=st.just("layer"),
        held=st.integers(1, 1000),
        effort=st.integers(0, 1000),
        turn=st.integers(0, 3),
        matrix=st.integers(0, 1000),
        copy=st.integers(0, 1000),
        gradient=st.integers(0, 1000),
        refresh=st.integers(1, 10),
    ),
    max_size=30,
)


def shares(loads: list[Load], owners: list[int], ranks: int, turn: int) -> list[float]:
    pairs = list(zip(loads, owners, strict=True))
    return [
        sum(load.effort for load, owner in pairs if (owner, load.turn) == (r, turn)) for r in range(ranks)
    ]


@given(LOADS.map(lambda loads: [replace(load, held=0) for load in loads]), st.integers(1, 9))
def test_no_step_takes_longer_than_the_mean_and_one_layer(loads: list[Load], ranks: int) -> None:
    owners = assign(loads, ranks)
    assert len(owners) == len(loads)
    assert all(0 <= owner < ranks for owner in owners)
    for turn in range(4):
        efforts = shares(loads, owners, ranks, turn)
        largest = max((load.effort for load in loads if load.turn == turn), default=0)
        assert max(efforts) <= sum(efforts) / ranks + largest


@given(LOADS, st.integers(1, 9))
def test_no_rank_holds_much_more_than_the_mean_and_one_layer(loads: list[Load], ranks: int) -> None:
    held = [0] * ranks
    for load, owner in zip(loads, assign(loads, ranks), strict=True):
        held[owner] += load.held
    assert max(held) <= 1.1 * sum(held) / ranks + max((load.held for load in loads), default=0)


@given(LOADS, st.integers(1, 9), st.integers(1, 9), st.integers(0, 3000))
def test_the_way_with_fewer_bytes_is_taken_as_long_as_copies_fit(
    loads: list[Load], shards: int, replicas: int, copies: int
) -> None:
    ranks = shards * replicas
    found = routes(loads, copies, ranks, shards)
    assert sum(load.copy for load, r in zip(loads, found, strict=True) if r.way == "inverse") <= copies
    room = copies - sum(load.copy for load, r in zip(loads, found, strict=True) if r.way == "inverse")
    for load, route in zip(loads, found, strict=True):
        inverse, gradient = moved(load, "inverse", ranks, shards), moved(load, "gradient", ranks, shards)
        assert route.bytes == (inverse if route.way == "inverse" else gradient)
        assert route.way == "gradient" or inverse < gradient
        if route.way == "gradient" and inverse < gradient:
            assert load.copy > room
            assert "copies of inverses may take" in route.why


def test_bound_layers_go_their_only_way_whatever_it_moves() -> None:
    load = Load("a", held=1, matrix=1, gradient=100, bound="because", only="gradient")
    (route,) = routes([load], copies=1e9, ranks=2)
    assert (route.way, route.bytes, route.why) == ("gradient", 100.0, "because")


def test_one_rank_moves_nothing() -> None:
    load = Load("a", held=1, matrix=10, gradient=100)
    assert moved(load, "inverse", ranks=1) == moved(load, "gradient", ranks=1) == 0


def test_a_route_says_why() -> None:
    (route,) = routes([Load("a", held=1, matrix=100, gradient=10)], copies=1e9, ranks=3)
    assert route.why == "its gradient and direction move 20 B a step, its inverse would 200 B"


@pytest.mark.parametrize("copies", [-1, float("nan")])
def test_copies_should_be_bytes(copies: float) -> None:
    with pytest.raises(ValueError, match=r"^copies should be a number of bytes but is"):
        Running(copies=copies)
