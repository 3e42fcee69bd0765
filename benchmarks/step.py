"""Time whole training steps of ProxProp against BackProp's, interleaved in one run, and print ratios.

    python benchmarks/step.py                                  # the paper's two networks at batch 500
    python benchmarks/step.py --networks all --out results/bench/cpu.json
    python benchmarks/step.py --spaces                         # also every space pinned, to check the plan

A step is forward, backward and optimizer. On a GPU both sides are captured in CUDA graphs and timed with events;
on a CPU with `torch.utils.benchmark`. Each round times every method once, and BackProp before and after it, so that a
ratio compares neighbours in time; the median over rounds is printed with its quartiles. Needs torch alone;
PYTHONPATH=src where proxprop is not installed.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from unittest import mock

import torch
from networks import NETWORKS, Network
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Timer

import proxprop
from proxprop import CG, Exact, tuning
from proxprop import device as rules

PRECISIONS = ("fp32", "tf32", "bf16")
METHODS = ("cg1", "cg3", "cg10", "exact", "adam", "muon", "isaac")
HOPELESS = 5
"""A pinned space is not timed if it takes so many times the FLOPs of the chosen one."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Set to 1, it has torch ask for huge pages for all large arrays on a CPU, BackProp's too."""

SOLVERS = {"cg1": CG(1), "cg3": CG(3), "cg10": CG(10), "exact": Exact()}


@dataclass(frozen=True)
class Row:
    """One method on one network: milliseconds, and its ratio to BackProp's step in the same round."""

    network: str
    method: str
    precision: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    predicted: float | None
    memory: float | None


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    take_workspaces(options.device)
    head, rows = {"command": command(), "environment": environment(options.device)}, []
    for name in list(NETWORKS) if options.networks == ["all"] else options.networks:
        for precision in options.precisions:
            rows += measure(NETWORKS[name], options, precision)
            save({**head, "rows": [asdict(row) for row in rows]}, options.out)
    print_table(rows)


def command() -> str:
    """What was called, without where to write to."""
    setting = [f"{HUGE_PAGES}={os.environ[HUGE_PAGES]}"] if HUGE_PAGES in os.environ else []
    return " ".join([*setting, *sys.argv]).split(" --out")[0]


def save(record: dict, path: Path | None) -> None:
    """Write what was measured so far."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="+", default=["mlp-500", "convnet-500"], choices=[*NETWORKS, "all"]
    )
    parser.add_argument("--methods", nargs="+", default=["cg1", "cg3", "cg10", "exact"], choices=METHODS)
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=PRECISIONS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spaces", action="store_true", help="also time every space pinned")
    graphs = parser.add_mutually_exclusive_group()
    graphs.add_argument("--eager", action="store_true", help="do not capture steps in CUDA graphs")
    graphs.add_argument(
        "--passes",
        action="store_true",
        help="capture the forward and the backward pass by torch.cuda.make_graphed_callables, not the optimizer",
    )
    parser.add_argument("--out", type=Path, help="write the rows and the environment as JSON")
    options = parser.parse_args()
    if options.passes and (options.device == "cpu" or options.spaces or "bf16" in options.precisions):
        parser.error("--passes is for a GPU, without --spaces, in fp32 and tf32")
    return options


def measure(network: Network, options: argparse.Namespace, precision: str) -> list[Row]:
    """Time every method on one network, round by round."""
    set_precision(precision)
    variants = [("backprop", None)] + [(method, None) for method in options.methods]
    if options.spaces:
        variants += [(m, space) for m in options.methods if m in SOLVERS for space in SOLVERS[m].spaces]
    steps, memory, predicted = {}, {}, {}
    for method, space in variants:
        name = f"{method}/{space}" if space else method
        try:
            others = held_memory(options.device)
            model, step = prepare(network, method, space, options, precision)
            predicted[name] = None if options.passes else prediction(network, model, options.device)
            if space and predicted[name] > HOPELESS * predicted[method]:
                raise ValueError(
                    f"{predicted[name] / predicted[method]:.0f} times the FLOPs of the chosen space"
                )
            again = partial(prepare, network, method, space, options, precision)
            memory[name] = memory_of(step, again, others, options)
            steps[name] = as_timed(step, options)
        except (
            RuntimeError,
            ImportError,
            ValueError,
            AssertionError,
        ) as error:  # isaac asserts what it takes
            print(f"{network.name} {name}: not timed: {str(error).splitlines()[0]}", file=sys.stderr)
    times, ratios = timed(steps, options)
    return [
        row(network.name, name, precision, times[name], ratios[name], predicted, memory) for name in steps
    ]


def set_precision(precision: str) -> None:
    """Let torch multiply in this precision."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # TF32 holds all of a bfloat16 number, and it is torch's default for convolutions.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def captures(options: argparse.Namespace) -> bool:
    """Whether whole steps are captured in CUDA graphs."""
    return options.device != "cpu" and not (options.eager or options.passes)


