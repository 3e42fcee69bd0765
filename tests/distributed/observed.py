"""Running averages whose S is observed in some steps only: the parameters of one process, and nothing sent between."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from data_parallel import Forked
from networks import NETWORKS
from parity import assert_same_on_all_ranks, gathered, mean_square, share, whole
from sharded import cut
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Attached, Running

RUNNING = Running(decay=0.8, update_every=2, invert_every=4)
STEPS = 7

Run = tuple[nn.Module, torch.optim.Optimizer, Attached]


def fresh(kind: str, network: str = "even", running: Running = RUNNING, **options: object) -> Run:
    model = cut(network, **options) if kind == "fsdp" else NETWORKS[network].model()
    if kind == "ddp":
        model = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, proxprop.attach(optimizer, model, running=running)


def unsynchronised(model: nn.Module, last: bool) -> object:
    """A micro-batch whose gradients are not averaged yet, unless it is the last one."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def take_step(run: Run, batch: Tensor, how: str) -> None:
    model, optimizer, attached = run
    optimizer.zero_grad(set_to_none="in-place" not in how)
    parts = batch.chunk(2) if "accumulate" in how else [batch]
    if "skip" in how:
        mean_square(1e3 * model(batch)).backward()
        optimizer.zero_grad(set_to_none="in-place" not in how)
    for i, part in enumerate(parts):
        with unsynchronised(model, i == len(parts) - 1):
            (mean_square(model(part)) / len(parts)).backward()
    if "clip" in how:
        attached.solve()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def assert_same_values(model: nn.Module, alone: nn.Module) -> None:
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(gathered(found), expected, rtol=1e-9, atol=1e-12)


def calls(run: Run) -> int:
    """How often S was sent."""
    found: int = run[2].reduction.ranks.traffic.calls["S"]
    return found


def as_one_process(
    kind: str, how: str, network: str = "even", running: Running = RUNNING, **options: object
) -> None:
    run, alone = fresh(kind, network, running, **options), fresh("alone", network, running)
    for step in range(max(STEPS, running.invert_every + 2)):
        batch = whole(network) * (1 + 0.1 * step)
        sent = calls(run)
        take_step(run, share(batch), how)
        assert (calls(run) > sent) == (step % running.update_every == 0), f"step {step}"
        take_step(alone, batch, how.replace("accumulate", ""))
        assert_same_values(run[0], alone[0])


Uses = Callable[[int, int], bool]
"""Whether a rank uses a layer in a step."""


def alternating(rank: int, step: int) -> bool:
    return (rank + step) % 2 == 0


def on_rank_zero_later(rank: int, step: int) -> bool:
    return step == 0 or rank == 0


def on_no_rank_at_first(rank: int, step: int) -> bool:
    return step not in (0, 3)


