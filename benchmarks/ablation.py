"""Time whole training steps of ProxProp without each of its tuned paths against steps with it.

    python benchmarks/ablation.py --device cuda --rounds 7 --out results/bench/ablation-h200.json
    python benchmarks/ablation.py --device cpu --paths eigenbasis

`PATHS` says how each path is switched off and what it is for. Three steps are timed in every round, as in `step.py`:
BackProp's, ProxProp's, and ProxProp's without the path. The gain is the ratio to BackProp without the path divided by
the ratio with it, as a median over rounds with its quartiles. Memory is the peak of a step divided by BackProp's. A
path that fails is recorded with its error. Needs torch alone; PYTHONPATH=src where proxprop is not installed.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import inf
from pathlib import Path as FilePath
from statistics import median
from typing import Any
from unittest import mock

import torch
from networks import NETWORKS, Network
from step import command, environment, quartiles, save, set_precision, timed
from torch import Tensor
from ways import as_timed, held_memory, memory_of, prepare, take_workspaces

import proxprop
from proxprop import device, direction, tuning
from proxprop.kernels.launch import Launches
from proxprop.lab.models import convnet
from proxprop.nn import layer
from proxprop.solvers import block_inverse, cholesky
from proxprop.solvers.watching import Calm

HUGE = 2**62
SMALL = Network(
    "convnet-8x8-32", lambda: convnet((1, 8, 8), 10), lambda: torch.randn(32, 1, 8, 8), optimizer="adam"
)
"""The convolutional network on a batch of the digits that scikit-learn has; others have too many patches."""

KNOWN = {**NETWORKS, SMALL.name: SMALL}


def never(*args: object) -> bool:
    return False


def ask_triton(self: Launches, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`Launches.__call__`, but nothing is kept."""
    kernel[grid](*args, **constants)


def in_one_piece(M: Tensor, whole: bool = False, chosen: Callable[..., str] = cholesky.backend) -> str:
    """`cholesky.backend`, but no solution by blocks."""
    found = chosen(M, whole)
    return "lapack" if found == "blocks" and not whole else found