def as_timed(step: Callable, options: argparse.Namespace) -> Callable:
    """The step in the way that is timed."""
    return captured(step) if captures(options) else step


def memory_of(step: Callable, again: Callable, others: int, options: argparse.Namespace) -> float | None:
    """Most memory a step holds, in MiB, by what the device has to tell; `again` prepares the step anew."""
    if options.device == "cpu":
        return peak_memory_on_a_cpu(again)
    return None if options.passes else peak_memory(step, options.device, others, captures(options))


def timed(
    steps: dict[str, Callable],
    options: argparse.Namespace,
    within: Callable[[str], AbstractContextManager] = nullcontext,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of every method in every round, and their ratios to the mean of BackProp's before and after.

    A method runs within the context that `within` makes from its name.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        before = milliseconds(steps["backprop"], options.device)
        times["backprop"].append(before)
        ratios["backprop"].append(1.0)
        for name in [name for name in steps if name != "backprop"]:
            with within(name):
                took = milliseconds(steps[name], options.device)
            after = milliseconds(steps["backprop"], options.device)
            times[name].append(took)
            ratios[name].append(2 * took / (before + after))
            before = after
    return times, ratios


def row(
    network: str, name: str, precision: str, times: list[float], ratios: list[float], predicted, memory
) -> Row:
    low, high = quartiles(ratios)
    share = memory[name] / memory["backprop"] if memory["backprop"] else None
    return Row(network, name, precision, median(times), median(ratios), low, high, predicted[name], share)


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper one; both are the value where there is one."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else 3 * values
    return low, high


def prepare(
    network: Network, method: str, space: str | None, options: argparse.Namespace, precision: str
) -> tuple[nn.Module, Callable]:
    """A model and a function that takes one training step of it."""
    torch.manual_seed(0)
    device = options.device
    model, x = network.model().to(device), network.input().to(device)
    if method in SOLVERS:
        proxprop.convert(model, SOLVERS[method], tau_theta=1.0, space=space)
    elif method == "isaac":
        replace_by_isaac(model)
    with torch.no_grad():
        y = network.target(model(x)).to(device)
    optimizers = make_optimizers(model, method if method in ("adam", "muon") else network.optimizer, device)
    run = torch.cuda.make_graphed_callables(model, (x,)) if options.passes else model

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = run(x)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), y.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return model, step


def make_optimizers(model: nn.Module, name: str, device: str) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    capturable = {"capturable": True, "foreach": True} if device == "cuda" else {}
    if name == "sgd":
        return [torch.optim.SGD(parameters, lr=1e-6, momentum=0.95, nesterov=True)]
    if name == "adam":
        return [torch.optim.Adam(parameters, lr=1e-6, **capturable)]
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-6), torch.optim.Adam(others, lr=1e-6, **capturable)]


