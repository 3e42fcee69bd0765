"""Two questions about S, asked of small tasks: which learning rate carries over, and what S does to validation.

python benchmarks/questions.py rates --task digits anisotropic-small poisson-small gpt-small --seeds 1 2 3 4 5
python benchmarks/questions.py validation --task digits --seeds 1 2 3

Both add what is missing to results/questions/. On a GPU: `--task cifar10-mlp --device cuda`.
"""

import argparse
import csv
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from proxprop.lab import devices
from proxprop.lab.peers.methods import METHODS, Method
from proxprop.lab.peers.run import Trained
from proxprop.lab.peers.spaces import Setting
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.records.environment import environment
from proxprop.solvers import CG

FOLDER = Path(__file__).parents[1] / "results" / "questions"
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
METHODS_OF_RATES = {
    name: METHODS[name]
    for name in (
        "adamw", "running+adamw", "cg3+adamw", "muon", "running+muon", "soap", "running+soap", "cg3+soap",
    )
} | {
    f"seldom+{base}": replace(METHODS[f"root+{base}"], invert_every=40) for base in ("adamw", "muon")
}  # fmt: skip
"""By the name of a direction; `seldom` takes a root four times less often than S is inverted."""

TAU_THETA, DAMPING = 10.0, 0.3
DECAYS = (1e-4, 0.3)
CG1 = Method("cg1+adamw", "ProxProp cg1 + AdamW", METHODS["adamw"].optimizers, CG(1))
DIRECTIONS: dict[str, tuple[Method, float | None, float | None]] = {
    "gradient": (METHODS["adamw"], None, None),
    "cg1, tau 100": (CG1, 100.0, None),
    "cg3, tau 100": (METHODS["cg3+adamw"], 100.0, None),
    "exact, tau 1": (METHODS["exact+adamw"], 1.0, None),
    "exact, tau 100": (METHODS["exact+adamw"], 100.0, None),
    "running, damping 0.03": (METHODS["running+adamw"], None, 0.03),
    "running, damping 0.3": (METHODS["running+adamw"], None, 0.3),
    "running, damping 3": (METHODS["running+adamw"], None, 3.0),
}
"""What feeds AdamW: with its method, τ_θ and damping."""

KEY = ("task", "direction", "lr", "weight_decay", "seed")
MEASURED = ("status", "train_loss", "score", "train_losses", "scores")
WHERE = ("command", "commit", "torch", "device", "threads", "time")
Cell = tuple[str, Method, Setting]


def rates() -> Iterator[Cell]:
    """Every method over the same rates, the rest of the setting held."""
    for (name, method), lr in itertools.product(METHODS_OF_RATES.items(), RATES):
        tau_theta = TAU_THETA if name.startswith("cg") else None
        damping = DAMPING if method.running else None
        yield name, method, Setting(lr, 1e-3, 0.05, "linear", tau_theta, damping)


def validation() -> Iterator[Cell]:
    """Every direction at one rate, with little and with much weight decay."""
    for (name, (method, tau_theta, damping)), decay in itertools.product(DIRECTIONS.items(), DECAYS):
        yield name, method, Setting(0.003, decay, 0.05, "linear", tau_theta, damping)


def measured(trained: Trained, setting: Setting, steps: int, every: int) -> dict[str, str]:
    """Train and measure both losses on the way; an overflow ends it."""
    losses: list[tuple[float, float]] = []
    for step in range(steps + 1):
        if step % every == 0:
            found = trained.measure()
            losses.append((found["train_loss"], found["score"]))
            if not all(map(math.isfinite, losses[-1])):
                break
        if step < steps:
            trained.step(setting.rate(step, steps))
    train, score = zip(*losses, strict=True)
    finite = all(map(math.isfinite, losses[-1]))
    return {
        "status": "finished" if finite else "diverged",
        "train_loss": f"{train[-1]:.5g}",
        "score": f"{score[-1]:.5g}",
        "train_losses": " ".join(f"{loss:.4g}" for loss in train),
        "scores": " ".join(f"{loss:.4g}" for loss in score),
    }


def run(options: argparse.Namespace) -> None:
    """Run what is missing, and write each run as soon as it has ended."""
    device = devices.device(options.device)
    path = FOLDER / f"{options.what}.csv"
    rows = read(path)
    there = {tuple(row[name] for name in KEY) for row in rows}
    cells = list({"rates": rates, "validation": validation}[options.what]())
    if options.direction:
        cells = [cell for cell in cells if cell[0] in options.direction]
    for task, seed, (name, method, setting) in itertools.product(options.task, options.seeds, cells):
        values = tuple(map(str, (task, name, setting.lr, setting.weight_decay, seed)))
        if values in there:
            continue
        trained = Trained(TASKS[task], method, setting, seed, device)
        found = measured(trained, setting, TASKS[task].steps, TASKS[task].every)
        again = f"python benchmarks/questions.py {options.what} --task {task} --seeds {seed}"
        row = {**dict(zip(KEY, values, strict=True)), **found, "command": again, **environment(device)}
        rows.append({column: str(row[column]) for column in (*KEY, *MEASURED, *WHERE)})
        _write(path, rows)
        print(*values, found["train_loss"], found["score"], flush=True)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*KEY, *MEASURED, *WHERE), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rates", "validation"))
    parser.add_argument("--task", nargs="+", default=["digits"], choices=TASKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--direction", nargs="+", choices=(*METHODS_OF_RATES, *DIRECTIONS), help="only these [all]"
    )
    parser.add_argument("--device", default="cpu")
    warnings.simplefilter("ignore")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
