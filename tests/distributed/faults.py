"""Numbers that are not finite, runs that resume, ranks that die."""

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel import wrapped
from networks import NETWORKS
from parity import assert_same_on_all_ranks, gathered, mean_square, share, whole
from sharded import cut, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Attached, Running

STEPS = 6
RUNNING = Running(decay=0.8, update_every=1, invert_every=2)


def broken_on_one_rank(where: str) -> None:
    """An infinite input, or a gradient that overflowed, of the last rank: all ranks have the same directions."""
    model, optimizer, _ = wrapped("exact")
    batch, last = share(whole("exact")).clone(), dist.get_rank() == dist.get_world_size() - 1
    if last and where == "S":
        batch[0, 0] = torch.inf
    loss = mean_square(model(batch))
    (loss * torch.nan if last and where == "G" else loss).backward()
    optimizer.step()
    for parameter in model.parameters():
        assert_same_on_all_ranks(parameter.grad)
    assert not model.module[0].weight.grad.isfinite().all()


def broken_running_average(kind: str) -> None:
    """A step whose S is not finite on one rank is left out of the average on all ranks."""
    model, optimizer, attached = fresh(kind)
    optimizer.param_groups[0]["lr"] = 0.0
    batch = share(whole("exact")).clone()
    for broken in (False, True, False):
        used = batch.clone()
        if broken and dist.get_rank() == 0:
            used[0, 0] = torch.inf
        optimizer.zero_grad()
        mean_square(model(used)).backward()
        optimizer.step()
    for name, value in attached.state_dict(whole=True).items():
        assert value.isfinite().all(), name
        assert_same_on_all_ranks(value)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: bool = True) -> None:
    """Steps on batches that depend on the step alone."""
    for step in steps:
        batch = whole("exact") * (1 + 0.1 * step)
        optimizer.zero_grad()
        mean_square(model(share(batch) if ranks else batch)).backward()
        optimizer.step()


def fresh(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Attached]:
    if "ddp" in kind:
        model: nn.Module = DistributedDataParallel(NETWORKS["exact"].model())
    elif "fsdp" in kind:
        model = cut("exact")
    else:
        model = NETWORKS["exact"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    running = replace(RUNNING, copies=0.0 if "owner" in kind else math.inf)
    return model, optimizer, proxprop.attach(optimizer, model, running=running)


def values(model: nn.Module) -> list[Tensor]:
    return [gathered(p).detach().clone() for p in model.parameters()]


def running_average_is_that_of_one_process(kind: str) -> None:
    model, optimizer, _ = fresh(kind)
    train(model, optimizer, range(STEPS))
    alone, reference, _ = fresh("alone")
    train(alone, reference, range(STEPS), ranks=False)
    for found, expected in zip(values(model), values(alone), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def checkpoint() -> Path:
    """Where ranks of one launch leave a checkpoint for those of a later one."""
    return Path(sys.argv[1]).parent / "checkpoint"


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, attached: Attached) -> dict[str, object]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "proxprop": attached.state_dict()}


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, attached: Attached) -> None:
    state = whole_state(model, optimizer, attached)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    attached.load_state_dict(state["proxprop"])


def resumed(kind: str) -> None:
    """Three steps, a checkpoint, three more in a fresh run: bit for bit the parameters of six steps at once."""
    path = checkpoint() / kind
    first = fresh(kind)
    train(*first[:2], range(3))
    dcp.save(whole_state(*first), checkpoint_id=path)
    second = fresh(kind)
    restore(path, *second)
    train(*second[:2], range(3, STEPS))
    train(*first[:2], range(3, STEPS))
    for found, expected in zip(values(second[0]), values(first[0]), strict=True):
        assert torch.equal(found, expected)


def resumed_on_other_ranks(kind: str) -> None:
    """The checkpoint of a launch with another number of ranks goes on as one process would have."""
    run = fresh(kind)
    restore(checkpoint() / kind, *run)
    train(*run[:2], range(3, STEPS))
    alone, reference, _ = fresh("alone")
    train(alone, reference, range(STEPS), ranks=False)
    for found, expected in zip(values(run[0]), values(alone), strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def rank_is_gone(stuck: bool) -> None:
    """The last rank has died, or is stuck, before its step: the others say so within the group's timeout."""
    model, optimizer = sharded("exact")
    mean_square(model(share(whole("exact")))).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2 * TIMEOUT if stuck else 0)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: S could not be summed.*another rank has died"):
        optimizer.step()
    assert time.monotonic() - start < 2 * TIMEOUT


KINDS = ("ddp", "fsdp", "ddp-owner", "fsdp-owner")
"""What spreads a model, and whether its inverses stay with their owners."""

CASES: dict[str, Callable[[], None]] = {
    "broken-S": partial(broken_on_one_rank, "S"),
    "broken-G": partial(broken_on_one_rank, "G"),
    **{f"broken-running-{kind}": partial(broken_running_average, kind) for kind in KINDS},
    **{f"running-{kind}": partial(running_average_is_that_of_one_process, kind) for kind in KINDS},
    **{f"resumed-{kind}": partial(resumed, kind) for kind in KINDS},
    **{f"moved-{kind}": partial(resumed_on_other_ranks, kind) for kind in KINDS},
}

TIMEOUT = 4
"""Seconds that ranks wait for each other in these:"""

FATAL: dict[str, Callable[[], None]] = {
    "rank-died": partial(rank_is_gone, stuck=False),
    "rank-stuck": partial(rank_is_gone, stuck=True),
}