def replace_by_isaac(model: nn.Module) -> None:
    """Every linear layer but the last as `isaac.Linear`, the nearest relative: exact, bias left out."""
    import isaac

    layers = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    linear = [entry for entry in layers if type(entry[2]) is nn.Linear]
    if len(linear) < 2:
        raise ValueError("isaac has no layer for this network")
    for parent, name, child in linear[:-1]:
        new = isaac.Linear(child.in_features, child.out_features, bias=child.bias is not None, la=1.0)
        setattr(parent, name, new.to(child.weight.device))


def captured(step: Callable) -> Callable:
    """The step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    gc.collect()  # what is left of earlier steps would tie parameters to their streams
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Callable = step) -> None:  # the graph reads memory that only `step` keeps alive
        graph.replay()

    return replay


def milliseconds(step: Callable, device: str, least: float = 50.0) -> float:
    """Mean time of a step over enough of them to fill `least` milliseconds."""
    if device == "cpu":
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        once = 1e3 * timer.timeit(1).mean
        return once if once > least else 1e3 * timer.timeit(int(least / max(1e-3, once))).mean
    step()
    once = _events(step, 1)
    return _events(step, max(3, int(least / max(once, 1e-3))))


def _events(step: Callable, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def take_workspaces(device: str) -> None:
    """Let libraries take the memory that they keep for each thread and stream: it is not that of what comes first."""
    if device == "cuda":
        layers = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(tuning.STREAMS)))
        model = proxprop.convert(layers, CG(1), include_last=True)
        with as_if_captured():
            model(torch.ones(8, 64, device=device)).sum().backward()


@contextmanager
def as_if_captured() -> Iterator[None]:
    """Within, an eager step does what a captured one does; plain mocks would keep what they are asked about."""

    def is_captured(tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    with mock.patch.object(rules, "is_captured", is_captured):
        yield


def held_memory(device: str) -> int:
    """Bytes that are held before a step is made; only a GPU's allocator tells."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak_memory(step: Callable, device: str, others: int, captures: bool = False) -> float | None:
    """Most memory a step holds, in MiB, without what `others` held; only a GPU's allocator tells.

    The step is eager, but solves beside the backward pass if the one that is timed is captured, and so does.
    """
    if device == "cpu":
        step()
        return None
    with as_if_captured() if captures else nullcontext():
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**20


def peak_memory_on_a_cpu(prepared: Callable[[], tuple[nn.Module, Callable]]) -> float:
    """Most memory a model, its optimizer and its second step hold, in MiB, as torch's profiler sees it allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _, step = prepared()
        step()
        with record_function("second step"):
            step()
    events = profiler.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == "second step")
    held, most = 0, 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held) if event.start_ns() >= begin else most
    return most / 2**20


def prediction(network: Network, model: nn.Module, device: str) -> float | None:
    """The ratio that the plan's FLOPs predict for the products alone."""
    summary = proxprop.summary(model, network.input().to(device))
    base = sum(plan.backprop_flops for row in summary.rows for plan in row.plans)
    return 1 + summary.flops / base if base else None


def environment(device: str) -> dict[str, object]:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    # A copied tree has no repository to ask, or finds another's.
    commit = os.environ.get("COMMIT") or (asked.stdout.strip() if asked.returncode == 0 else "")
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": commit,
        "proxprop": proxprop.__version__,
    }


def print_table(rows: list[Row]) -> None:
    print(f"{'network':20}{'precision':10}{'method':20}{'ms':>9}{'ratio':>8}{'quartiles':>14}", end="")
    print(f"{'FLOPs say':>11}{'memory':>8}")
    for r in rows:
        predicted = f"{r.predicted:.2f}" if r.predicted else ""
        memory = f"{r.memory:.2f}" if r.memory else ""
        spread = f"{r.low:.2f}-{r.high:.2f}"
        print(
            f"{r.network:20}{r.precision:10}{r.method:20}{r.milliseconds:9.3f}{r.ratio:8.2f}{spread:>14}"
            f"{predicted:>11}{memory:>8}"
        )


if __name__ == "__main__":
    main()
