"""Time whole training steps in deferred mode against the same optimizer without proxprop, in three ways of running.

    python benchmarks/deferred.py --json results/bench/running-h200.json         # about four minutes on an H200
    python benchmarks/deferred.py --ways eager --networks gpt mlp                # less
    python benchmarks/deferred.py --device cpu --small --ways eager compile      # whether it runs

Ways of running are eager steps, `torch.compile` of the model, and CUDA graphs of whole steps: one for every step of a
period, replayed in turn. A method takes its period of steps (as many as between two inversions of a layer) and the
plain optimizer ten, round after round, so that a ratio compares neighbours in time. Each step is timed by itself, after
a first period. A section that fails says so and the others go on. Needs torch alone; PYTHONPATH=src where proxprop is
not installed.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from networks import Block
from step import environment, quartiles, save
from torch import Tensor, nn
from torch.nn import functional
from ways import STEPS_TO_REPLAY

import proxprop
from proxprop import Exact, Running
from proxprop.deferred.preconditioner import inverse
from proxprop.lab.models import ResNet18, mlp
from proxprop.recipe import RUNNING
from proxprop.replay import held_bytes

WAYS = ("eager", "graph", "compile")
METHODS = {
    "every 10": Running(update_every=10, invert_every=10),
    "every 32": Running(update_every=32, invert_every=32),
    "S of every step": Running(update_every=1, invert_every=10),
    "every 10, bfloat16 inverse": Running(update_every=10, invert_every=10, inverse_dtype=torch.bfloat16),
    "as wrap": RUNNING,  # a root, made anew in one step of 40
    "deferred": None,
}
PLAIN_STEPS = 10


class GPT(nn.Module):
    """A GPT-2 of 12 blocks, or of few small ones."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        layers, width, heads, self.words = (2, 64, 4, 256) if small else (12, 768, 12, 8192)
        self.tokens, self.positions = nn.Embedding(self.words, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, positions]."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))


@dataclass(frozen=True)
class Case:
    """A network, its batch, precision and optimizer, and the methods to time."""

    model: Callable[[bool], nn.Module]
    batch: Callable[[bool], tuple[Tensor, Tensor]]
    precision: str
    methods: tuple[str, ...]
    adam: bool = False
    channels_last: bool = False


def tokens(small: bool) -> tuple[Tensor, Tensor]:
    shape, words = ((2, 16), 256) if small else ((8, 1024), 8192)
    return torch.randint(words, shape), torch.randint(words, shape)


def images(small: bool) -> tuple[Tensor, Tensor]:
    batch = 4 if small else 128
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def vectors(width: int, batch: int, classes: int | None) -> Callable[[bool], tuple[Tensor, Tensor]]:
    """Rows and their class, or the rows again."""

    def make(small: bool) -> tuple[Tensor, Tensor]:
        x = torch.rand(8 if small else batch, width)
        return x, torch.randint(classes, (len(x),)) if classes else x

    return make


