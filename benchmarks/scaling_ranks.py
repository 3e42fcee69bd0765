"""Count what ranks hold, send and invert, and time the collectives that S takes.

    for n in 1 2 3 4; do OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=$n benchmarks/scaling_ranks.py \
        --json results/scaling/gloo-$n.json; done

Runs on gloo processes of one machine; docs/scaling.md compares its model with these records.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from step import environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Attached, Exact, Running

BYTES = [2**k for k in range(10, 25, 2)]
WIDTH, DEPTH, BATCH = 256, 12, 512
"""A step's network has so many hidden layers with this many inputs and outputs."""

STEPS = 10
COPIES = {"gradient": 0.0, "inverse": math.inf}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    record = {
        "command": f"torchrun --nproc-per-node={dist.get_world_size()} {sys.argv[0]}",
        "environment": environment("cpu"),
        "ranks": dist.get_world_size(),
        "width": WIDTH,
        "depth": DEPTH,
        "steps": STEPS,
        "collectives": [collectives(size, options.rounds) for size in BYTES],
        "counts": [counts(kind, way) for kind in ("ddp", "fsdp") for way in COPIES],
    }
    if dist.get_rank() == 0:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(options.json)
    dist.destroy_process_group()


def collectives(size: int, rounds: int) -> dict[str, float]:
    """S as it was sent before there were owners, as it is sent, and an inverse; by turns, as the machine drifts."""
    flat = torch.zeros(size // 4)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(flat),
        "reduce": lambda: dist.reduce(flat, 0),
        "broadcast": lambda: dist.broadcast(flat, 0),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            found[name].append(timed(call))
    return {"bytes": size, **{name: median(times) for name, times in found.items()}}


def counts(kind: str, way: str) -> dict[str, Any]:
    """What each rank holds after a round of steps, has sent in it, and inverts."""
    torch.manual_seed(0)
    attached = train(kind, Running(copies=COPIES[way]))
    traffic = attached.reduction.ranks.traffic.bytes
    own = [cluster for cluster in attached.clusters if cluster.mine]
    here = {
        "held": attached.bytes_held,
        "averages": sum(t.nbytes for name, t in attached.state_dict().items() if name.endswith(".S")),
        "inverted": len(own),
        "sent": {name: traffic[name] for name in ("S", "inverses", "gradients", "directions")},
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, here)
    return {"kind": kind, "way": way, "ranks": everyones}


def train(kind: str, running: Running) -> Attached:
    hidden = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
    proxprop.convert(model, Exact())
    if kind == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = model
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    attached = proxprop.attach(optimizer, wrapped, running=running)
    x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return attached


def timed(work: Callable[[], object], times: int = 3) -> float:
    """The slowest rank's mean milliseconds."""
    work()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        work()
    spent = torch.tensor((time.perf_counter() - start) / times)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return 1e3 * float(spent)


if __name__ == "__main__":
    main()
