"""Measure what ranks cost: all-reduce by size, and whole DDP steps with and without `proxprop.attach`.

    for n in 1 2 4; do OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=$n benchmarks/scaling_ranks.py \
        --json results/scaling/gloo-$n.json; done

Runs on gloo processes of one machine; docs/scaling.md compares its model with these records.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from step import environment
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import proxprop
from proxprop import Exact, Running
from proxprop.deferred.packing import packed_size
from proxprop.distributed import Sums

BYTES = [2**k for k in range(10, 27, 2)]
WIDTHS = (256, 512)
"""Every hidden layer of a step's network has this many inputs and outputs."""

BATCH = 512
METHODS = ("backprop", "immediate", "deferred", "running-10")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*proxprop.attach")  # immediate mode is measured too
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    record = {
        "command": f"torchrun --nproc-per-node={dist.get_world_size()} {sys.argv[0]}",
        "environment": environment("cpu"),
        "ranks": dist.get_world_size(),
        "all_reduce": [reduction(size, options.rounds) for size in BYTES],
        "packed": [packed(width, options.rounds) for width in WIDTHS],
        "steps": [row for width in WIDTHS for row in steps(width, options.rounds)],
    }
    if dist.get_rank() == 0:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(options.json)
    dist.destroy_process_group()


def reduction(size: int, rounds: int) -> dict[str, float]:
    flat = torch.zeros(size // 4)
    return {"bytes": size, "milliseconds": timed(lambda: dist.all_reduce(flat), rounds)}


def packed(width: int, rounds: int) -> dict[str, float]:
    """Packing, sending and unpacking one S."""
    S, sums = torch.zeros(1, width, width), Sums(dist.group.WORLD)
    return {
        "features": width,
        "bytes": 4 * packed_size(S.shape),
        "milliseconds": timed(lambda: sums.send([S]).wait(), rounds),
    }


def steps(width: int, rounds: int) -> list[dict[str, float | str]]:
    """A DDP step of every method, in turn, round by round."""
    work = {method: prepare(width, method) for method in METHODS}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, step in work.items():
            times[method].append(timed(step, 1, times=10 if method == "running-10" else 2))
    ratios = {
        method: median(t / b for t, b in zip(times[method], times["backprop"], strict=True))
        for method in METHODS
    }
    # Neighbours in time are compared, because the machine's speed drifts.
    added = {
        method: quantiles([t - i for t, i in zip(times[method], times["immediate"], strict=True)], n=4)
        for method in METHODS
    }
    return [
        {
            "width": width,
            "batch": BATCH,
            "method": m,
            "milliseconds": median(times[m]),
            "ratio": ratios[m],
            "beyond_immediate": added[m],
        }
        for m in METHODS
    ]


def prepare(width: int, method: str) -> Callable[[], None]:
    torch.manual_seed(0)
    hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    if method != "backprop":
        proxprop.convert(model, Exact(), tau_theta=1.0, space="feature")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    if method == "deferred":
        proxprop.attach(optimizer, wrapped)
    elif method == "running-10":
        proxprop.attach(optimizer, wrapped, running=Running(update_every=1, invert_every=10))
    x, y = torch.randn(BATCH, width), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def timed(work: Callable[[], object], rounds: int, times: int = 3) -> float:
    """Median over rounds of the slowest rank's mean milliseconds."""
    found = []
    work()
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        spent = torch.tensor((time.perf_counter() - start) / times)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        found.append(1e3 * float(spent))
    return median(found)


if __name__ == "__main__":
    main()