def layer_unused_on_ranks(
    used: Uses, to_none: bool = True, tied: bool = False, frozen: str = "", damping: float | None = 0.3
) -> None:
    """A rank that did not use a layer applies what is kept to the gradient that came from the others.

    Args:
        used: whether a rank uses the layer in a step.
        to_none: how gradients are zeroed.
        tied: whether another layer shares its weight.
        frozen: parameters that are trained in the first step alone.
        damping: of the running average.
    """

    def build() -> nn.Module:
        torch.manual_seed(1)
        plain = Forked().double()
        if tied:
            plain.second.weight = plain.first.weight
        return proxprop.convert(plain, proxprop.Exact())

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        batch = whole("exact").chunk(dist.get_world_size())[rank] * (1 + step)
        return mean_square(model(batch, used(rank, step)))

    model, alone = DistributedDataParallel(build(), find_unused_parameters=True), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for optimizer, each in zip(optimizers, (model, alone), strict=True):
        proxprop.attach(optimizer, each, running=replace(RUNNING, damping=damping))
    ranks = dist.get_world_size()
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for name in frozen.split():
            for each in (model.module, alone):
                each.get_parameter(name).requires_grad_(step == 0)
        loss(model, dist.get_rank(), step).backward()
        sum(loss(alone, rank, step) for rank in range(ranks)).div(ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same_values(model, alone)


def uneven_inputs() -> None:
    """Ranks that have run out of inputs count the steps of those that have not."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer, attached = fresh("ddp", "exact")
    alone, reference, _ = fresh("alone", "exact")
    batches = whole("exact").chunk(ranks)
    lengths = [3 + 2 * r for r in range(ranks)]
    with Join([model, attached]):
        for step in range(lengths[rank]):
            optimizer.zero_grad()
            mean_square(model(batches[rank] * (1 + step))).backward()
            optimizer.step()
    for step in range(max(lengths)):
        reference.zero_grad()
        for r in range(ranks):
            if step < lengths[r]:
                (mean_square(alone(batches[r] * (1 + step))) / ranks).backward()
        reference.step()
    assert_same_values(model, alone)
    for value in attached.state_dict(whole=True).values():
        assert_same_on_all_ranks(value)


def wrapped_and_resumed_between() -> None:
    """A run that resumes in a step that is not observed, with a wrapper that was put around after `attach`."""
    first = fresh("ddp", "even")
    batch = share(whole("even"))
    for _ in range(3):
        take_step(first, batch, "")
    model, optimizer, attached = fresh("alone", "even")
    model.load_state_dict(first[0].module.state_dict())
    attached.load_state_dict(first[2].state_dict(whole=True))
    second = DistributedDataParallel(model), optimizer, attached
    for _ in range(4):
        take_step(first, batch, "")
        take_step(second, batch, "")
        # DDP's buckets are others in its first step, in which three or more ranks may be added in another order
        rounding = 0.0 if dist.get_world_size() == 2 else 1e-12
        for found, expected in zip(second[0].parameters(), first[0].parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=rounding, atol=rounding)


def frozen_and_wrapped() -> None:
    """Ranks agree on which layers start anew, where a layer was frozen before a wrapper was met."""
    running = replace(RUNNING, copies=0.0)
    run, alone = (fresh("alone", "even", running) for _ in range(2))
    batch = whole("even")
    for each in (run, alone):
        take_step(each, batch, "")
        each[0][0].bias.requires_grad_(False)
    run = DistributedDataParallel(run[0]), *run[1:]
    for _ in range(3):
        take_step(run, share(batch), "")
        take_step(alone, batch, "")
        assert_same_values(run[0], alone[0])


WAYS = ("", "in-place", "clip", "clip-in-place", "accumulate", "accumulate-in-place", "skip", "skip-in-place")

CASES: dict[str, Callable[[], None]] = {
    **{f"observe-ddp{'-' if how else ''}{how}": partial(as_one_process, "ddp", how) for how in WAYS},
    **{f"observe-fsdp{'-' if how else ''}{how}": partial(as_one_process, "fsdp", how) for how in WAYS},
    "observe-ddp-attention": partial(as_one_process, "ddp", "", network="attention"),
    "observe-fsdp-attention": partial(as_one_process, "fsdp", "clip", network="attention"),
    "observe-ddp-bucket-view": partial(as_one_process, "ddp", "clip-in-place", gradient_as_bucket_view=True),
    "observe-ddp-static-graph": partial(as_one_process, "ddp", "clip", static_graph=True),
    "observe-ddp-unused": partial(layer_unused_on_ranks, alternating),
    "observe-ddp-unused-in-place": partial(layer_unused_on_ranks, alternating, to_none=False),
    "observe-ddp-unused-by-all": partial(layer_unused_on_ranks, on_no_rank_at_first),
    "observe-ddp-unused-by-all-absolute": partial(layer_unused_on_ranks, on_no_rank_at_first, damping=None),
    "observe-ddp-unused-frozen": partial(layer_unused_on_ranks, on_rank_zero_later, frozen="second.bias"),
    "observe-ddp-tied-unused": partial(layer_unused_on_ranks, on_no_rank_at_first, tied=True),
    "observe-ddp-tied-unused-absolute": partial(
        layer_unused_on_ranks, on_no_rank_at_first, tied=True, damping=None
    ),
    "observe-ddp-tied-frozen": partial(
        layer_unused_on_ranks, on_rank_zero_later, tied=True, frozen="first.weight second.bias"
    ),
    "observe-ddp-join": uneven_inputs,
    "observe-ddp-frozen": frozen_and_wrapped,
    "observe-ddp-resumed": wrapped_and_resumed_between,
}