CASES = {
    "gpt": Case(GPT, tokens, "bf16", tuple(METHODS)[:5], adam=True),
    "resnet18": Case(lambda _: ResNet18(3, 10), images, "bf16", ("every 10",), channels_last=True),
    "mlp": Case(
        lambda _: mlp([3072, 4000, 1000, 4000, 10]), vectors(3072, 500, 10), "fp32",
        ("every 10", "as wrap", "deferred"),
    ),
    "autoencoder": Case(
        lambda _: mlp([784, 1000, 500, 250, 30, 250, 500, 1000, 784]), vectors(784, 1000, None), "tf32",
        ("every 10",), adam=True,
    ),
    "resnet18-fp32": Case(lambda _: ResNet18(3, 10), images, "fp32", ("deferred",)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A method on a network in one way of running; times in milliseconds, ratios to the plain optimizer's step.

    Attributes:
        ratio, low, high: of the mean step, the median over rounds and its quartiles.
        step, longest: the median step and the longest of a period, the median over rounds.
        plain: the plain optimizer's median step.
        memory: peak memory, beside the plain optimizer's.
        state: bytes of averages and inverses, in units of S.
    """

    network: str
    precision: str
    way: str
    method: str
    ratio: float
    low: float
    high: float
    step: float
    longest: float
    plain: float
    memory: float | None
    state: float | None


class Training:
    """A model in one way of running, and its next step.

    Args:
        case: what to train.
        way: how.
        converted: whether methods will be attached to it.
    """

    def __init__(self, case: Case, way: str, converted: bool, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.case, self.way, self.device = case, way, options.device
        self.others = held(self.device)
        layout = {"memory_format": torch.channels_last} if case.channels_last else {}
        self.model = case.model(options.small).to(self.device, **layout)
        self.x, self.y = (t.to(self.device) for t in case.batch(options.small))
        if case.channels_last:
            self.x = self.x.to(**layout)
        if converted:
            proxprop.convert(self.model, Exact())
        self.optimizer = self._optimizer()
        self.call = torch.compile(self.model) if way == "compile" else self.model
        self.handle: proxprop.Attached | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.taken = 0

    def _optimizer(self) -> torch.optim.Optimizer:
        if not self.case.adam:
            return torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        on_a_gpu = {"fused": True, "capturable": self.way == "graph"} if self.device == "cuda" else {}
        return torch.optim.AdamW(self.model.parameters(), lr=1e-6, **on_a_gpu)

    def attach(self, method: str) -> None:
        """Go over to a method."""
        self.graphs = []
        if self.handle is not None:
            self.handle.detach()
        gc.collect()
        self.handle = proxprop.attach(self.optimizer, self.model, running=METHODS[method])
        self.taken = 0

    def eager(self) -> None:
        """One step, as written."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.case.precision == "bf16"):
            output = self.call(self.x)
        if self.y.is_floating_point():
            loss = functional.mse_loss(output.float(), self.y)
        else:
            loss = functional.cross_entropy(output.float().flatten(0, -2), self.y.flatten())
        loss.backward()
        self.optimizer.step()

    def capture(self, period: int) -> None:
        """Make a CUDA graph of each step of a period."""
        pool = torch.cuda.graph_pool_handle()
        for _ in range(period):
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, pool=pool):
                self.eager()
            self.graphs.append(graph)

    def warm_up(self, period: int) -> None:
        """Take steps until all that is captured of eager ones is, or capture whole steps after a first period."""
        if self.way != "graph":
            for _ in range(max(period, min(STEPS_TO_REPLAY * period, 100))):
                self.eager()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(max(period, 3)):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()
        self.capture(period)

    def step(self) -> None:
        """The next step in this way of running."""
        if self.graphs:
            self.graphs[self.taken % len(self.graphs)].replay()
        else:
            self.eager()
        self.taken += 1


def held(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def times(step: Callable[[], None], count: int, device: str) -> list[float]:
    """Milliseconds of each of some steps."""
    if device != "cuda":
        found = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            found.append((time.perf_counter() - began) * 1e3)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in pairwise(events)]


def peak(training: Training, count: int) -> float | None:
    """Most bytes that a training holds in some steps; of captured steps, those of their eager twins."""
    if training.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        training.eager()
    torch.cuda.synchronize()
    replayed = held_bytes(torch.device("cuda", torch.cuda.current_device()))
    return torch.cuda.max_memory_allocated() + replayed - training.others


def period_of(method: str) -> int:
    running = METHODS[method]
    return 1 if running is None else running.invert_every


def measure(name: str, way: str, options: argparse.Namespace) -> Iterator[Row]:
    """Time the methods of a case in one way of running."""
    case = CASES[name]
    torch.compiler.reset()
    plain = Training(case, way, False, options)
    plain_peak = peak(plain, 2)
    plain.warm_up(1)
    proximal = Training(case, way, True, options)
    for method in case.methods:
        if (way == "graph" and period_of(method) > 10) or time.perf_counter() > options.until:
            continue
        with section(f"{name} {way} {method}"):
            yield row(name, way, method, plain, proximal, plain_peak, options)


def row(
    name: str, way: str, method: str, plain: Training, proximal: Training, plain_peak: float | None,
    options: argparse.Namespace,
) -> Row:  # fmt: skip
    """Time one method against the plain optimizer, round by round."""
    period = period_of(method)
    proxprop.use_cuda_graphs(True)  # without those of the method before
    proximal.attach(method)
    first = peak(proximal, 2)  # inverts all averages
    proximal.warm_up(period)
    later = peak(proximal, period) if way == "eager" else None
    most = max(p for p in (first, later, 0.0) if p is not None)
    ratios, medians, longest, base = [], [], [], []
    for _ in range(options.rounds):
        plainly = times(plain.step, PLAIN_STEPS, options.device)
        own = times(proximal.step, max(period, PLAIN_STEPS) // period * period, options.device)
        after = times(plain.step, PLAIN_STEPS, options.device)
        ratios.append(mean(own) / mean([*plainly, *after]))
        medians.append(median(own))
        longest.append(max(own))
        base.append(median([*plainly, *after]))
    low, high = quartiles(ratios)
    memory = None if plain_peak is None else most / plain_peak
    return Row(
        name, proximal.case.precision, way, method, median(ratios), low, high, median(medians),
        median(longest), median(base), memory, state(proximal.handle),
    )  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def state(handle: proxprop.Attached) -> float | None:
    """Bytes of averages and inverses, in units of S."""
    tensors = handle.state_dict().values()
    return sum(t.numel() * t.element_size() for t in tensors) / handle.bytes if tensors else None


@contextmanager
def section(name: str) -> Iterator[None]:
    """Within, a failure is told and the rest goes on."""
    began = time.perf_counter()
    try:
        yield
    except Exception:
        print(f"{name}: failed", flush=True)
        traceback.print_exc()
    print(f"# {name}: {time.perf_counter() - began:.1f} s", flush=True)


def set_precision(precision: str) -> None:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def inversion(size: int, device: str, count: int = 4) -> dict[str, float]:
    """Milliseconds and error of an inverse in float32, beside those of cuSOLVER's, for a decaying spectrum."""
    torch.manual_seed(0)
    A = torch.randn(2 * size, size, device=device) @ torch.diag(torch.logspace(1, -1, size, device=device))
    M = A.mT @ A
    M = (M / M.diagonal().mean())[None]
    exact = torch.linalg.inv(M.double() + 0.3 * torch.eye(size, device=device))
    shifted = M + 0.3 * torch.eye(size, device=device)
    ours = min(times(lambda: inverse(M.clone(), 0.3), count, device))
    theirs = min(times(lambda: torch.cholesky_inverse(torch.linalg.cholesky(shifted)), count, device))
    found = inverse(M.clone(), 0.3)[0].double()
    library = torch.cholesky_inverse(torch.linalg.cholesky(shifted)).double()
    error, other = (float((X - exact).norm() / exact.norm()) for X in (found, library))
    return {"size": size, "ms": ours, "error": error, "library_ms": theirs, "library_error": other}


def report(row: Row) -> None:
    memory = "" if row.memory is None else f"memory {row.memory:.2f}"
    kept = "" if row.state is None else f"state {row.state:.2f} S"
    print(
        f"{row.network:14}{row.precision:6}{row.way:8}{row.method:27}{row.ratio:6.3f} ({row.low:.3f}-{row.high:.3f})"
        f"  plain {row.plain:7.3f} ms, median {row.step:7.3f}, longest {row.longest:7.3f}  {memory} {kept}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=280.0, help="begin nothing new after so many")
    parser.add_argument("--small", action="store_true", help="small batches, to see whether it runs")
    parser.add_argument("--sizes", nargs="*", type=int, default=[768, 3073, 4001], help="inverses to time")
    parser.add_argument("--json", type=Path, help="write everything and the environment as JSON")
    options = parser.parse_args()
    options.until = time.perf_counter() + options.seconds
    return options


def main() -> None:
    options = parse()
    command = " ".join(sys.argv).split(" --json")[0]
    record = {"command": command, "environment": environment(options.device), "rounds": options.rounds}
    record |= {"rows": [], "inverses": []}
    for size in options.sizes:
        with section(f"inverse of {size}"):
            set_precision("fp32")
            record["inverses"].append(inversion(size, options.device))
            print(record["inverses"][-1], flush=True)
    for way in options.ways:
        for name in options.networks:
            if time.perf_counter() > options.until:
                break
            with section(f"{name} {way}"):
                set_precision(CASES[name].precision)
                for found in measure(name, way, options):
                    report(found)
                    record["rows"].append(asdict(found))
                    save(record, options.json)
            gc.collect()
    save(record, options.json)


if __name__ == "__main__":
    main()
