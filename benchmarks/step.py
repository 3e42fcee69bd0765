"""Time whole training steps of ProxProp against BackProp's, interleaved in one run, and print ratios.

    python benchmarks/step.py                                  # the paper's two networks at batch 500
    python benchmarks/step.py --networks all --out results/bench/cpu.json
    python benchmarks/step.py --ways eager compile             # in several ways, BackProp's step in the same one
    python benchmarks/step.py --spaces                         # also every space pinned, to check the plan

A step is forward, backward and optimizer. `ways.py` says in which ways it runs; unless told otherwise it is captured
in a CUDA graph on a GPU, and eager on a CPU. A GPU is timed with events, a CPU with `torch.utils.benchmark`. Each
round times every method once, and BackProp before and after it, so that a ratio compares neighbours in time; the
median over rounds is printed with its quartiles. What fails is recorded with its error, and the rest goes on. Needs
torch alone; PYTHONPATH=src where proxprop is not installed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median, quantiles

import torch
from networks import NETWORKS, Network
from torch import nn
from torch.utils.benchmark import Timer
from ways import (
    SOLVERS,
    STEPS_TO_REPLAY,
    WAYS,
    Step,
    as_timed,
    held_memory,
    memory_of,
    prepare,
    take_workspaces,
    usual,
)

import proxprop

PRECISIONS = ("fp32", "tf32", "bf16")
METHODS = ("cg1", "cg3", "cg10", "exact", "adam", "muon", "isaac")
HOPELESS = 5
"""A pinned space is not timed if it takes so many times the FLOPs of the chosen one."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Set to 1, it has torch ask for huge pages for all large arrays on a CPU, BackProp's too."""


@dataclass(frozen=True)
class Row:
    """One method on one network: milliseconds, and its ratio to BackProp's step in the same round, or its error."""

    network: str
    method: str
    precision: str
    milliseconds: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    predicted: float | None = None
    memory: float | None = None
    way: str | None = None
    error: str | None = None


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    take_workspaces(options.device)
    head, rows = {"command": command(), "environment": environment(options.device)}, []
    names = list(NETWORKS) if options.networks == ["all"] else options.networks
    for name, precision, way in product(names, options.precisions, options.ways):
        rows += measure(NETWORKS[name], argparse.Namespace(**vars(options), way=way), precision)
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="to run a step; see ways.py")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spaces", action="store_true", help="also time every space pinned")
    parser.add_argument(
        "--seconds",
        type=float,
        default=inf,
        help="begin with no other method after so many, but time what is ready",
    )
    parser.add_argument("--out", type=Path, help="write the rows and the environment as JSON")
    options = parser.parse_args()
    options.ways = options.ways or [usual(options.device)]
    options.deadline = time.monotonic() + options.seconds
    if options.device == "cpu" and (missing := [way for way in options.ways if WAYS[way].needs_gpu]):
        parser.error(f"needs a GPU: {', '.join(missing)}")
    return options


def measure(network: Network, options: argparse.Namespace, precision: str) -> list[Row]:
    """Time every method on one network in one way, round by round."""
    set_precision(precision)
    torch.compiler.reset()
    built: dict[str, Built] = {}
    errors: dict[str, str] = {}
    for method, space in variants(options):
        name = f"{method}/{space}" if space else method
        chosen = built[method].predicted if space and method in built else None
        try:
            if time.monotonic() > options.deadline:
                raise ValueError("no time was left")
            built[name] = build(network, method, space, options, precision, chosen)
        except Exception as error:  # whatever it is, other methods can still be measured
            errors[name] = told(error, f"{network.name} {precision} {options.way} {name}")
    start = partial(Row, network.name, precision=precision, way=options.way)
    failed = [start(name, error=error) for name, error in errors.items()]
    if "backprop" in errors:
        return failed
    try:
        times, ratios = timed({name: of.step for name, of in built.items()}, options)
    except Exception as error:
        text = told(error, f"{network.name} {precision} {options.way}")
        return failed + [start(name, error=text) for name in built]
    return [
        start(name, **numbers(times[name], ratios[name]), **built[name].beside(built["backprop"]))
        for name in built
    ] + failed


