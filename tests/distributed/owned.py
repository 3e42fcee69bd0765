"""Statistics that are shared out: one copy over all ranks, what was said to be sent, parity either way."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import NETWORKS
from observed import as_one_process, assert_same_values, fresh, take_step
from parity import assert_same_on_all_ranks, share, whole
from sharded import cut
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Running
from proxprop.deferred.owners import load_of, moved

EVERY = Running(decay=0.8, update_every=1, invert_every=1)
TENTH = Running(decay=0.8, update_every=10, invert_every=10)
WAYS = {"inverse": math.inf, "gradient": 0.0}
RUNNING = {"every": EVERY, "tenth": TENTH}


def over_ranks(said: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def one_copy(kind: str) -> None:
    """Averages and inverses of all ranks together take the memory of one process; no rank has much more than others."""
    run = fresh(kind, "deep", replace(EVERY, copies=0.0))
    alone = fresh("alone", "deep", EVERY)
    batch = whole("deep")
    take_step(run, share(batch), "")
    take_step(alone, batch, "")
    held, expected = over_ranks(run[2].bytes_held), alone[2].bytes_held
    assert sum(held) == expected, (held, expected)
    assert max(held) <= 1.1 * expected / len(held), held
    state = over_ranks(sum(t.nbytes for name, t in run[2].state_dict().items() if name.endswith(".S")))
    assert 2 * sum(state) == expected, state


def as_said(kind: str, way: str) -> None:
    """What ranks have sent in a round of steps is S once to each owner, and what the routes say."""
    running = Running(decay=0.8, update_every=2, invert_every=4, copies=WAYS[way])
    run = fresh(kind, "deep", running)
    for _ in range(4):
        take_step(run, share(whole("deep")), "")
    ranks = dist.get_world_size()
    shards = ranks if kind == "fsdp" else 1
    clusters = run[2].clusters
    routed = sum(c.route.bytes for c in clusters)
    assert routed == sum(moved(load_of(c, running), c.way, ranks, shards) for c in clusters)
    S = 2 * (ranks - 1) * sum(load_of(c, running).matrix for c in clusters)
    assert {c.way for c in clusters} == {way}, [c.route for c in clusters]
    for cluster in clusters:
        assert f"{cluster.name}: deferred" in repr(run[2])
        assert f", on rank {cluster.owner}: {cluster.route.why}" in repr(run[2])
    assert sum(over_ranks(run[2].bytes_sent)) == pytest.approx(S + 4 * routed, rel=1e-12)


def offloaded(network: str, way: str) -> None:
    running = replace(EVERY, copies=WAYS[way])
    as_one_process("fsdp", "", network, running, offload_policy=CPUOffloadPolicy(pin_memory=False))


def halved_inverses_are_alike() -> None:
    """Ranks of DDP have the same directions to the bit, also where inverses are rounded; they lie alike in memory."""
    running = Running(update_every=1, invert_every=1, inverse_dtype=torch.bfloat16, copies=math.inf)
    model = DistributedDataParallel(NETWORKS["deep"].model().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = model, optimizer, proxprop.attach(optimizer, model, running=running)
    for _ in range(2):
        take_step(run, share(whole("deep")).float(), "")
    strides = [operator.kept.stride() for cluster in run[2].clusters for _, operator in cluster.pairs]
    assert over_ranks(strides) == [strides] * dist.get_world_size()
    for parameter in model.parameters():
        assert_same_on_all_ranks(parameter.grad)
        assert_same_on_all_ranks(parameter.detach())


def different_layers_are_refused() -> None:
    """A layer that one rank alone has converted is named on all ranks."""
    model = NETWORKS["deep"].model()
    wrapper = DistributedDataParallel(model)
    if dist.get_rank() == dist.get_world_size() - 1:
        model[2].requires_grad_(False)
    message = rf"different layers: on rank 0 .*name='2'.*on rank {dist.get_world_size() - 1} .*attach"
    with pytest.raises(RuntimeError, match=message):
        proxprop.attach(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    model[2].requires_grad_(True)
    handle = proxprop.attach(
        torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper
    )  # nothing was left behind
    handle.detach()


def trained_later(way: str) -> None:
    """A layer that is frozen when the model is attached, and trained later."""
    running = replace(EVERY, copies=WAYS[way])
    models = cut("even"), NETWORKS["even"].model()
    for model in models:
        model[0].requires_grad_(False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    run, alone = (
        (model, optimizer, proxprop.attach(optimizer, model, running=running))
        for model, optimizer in zip(models, optimizers, strict=True)
    )
    for step in range(6):
        for model in models:
            model[0].requires_grad_(step >= 3)
        batch = whole("even") * (1 + 0.1 * step)
        take_step(run, share(batch), "")
        take_step(alone, batch, "")
        assert_same_values(run[0], alone[0])


def bias_alone(way: str) -> None:
    """Weights are frozen after a step. Every output of a bias is a group then, and shards hold some of them."""
    running = replace(EVERY, copies=WAYS[way])
    run, alone = fresh("fsdp", "exact", running), fresh("alone", "exact", running)
    for step in range(3):
        for model in (run[0], alone[0]):
            model[0].weight.requires_grad_(step != 1)
        batch = whole("exact") * (1 + 0.1 * step)
        take_step(run, share(batch), "")
        take_step(alone, batch, "")
        assert_same_values(run[0], alone[0])


def in_turns(kind: str) -> None:
    """Large layers are inverted in the steps in which one process inverts them."""
    running = Running(decay=0.8, update_every=2, invert_every=4)
    run, alone = (fresh(k, "wide", running) for k in (kind, "alone"))
    assert len({cluster.turn for cluster in run[2].clusters}) > 1
    for step in range(9):
        batch = whole("wide") * (1 + 0.1 * step)
        take_step(run, share(batch), "")
        take_step(alone, batch, "")
        assert_same_values(run[0], alone[0])


CASES: dict[str, Callable[[], None]] = {
    **{f"owned-copy-{kind}": partial(one_copy, kind) for kind in ("ddp", "fsdp")},
    **{f"owned-said-{kind}-{way}": partial(as_said, kind, way) for kind in ("ddp", "fsdp") for way in WAYS},
    **{
        f"owned-{kind}-{network}-{way}-{often}": partial(
            as_one_process, kind, "accumulate", network, replace(RUNNING[often], copies=WAYS[way])
        )
        for kind, network in [("ddp", "even"), ("fsdp", "even"), ("ddp", "tied"), ("fsdp", "tied")]
        for way in WAYS
        for often in RUNNING
    },
    **{
        f"owned-{kind}-{network}-{way}": partial(
            as_one_process, kind, "", network, replace(EVERY, copies=WAYS[way])
        )
        for kind in ("ddp", "fsdp")
        for network in ("attention", "convnet", "cg")
        for way in WAYS
    },
    **{f"owned-offload-{way}": partial(offloaded, "even", way) for way in WAYS},
    **{f"owned-later-{way}": partial(trained_later, way) for way in WAYS},
    **{f"owned-bias-{way}": partial(bias_alone, way) for way in WAYS},
    **{f"owned-turns-{kind}": partial(in_turns, kind) for kind in ("ddp", "fsdp")},
    **{
        f"owned-hybrid-{way}": partial(
            as_one_process, "fsdp", "", "even", replace(EVERY, copies=WAYS[way]), hybrid=True
        )
        for way in WAYS
    },
    "owned-bf16": halved_inverses_are_alike,
    "owned-differ": different_layers_are_refused,
}
