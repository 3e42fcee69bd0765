"""Which learning rates a step survives: Table 1's grid over five orders, with and without `proxprop.bound`.

python benchmarks/bounds.py run --task digits --optimizer sgd --seeds 1 2 3
python benchmarks/bounds.py write > docs/bounds.md

`run` adds what is missing to results/bounds/TASK.csv. On a GPU with CIFAR-10, Table 1 itself is
`python benchmarks/bounds.py run --task cifar10-mlp --optimizer sgd --steps 4500 --seeds 1 2 3 --device cuda`.
"""

import argparse
import csv
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bounds_candidates import CANDIDATES
from torch import nn
from torch.optim import Optimizer

import proxprop
from proxprop.lab import devices
from proxprop.lab.experiments import TABLE1_RATES
from proxprop.lab.models import convnet
from proxprop.lab.peers.task import Problem
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.records.environment import environment

FOLDER = Path(__file__).parents[1] / "results" / "bounds"
RATES = {
    "sgd": TABLE1_RATES,
    "adam": (1.0, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00001),
}
SOLVERS: dict[str, proxprop.Solver | None] = {
    "backprop": None,
    "cg3": proxprop.CG(3),
    "exact": proxprop.Exact(),
}
KEY = ("task", "steps", "optimizer", "solver", "bound", "lr", "seed")
MEASURED = ("status", "train_loss", "score", "accuracy")
WHERE = ("command", "commit", "torch", "device", "threads", "time")


def problem(task: str, device: torch.device) -> tuple[Problem, Callable[[], nn.Module], int]:
    """A task's data, model and steps: one of the peers', or digits with the paper's ConvNet."""
    if task != "digits-convnet":
        made = TASKS[task].problem(device)
        return made, made.model, TASKS[task].steps
    made = TASKS["digits"].problem(device)
    return made, lambda: nn.Sequential(nn.Unflatten(1, (1, 8, 8)), convnet((1, 8, 8), 10)), 300


def optimizer_of(name: str, model: nn.Module, lr: float) -> Optimizer:
    """The paper's SGD, or Adam."""
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.95, nesterov=True)


def train(
    key: dict[str, Any], data: Problem, model: nn.Module, steps: int, device: torch.device
) -> dict[str, Any]:
    """One run at a constant rate with τ_θ = 1; an overflow is an outcome."""
    if (solver := SOLVERS[key["solver"]]) is not None:
        proxprop.convert(model, solver, tau_theta=1.0)
    optimizer = optimizer_of(key["optimizer"], model, key["lr"])
    if key["bound"] == "bound":
        proxprop.bound(optimizer)
    elif key["bound"] != "none":
        CANDIDATES[key["bound"]](optimizer, model)
    generator = torch.Generator(device).manual_seed(key["seed"])
    try:
        for step in range(steps):
            optimizer.zero_grad()
            loss = data.loss(model, data.batch(generator))
            if step % 50 == 0 and not math.isfinite(float(loss.detach())):
                break
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        return {"status": f"failed: {str(error).splitlines()[0]}", "train_loss": math.inf}
    model.eval()
    with torch.no_grad():
        found: dict[str, Any] = dict(data.measure(model))
    finite = math.isfinite(found["train_loss"]) and math.isfinite(found["score"])
    return {**found, "status": "finished" if finite else "diverged"}


def run(options: argparse.Namespace) -> None:
    """Run what is missing, and write each run as soon as it has ended."""
    device = devices.device(options.device)
    data, make, usual = problem(options.task, device)
    steps = options.steps or usual
    path = options.out / f"{options.task}.csv"
    rows = read(path)
    there = {tuple(row[name] for name in KEY) for row in rows}
    for seed, solver, bound, lr in itertools.product(
        options.seeds, options.solvers, options.bounds, RATES[options.optimizer]
    ):
        values = (options.task, steps, options.optimizer, solver, bound, lr, seed)
        key = dict(zip(KEY, values, strict=True))
        if tuple(str(value) for value in values) in there:
            continue
        torch.manual_seed(seed)
        found = train(key, data, make().to(device), steps, device)
        again = (
            f"python benchmarks/bounds.py run --task {options.task} --optimizer {options.optimizer} --steps {steps} "
            f"--solvers {solver} --bounds {bound} --seeds {seed}"
        )
        row = {**key, **found, "command": again, **environment(device)}
        rows.append({name: _cell(row.get(name, "")) for name in (*KEY, *MEASURED, *WHERE)})
        write_rows(path, rows)
        print(*values, found["status"], f"{found['train_loss']:.3g}", flush=True)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none where there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """A table, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*KEY, *MEASURED, *WHERE), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) and value not in TABLE1_RATES else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("--task", default="digits", choices=[*TASKS, "digits-convnet"])
    parser.add_argument("--optimizer", default="sgd", choices=RATES)
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS), choices=SOLVERS)
    parser.add_argument("--bounds", nargs="+", default=["none", "bound"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.what == "write":
        from bounds_page import page

        print(page(FOLDER))
        return
    warnings.simplefilter("ignore", RuntimeWarning)
    run(options)


if __name__ == "__main__":
    main()
