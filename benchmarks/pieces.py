"""Time whole training steps in deferred mode against BackProp's and immediate mode's, and the pieces of a solve.

    python benchmarks/pieces.py --device cuda --json results/bench/deferred-h200.json

Every method takes ten steps in turn, round after round, so that a ratio compares neighbours in time and a
factorisation every ten steps is counted once; the median over rounds is printed with its quartiles. All steps are
eager. Also measured: how far deferred directions are from immediate ones, and what a Gram matrix, a factorisation, a
solve, an inverse (ours and that of torch.linalg) and packing cost by size, from which docs/scaling.md is computed.
Needs torch alone; PYTHONPATH=src where proxprop is not installed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from networks import NETWORKS, Network
from step import Row, environment, numbers, save
from torch import nn
from ways import held_memory, make_optimizers, peak_memory, take_workspaces

import proxprop
from proxprop import Exact, Running
from proxprop.deferred.collectives import pack, packed_size, unpack
from proxprop.solvers.cholesky import factorize, factorize_whole

METHODS = ("backprop", "immediate", "deferred", "running-1", "running-10", "observe-10")
RUNNING = {
    "running-1": Running(update_every=1, invert_every=1),
    "running-10": Running(update_every=1, invert_every=10),
    "observe-10": Running(update_every=10, invert_every=10),
}
DEFAULT = ("mlp-500", "resnet18-128", "gpt2-block-8x1024")
SIZES = (256, 512, 1024, 2048, 4096, 8192, 11008)
STEPS = 10


def main() -> None:
    options = parse()
    take_workspaces(options.device)
    command = " ".join(sys.argv).split(" --json")[0]
    record = {"command": command, "environment": environment(options.device), "steps": STEPS}
    record |= {"rows": [], "pieces": [], "agreement": {}}
    for precision in options.precisions:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for name in options.networks:
            rows = measure(NETWORKS[name], precision, options)
            report(rows)
            record["rows"] += [asdict(row) for row in rows]
            save(record, options.json)
        record["pieces"] += [piece(size, precision, options.device) for size in options.sizes]
    for name in options.networks:
        record["agreement"][name] = difference(NETWORKS[name], options.device)
    print("largest relative difference of a deferred direction from the immediate one:", record["agreement"])
    save(record, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(DEFAULT), choices=list(NETWORKS))
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=("fp32", "tf32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="features of the pieces")
    parser.add_argument("--json", type=Path, help="write everything and the environment as JSON")
    return parser.parse_args()


def measure(network: Network, precision: str, options: argparse.Namespace) -> list[Row]:
    """Time every method on one network, round by round."""
    steps, memory = {}, {}
    for method in METHODS:
        others = held_memory(options.device)
        _, steps[method] = prepare(network, method, options.device)
        memory[method] = peak_memory(steps[method], options.device, others)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(options.rounds):
        for method, step in steps.items():
            times[method].append(seconds(step, options.device, STEPS) * 1e3)
    ratios = {
        m: [one / other for one, other in zip(times[m], times["backprop"], strict=True)] for m in METHODS
    }
    shares = {m: memory[m] / memory["backprop"] if memory["backprop"] else None for m in METHODS}
    return [
        Row(network.name, m, precision, **numbers(times[m], ratios[m]), memory=shares[m]) for m in METHODS
    ]


def prepare(network: Network, method: str, device: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model and a function that takes one training step of it."""
    torch.manual_seed(0)
    model, x = network.model().to(device), network.input().to(device)
    if method != "backprop":
        proxprop.convert(model, Exact(), tau_theta=1.0)
    with torch.no_grad():
        y = network.target(model(x)).to(device)
    (optimizer,) = make_optimizers(model, network.optimizer, device)
    if method == "deferred":
        proxprop.attach(optimizer, model)
    elif method in RUNNING:
        proxprop.attach(optimizer, model, running=RUNNING[method])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model(x)
        nn.functional.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return model, step


def difference(network: Network, device: str) -> float:
    """Largest relative difference between a parameter's deferred and immediate direction, in float64."""
    found = []
    for method in ("immediate", "deferred"):
        torch.manual_seed(0)
        model, x = network.model().to(device).double(), network.input().to(device).double()
        proxprop.convert(model, Exact(), tau_theta=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if method == "deferred":
            proxprop.attach(optimizer, model)
        model(x).square().mean().backward()
        optimizer.step()
        found.append([p.grad for p in model.parameters()])
    return max(float((d - i).norm() / i.norm()) for i, d in zip(*found, strict=True) if i.norm() > 0)


def piece(features: int, precision: str, device: str, samples: int = 8192) -> dict[str, float | str]:
    """Milliseconds of what one layer of this size adds: S from its rows, a factor, a solve, packing."""
    A = torch.randn(samples, features, device=device)
    S = (A.mT @ A)[None]
    B, packed = torch.randn_like(S), S.new_empty(packed_size(S.shape))
    factor = factorize(S.clone(), 1.0)
    parts = {
        "gram": lambda: A.mT @ A,
        "factor": lambda: factorize(S.clone(), 1.0),
        "solve": lambda: factor.prepared(B.shape[-1])(B),
        "inverse": lambda: factorize_whole(S.clone(), 1.0).inverse(),
        "library_inverse": lambda: torch.cholesky_inverse(torch.linalg.cholesky_ex(S)[0]),
        "pack": lambda: pack(S, packed),
        "unpack": lambda: unpack(packed, S),
        "plain": lambda: A @ S[0],
    }
    measured = {
        name: 1e3 * median(seconds(part, device, 1) for _ in range(5)) for name, part in parts.items()
    }
    return {"features": features, "outputs": features, "samples": samples, "precision": precision, **measured}


def seconds(work: Callable[[], object], device: str, times: int) -> float:
    """Mean seconds of `work`, the device's queue emptied before and after."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - start) / times


def report(rows: list[Row]) -> None:
    for r in rows:
        memory = f"{r.memory:.2f}" if r.memory else ""
        spread = f"{r.low:.2f}-{r.high:.2f}"
        print(
            f"{r.network:20}{r.precision:6}{r.method:12}{r.milliseconds:9.3f} ms{r.ratio:7.2f}{spread:>13}{memory:>7}",
            flush=True,
        )


if __name__ == "__main__":
    main()
