"""Tensor parallel layers: the directions of one process, with outputs, features or positions cut over ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from networks import NETWORKS
from observed import assert_same_values
from owned import EVERY, WAYS
from parity import assert_parity, mean_square, one_process, whole
from sharded import mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Running

PLANS = {
    "both": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "colwise": {"0": ColwiseParallel(output_layouts=Replicate())},
    "rowwise": {"2": RowwiseParallel(input_layouts=Replicate())},
}


def one_step(plan: str) -> None:
    """Every rank sees the whole batch, and has the direction of one process with it."""
    model = parallelize_module(NETWORKS["even"].model(), mesh(), PLANS[plan])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = proxprop.attach(optimizer, model)
    mean_square(model(whole("even"))).backward()
    optimizer.step()
    assert_parity(model, one_process("even"))
    assert attached.reduction.ranks.traffic.bytes["S"] == 0  # every rank has it


def averaged(plan: str, way: str) -> None:
    """Running averages, over several steps."""
    model = parallelize_module(NETWORKS["even"].model(), mesh(), PLANS[plan])
    as_one_process(model, "even", replace(EVERY, update_every=1, invert_every=2, copies=WAYS[way]))


def as_one_process(model: nn.Module, network: str, running: Running, ranks: int = 1, rank: int = 0) -> None:
    alone = NETWORKS[network].model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for optimizer, each in zip(optimizers, (model, alone), strict=True):
        proxprop.attach(optimizer, each, running=running)
    for step in range(4):
        batch = whole(network) * (1 + 0.1 * step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_square(model(batch.chunk(ranks)[rank])).backward()
        mean_square(alone(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same_values(model, alone)


def sequence_parallel() -> None:
    """Normalisations whose positions are cut over ranks, between tensor parallel layers."""
    model = NETWORKS["sequence"].model()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model)
    mean_square(model(whole("sequence"))).backward()
    optimizer.step()
    assert_parity(model, one_process("sequence"))


def with_fsdp(way: str) -> None:
    """Two ranks of tensor parallelism, and FSDP2 over the others."""
    ranks = dist.get_world_size()
    both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(NETWORKS["even"].model(), both["tensor"], PLANS["both"])
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=both["data"])
    fully_shard(model, mesh=both["data"])
    running = replace(EVERY, copies=WAYS[way])
    as_one_process(model, "even", running, ranks // 2, both["data"].get_local_rank())


def with_ddp_is_refused() -> None:
    model = NETWORKS["even"].model()[:3]
    parallelize_module(model, mesh(), PLANS["both"])
    wrapper = DistributedDataParallel(model, init_sync=False)
    proxprop.attach(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    with pytest.raises(
        TypeError, match=r"^0: weight is .*DistributedDataParallel does not tell.*fully_shard"
    ):
        wrapper(whole("even"))


CASES: dict[str, Callable[[], None]] = {
    **{f"tensor-{plan}": partial(one_step, plan) for plan in PLANS},
    **{f"tensor-{plan}-{way}": partial(averaged, plan, way) for plan in PLANS for way in WAYS},
    "tensor-sequence": sequence_parallel,
    **{f"tensor-fsdp-{way}": partial(with_fsdp, way) for way in WAYS},
    "tensor-ddp-refused": with_ddp_is_refused,
}
