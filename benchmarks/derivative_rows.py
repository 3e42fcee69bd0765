"""Do rows of derivatives belong into S? Poisson's equation, whose loss holds second derivatives of the network.

    python benchmarks/derivative_rows.py            # what is missing, into results/questions/derivative-rows.csv
    python benchmarks/derivative_rows.py --table    # the medians of what is there

The network carries its derivatives forward: each layer multiplies its input a, the slopes ∂a/∂x and the Laplacian Δa
by one weight, so that each is rows that S may hold or leave out. The loss and its gradient are the same in all cases;
only S differs. *values* has the rows a alone, as deferred mode does where a loss is differentiated twice. *all* has all
rows. *balanced* has all rows, those of derivatives weighted so that both kinds bring the same trace to each layer's S.
Settings are the trials of `proxprop bench` (seed 0); the best trial is run again with fresh seeds.
"""

import argparse
import csv
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from questions import WHERE, read
from torch import Tensor, nn
from torch.nn import functional

from proxprop.lab import devices
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.spaces import setting
from proxprop.lab.peers.task import Task
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.peers.tasks.poisson import FORCE, force, points, solution
from proxprop.lab.records.environment import environment

RECORD = Path(__file__).parents[1] / "results" / "questions" / "derivative-rows.csv"
ROWS = ("values", "all", "balanced")
DIRECTIONS = ("adamw", "exact+adamw", "running+adamw")
TRIALS, SEEDS = range(6), (1, 2, 3)
KEY = ("direction", "rows", "trial", "seed")
COLUMNS = (*KEY, "status", "score", *WHERE)
TASK = TASKS["poisson-small"]
WIDTH, LAYERS, BATCH = 48, 3, 128


class Carrying(nn.Module):
    """A tanh network that carries slopes and the Laplacian along. Shifts are no part of S: derivatives have none."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        sizes = [2, *[WIDTH] * LAYERS, 1]
        plain = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.shifts = nn.ParameterList([layer.bias for layer in plain])
        self.layers = nn.ModuleList([nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)])
        for layer, source in zip(self.layers, plain, strict=True):
            layer.weight = source.weight
        self.rows = rows

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """u and Δu at points x [points, 2]."""
        one = torch.ones_like(x[:, :1])
        slopes = [torch.cat([one, 0 * one], 1), torch.cat([0 * one, one], 1)]
        value, laplacian = x, torch.zeros_like(x)
        for number, (layer, shift) in enumerate(zip(self.layers, self.shifts, strict=True), 1):
            value, *others = self._multiplied(layer, value, [*slopes, laplacian])
            value, (*slopes, laplacian) = value + shift, others
            if number < len(self.layers):
                value = value.tanh()
                rate = 1 - value.square()
                curved = -2 * value * rate * (slopes[0].square() + slopes[1].square())
                laplacian = rate * laplacian + curved
                slopes = [rate * slope for slope in slopes]
        return value, laplacian

    def _multiplied(self, layer: nn.Module, value: Tensor, derivatives: list[Tensor]) -> list[Tensor]:
        """All of them times the layer's weight; those that are given to the layer itself are rows of its S."""
        below = torch.cat(derivatives)
        if self.rows == "values":
            return [layer(value), *functional.linear(below, layer.weight).split(len(value))]
        weight = 1.0
        if self.rows == "balanced":
            weight = float((value.detach().square().sum() / below.detach().square().sum()).sqrt())
        found = layer(torch.cat([value, weight * below]))
        return [found[: len(value)], *(found[len(value) :] / weight).split(len(value))]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The task's loss: squared residual inside, and the squared error on the edge."""
    inside, edge = batch
    u, laplacian = model(torch.cat([inside, edge]))
    residual = laplacian[: len(inside)] + force(inside)
    return residual.square().mean() / FORCE + u[len(inside) :].square().mean()


def trained(direction: str, rows: str, trial: int, seed: int, task: Task = TASK) -> float:
    """The relative error of u at the end of a run."""
    torch.manual_seed(seed)
    chosen, model = setting(direction, trial), Carrying(rows)
    optimizers = METHODS[direction].prepare(model, chosen, task)  # solves when the optimizer steps
    generator = torch.Generator().manual_seed(seed)
    for step in range(task.steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = chosen.lr * chosen.rate(step, task.steps)
            optimizer.zero_grad()
        loss(model, points(generator, BATCH)).backward()
        for optimizer in optimizers:
            optimizer.step()
    ticks = torch.linspace(0, 1, 33)
    grid = torch.cartesian_prod(ticks, ticks)
    with torch.no_grad():
        return float((model(grid)[0] - solution(grid)).norm() / solution(grid).norm())


def due(found: list[dict[str, str]]) -> Iterator[tuple[str, str, int, int]]:
    """Every trial, then fresh seeds of the best one."""
    for direction, rows in itertools.product(DIRECTIONS, ROWS):
        if direction == "adamw" and rows != "values":  # the same without S
            continue
        yield from ((direction, rows, trial, 0) for trial in TRIALS)
        own = [r for r in found if (r["direction"], r["rows"], r["seed"]) == (direction, rows, "0")]
        best = int(min(own, key=lambda row: float(row["score"]))["trial"])
        yield from ((direction, rows, best, seed) for seed in SEEDS)


def run() -> None:
    """Run what is missing, and write each run as soon as it has ended."""
    found = read(RECORD)
    for key in due(found):
        values = dict(zip(KEY, map(str, key), strict=True))
        if any(all(row[name] == value for name, value in values.items()) for row in found):
            continue
        score = trained(*key)
        status = "finished" if score < float("inf") else "diverged"
        score = score if status == "finished" else float("inf")
        where = {"command": "python benchmarks/derivative_rows.py", **environment(devices.device("cpu"))}
        row = {**values, "status": status, "score": f"{score:.5g}", **where}
        found.append({column: str(row[column]) for column in COLUMNS})
        write(found)
        print(*values.values(), row["score"], flush=True)


def write(rows: list[dict[str, str]]) -> None:
    new = RECORD.with_suffix(".new")
    with new.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(RECORD)


def table(rows: list[dict[str, str]]) -> str:
    """The last error of each direction and each choice of rows: the median over fresh seeds, lowest and highest."""
    lines = ["| AdamW is fed | rows of S | relative error of u |", "| --- | --- | --- |"]
    for direction, kind in dict.fromkeys((row["direction"], row["rows"]) for row in rows):
        own = [
            float(r["score"])
            for r in rows
            if (r["direction"], r["rows"]) == (direction, kind) and r["seed"] != "0"
        ]
        if own:
            name = METHODS[direction].title
            which = "" if direction == "adamw" else kind
            lines.append(f"| {name} | {which} | {median(own):.3g} ({min(own):.3g}–{max(own):.3g}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="only print the medians")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not parser.parse_args().table:
        run()
    print(table(read(RECORD)))


if __name__ == "__main__":
    main()