def variants(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Each method, and the space it is pinned to."""
    found: list[tuple[str, str | None]] = [(method, None) for method in ("backprop", *options.methods)]
    if options.spaces:
        found += [(m, space) for m in options.methods if m in SOLVERS for space in SOLVERS[m].spaces]
    return found


@dataclass(frozen=True)
class Built:
    """A step that is ready to be timed, the ratio that FLOPs predict for it, and the MiB it holds."""

    step: Step
    predicted: float | None
    memory: float | None

    def beside(self, base: "Built") -> dict[str, float | None]:
        """What a row says of it beside BackProp's."""
        share = self.memory / base.memory if self.memory and base.memory else None
        return {"predicted": self.predicted, "memory": share}


def build(
    network: Network,
    method: str,
    space: str | None,
    options: argparse.Namespace,
    precision: str,
    chosen: float | None,
) -> Built:
    """Make a step and run it until it is warm; `chosen` is what FLOPs predict for the space of the plan."""
    began, others = time.perf_counter(), held_memory(options.device)
    model, step = prepare(network, method, space, options, precision)
    predicted = prediction(network, model, options.device)
    if predicted and chosen and predicted > HOPELESS * chosen:
        raise ValueError(f"{predicted / chosen:.0f} times the FLOPs of the chosen space")
    again = partial(prepare, network, method, space, options, precision)
    memory = memory_of(step, again, others, options)
    ready = Built(as_timed(step, options), predicted, memory)
    took = time.perf_counter() - began
    print(f"{network.name} {precision} {options.way} {method}: ready after {took:.1f} s", file=sys.stderr)
    return ready


def told(error: Exception, where: str) -> str:
    """An error in one line, of which stderr gets all."""
    print(f"{where}: not timed", file=sys.stderr)
    if not isinstance(error, (ImportError, ValueError)):
        traceback.print_exception(error)
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"


def set_precision(precision: str) -> None:
    """Let torch multiply in this precision."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # TF32 holds all of a bfloat16 number, and it is torch's default for convolutions.
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def timed(
    steps: dict[str, Step],
    options: argparse.Namespace,
    within: Callable[[str], AbstractContextManager] = nullcontext,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of every method in every round, and their ratios to the mean of BackProp's before and after.

    A method runs within the context that `within` makes from its name.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items() if options.device == "cuda" else ():
        with within(name):
            for _ in range(STEPS_TO_REPLAY):
                step()
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


def numbers(times: list[float], ratios: list[float]) -> dict[str, float]:
    """What a row says of the rounds."""
    low, high = quartiles(ratios)
    return {"milliseconds": median(times), "ratio": median(ratios), "low": low, "high": high}


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper one; both are the value where there is one."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else 3 * values
    return low, high


def milliseconds(step: Step, device: str, least: float = 50.0) -> float:
    """Mean time of a step over enough of them to fill `least` milliseconds."""
    if device == "cpu":
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        once = 1e3 * timer.timeit(1).mean
        return once if once > least else 1e3 * timer.timeit(int(least / max(1e-3, once))).mean
    step()
    once = _events(step, 1)
    return _events(step, max(3, int(least / max(once, 1e-3))))


def _events(step: Step, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def prediction(network: Network, model: nn.Module, device: str) -> float | None:
    """The ratio that the plan's FLOPs predict for the products alone."""
    summary = proxprop.summary(model, network.input().to(device))
    base = sum(plan.backprop_flops for row in summary.rows for plan in row.plans)
    return 1 + summary.flops / base if base else None


def current_commit() -> str:
    """The commit that is checked out; a copied tree has no repository to ask, or finds another's."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or (asked.stdout.strip() if asked.returncode == 0 else "")


def environment(device: str) -> dict[str, object]:
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()}"
    )
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": current_commit(),
        "proxprop": proxprop.__version__,
    }


def print_table(rows: list[Row]) -> None:
    print(
        f"{'network':20}{'precision':10}{'way':16}{'method':20}{'ms':>9}{'ratio':>8}{'quartiles':>14}", end=""
    )
    print(f"{'FLOPs say':>11}{'memory':>8}")
    for r in rows:
        print(f"{r.network:20}{r.precision:10}{r.way or '':16}{r.method:20}", end="")
        if r.error is not None:
            print(f"  {r.error}")
            continue
        predicted = f"{r.predicted:.2f}" if r.predicted else ""
        memory = f"{r.memory:.2f}" if r.memory else ""
        spread = f"{r.low:.2f}-{r.high:.2f}"
        print(f"{r.milliseconds:9.3f}{r.ratio:8.2f}{spread:>14}{predicted:>11}{memory:>8}")


if __name__ == "__main__":
    main()