@dataclass(frozen=True)
class Path:
    """A tuned path of the library.

    Attributes:
        purpose: what it is for.
        off: each an object, the name of its attribute, and the value that switches the path off.
        networks: that have a use for it, as have the methods and precisions.
        way: "captured" or "eager" on a GPU, or "cpu".
        replays: whether solves of eager steps are replayed. With the path and without it these have one CUDA graph.
    """

    purpose: str
    off: tuple[tuple[Any, str, Any], ...]
    networks: tuple[str, ...] = ("mlp-500",)
    methods: tuple[str, ...] = ("cg3", "exact")
    precisions: tuple[str, ...] = ("fp32",)
    way: str = "captured"
    replays: bool = True

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Within, the library does without this path."""
        with ExitStack() as stack:
            for owner, name, value in self.off:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def cases(self) -> Iterator[tuple[str, str, str]]:
        """Network, method and precision of each of its rows."""
        return product(self.networks, self.methods, self.precisions)


def constant(name: str, value: object) -> tuple[tuple[Any, str, Any], ...]:
    """A tuned constant that switches a path off."""
    return ((tuning, name, value),)


BOTH = ("mlp-500", "convnet-500")
FLOAT32 = ("fp32", "tf32")
OF_A_GPT: Any = {"networks": ("gpt2-8x1024",), "precisions": ("bf16",), "way": "eager", "replays": False}
"""Running averages of a GPT-2."""

PATHS = {
    "side-streams": Path(
        "solve beside the backward pass", ((layer, "pays", never),), BOTH, precisions=FLOAT32
    ),
    "early-preparation": Path(
        "prepare K before backward reaches its layer",
        constant("PREPARED_MOST_ROWS", 0), ("mlp-500", "mlp-50"), precisions=FLOAT32,
    ),
    "launch-cache": Path(
        "launch without asking Triton which kernel", ((Launches, "__call__", ask_triton),), way="eager"
    ),
    "image-rows": Path(
        "form S of short image rows in few launches", constant("IMAGE_ROWS_MOST_NUMBERS", 0), ("convnet-500",)
    ),
    "bfloat16-terms": Path(
        "multiply float32 numbers on tensor cores", constant("TERMS_LEAST_FLOPS", HUGE), BOTH
    ),
    "shared-terms": Path(
        "save memory: two products share their terms", constant("TERMS_LEAST_SPLIT_BYTES", HUGE)
    ),
    "float16-squares": Path(
        "form S in float16 where TF32 is allowed",
        constant("FP16_LEAST_SIZE", HUGE), ("gpt2-block-8x1024", "mlp-5000"), precisions=("tf32",),
    ),
    "block-cholesky": Path(
        "factorise large systems by blocks, not by cuSOLVER",
        ((cholesky, "backend", in_one_piece),), ("resnet18-128", "gpt2-block-8x1024"), ("exact",), FLOAT32,
    ),
    "triton-cholesky": Path(
        "factorise small systems by one kernel",
        constant("TRITON_CHOLESKY_MOST_ROWS", 0), BOTH, ("exact",), FLOAT32,
    ),
    "triton-cg": Path(
        "conjugate gradients in a few kernels",
        ((device, "use_fp16_products", never),), BOTH, ("cg3",), FLOAT32,
    ),
    "rotation": Path(
        "accuracy: keep the mean of samples out of K's digits",
        ((direction, "always_rotates", never), (direction, "mean_dominates", never)), precisions=FLOAT32,
    ),
    "blocks-of-images": Path(
        "save memory: unfold some images at a time",
        constant("PATCHES_MOST_NUMBERS", HUGE), ("resnet18-128",), precisions=("bf16",),
    ),
    "symmetric-squares": Path(
        "form S of 16-bit rows by half of its products",
        ((device, "use_symmetric_square", never),), **OF_A_GPT, methods=("observed",),
    ),
    "averages-in-one-pass": Path(
        "take an observed step into large averages by one kernel",
        constant("AVERAGED_LEAST_NUMBERS", HUGE), **OF_A_GPT, methods=("observed",),
    ),
    "inverses-by-blocks": Path(
        "invert large averages in products on tensor cores, not by cuSOLVER",
        ((block_inverse, "BlockInverse", cholesky.LapackFactorization),), **OF_A_GPT, methods=("renewed",),
    ),
    "inverted-together": Path(
        "invert several averages of one size at a time",
        constant("INVERTED_TOGETHER_MOST_BYTES", 0), **OF_A_GPT, methods=("renewed",),
    ),
    "eigenbasis": Path(
        "conjugate gradients without products with K",
        constant("EIGENBASIS_COLUMNS", (inf, 0)), methods=("cg3", "cg10"), way="cpu",
    ),
    "huge-pages": Path(
        "write large gradients to huge pages",
        constant("HUGE_PAGE_LEAST_BYTES", HUGE), methods=("cg1", "exact"), way="cpu",
    ),
    "symmetric-halves": Path("compute half of K", constant("CPU_SQUARE_BLOCK", 2**30), way="cpu"),
    "calm": Path(
        "watch conjugate gradients for rounding only where it can matter",
        ((Calm, "holds", never),), ("digits-100", "mlp-500"), ("cg1", "cg3", "cg10"), way="cpu",
    ),
    "blocks-of-outputs": Path(
        "save memory: conjugate gradients for some outputs at a time",
        constant("CPU_BLOCK_BYTES", HUGE), ("mlp-500", "mlp-5000"), ("cg3",), way="cpu",
    ),
    "short-transforms": Path(
        "transform short rows by a product",
        constant("SHORT_TRANSFORM", 0), ("convnet-500",), ("cg3",), way="cpu",
    ),
    "small-patches": Path(
        "multiply few patches, rather than transform",
        constant("CPU_PATCHES_MOST_NUMBERS", 0), (SMALL.name,), ("cg3",), way="cpu",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One path on one network: a step's ratios to BackProp's, with and without the path, or why there are none."""

    path: str
    network: str
    method: str
    precision: str
    way: str
    ratio_with: float | None = None
    ratio_without: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    memory_with: float | None = None
    memory_without: float | None = None
    error: str | None = None


def main() -> None:
    options = parse()
    take_workspaces(options.device)
    chosen = options.paths or [name for name in PATHS if runs_on(PATHS[name], options.device)]
    purposes = {name: PATHS[name].purpose for name in chosen}
    head, rows = {"command": command(), "environment": environment(options.device), "paths": purposes}, []
    for name in chosen:
        for case in PATHS[name].cases():
            rows.append(measured(name, *case, options))
            save({**head, "rows": [asdict(row) for row in rows]}, options.out)
    print_table(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--paths", nargs="+", choices=PATHS, metavar="PATH", help=", ".join(PATHS))
    parser.add_argument("--out", type=FilePath, help="write the rows and the environment as JSON")
    options = parser.parse_args()
    if strange := [name for name in options.paths or [] if not runs_on(PATHS[name], options.device)]:
        parser.error(f"not on {options.device}: {', '.join(strange)}")
    return options


def runs_on(path: Path, device: str) -> bool:
    return (path.way == "cpu") == (device == "cpu")


def measured(name: str, network: str, method: str, precision: str, options: argparse.Namespace) -> Row:
    """A row; one that says why where a step fails."""
    path = PATHS[name]
    start = partial(Row, name, network, method, precision, path.way)
    way = argparse.Namespace(**vars(options), way="graph" if path.way == "captured" else "eager")
    try:
        return start(**compare(path, KNOWN[network], method, precision, way))
    except Exception as error:  # whatever it is, other paths can still be measured
        return start(error=f"{type(error).__name__}: {error}")


def compare(
    path: Path, network: Network, method: str, precision: str, options: argparse.Namespace
) -> dict[str, float | None]:
    """Time BackProp and the method with and without the path in turn."""

    def within(name: str) -> AbstractContextManager:
        return path.switched_off() if name == "without" else nullcontext()

    set_precision(precision)
    steps, memory = {}, {}
    for name, kind in (("backprop", "backprop"), ("with", method), ("without", method)):
        with within(name):
            steps[name], memory[name] = built(network, kind, precision, options)
    proxprop.use_cuda_graphs(path.replays)
    _, ratios = timed(steps, options, within)
    gains = [without / with_it for without, with_it in zip(ratios["without"], ratios["with"], strict=True)]
    low, high = quartiles(gains)
    found = {"gain": median(gains), "low": low, "high": high}
    for name in ("with", "without"):
        found |= {f"ratio_{name}": median(ratios[name]), f"memory_{name}": memory[name] / memory["backprop"]}
    return found


def built(
    network: Network, method: str, precision: str, options: argparse.Namespace
) -> tuple[Callable, float]:
    """A step in the way that is timed, and the memory it holds.

    Memory comes first: a step that was run as if captured has compiled all kernels that capturing launches.
    """
    others = held_memory(options.device)
    again = partial(prepare, network, method, None, options, precision)
    _, step = again()
    memory = memory_of(step, again, others, options)
    assert memory is not None
    return as_timed(step, options), memory


def print_table(rows: list[Row]) -> None:
    print(f"{'path':19}{'network':19}{'precision':10}{'method':7}{'way':9}{'with':>6}{'without':>8}", end="")
    print(f"{'gain':>6}{'quartiles':>12}{'memory with, without':>22}")
    for r in rows:
        print(f"{r.path:19}{r.network:19}{r.precision:10}{r.method:7}{r.way:9}", end="")
        if r.error is not None:
            print(f" {r.error.splitlines()[0]}")
            continue
        print(f"{r.ratio_with:6.2f}{r.ratio_without:8.2f}{r.gain:6.2f}", end="")
        print(f"{f'{r.low:.2f}-{r.high:.2f}':>12}{r.memory_with:15.2f}{r.memory_without:7.2f}")


if __name__ == "__main__":
    main()
