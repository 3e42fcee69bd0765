"""Train digits with the default rate of every network, optimizer and solver, and write results/digits/rates.csv.

python benchmarks/rates.py --out results/digits/rates.csv

A row is written when its run has ended; runs that the file has already are not trained again.
"""

import argparse
import csv
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from proxprop.lab.config import Config
from proxprop.lab.data import load
from proxprop.lab.records.environment import commit
from proxprop.lab.train import train

COLUMNS = ("model", "optimizer", "solver", "lr", "seed", "loss", "accuracy", "commit")
SOLVERS = (
    "backprop",
    "cg:1",
    "cg:2",
    "cg:3",
    "cg:10",
    "exact",
    "running:10",
    "published:1",
    "published:3",
    "published:10",
)


def main() -> None:
    """Train what is asked for and not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["mlp", "mlp-bn", "convnet", "convnet-2pool"])
    parser.add_argument("--optimizers", nargs="+", default=["sgd"])
    parser.add_argument("--solvers", nargs="+", default=SOLVERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    asked = parser.parse_args()
    digits, done = load("digits"), _done(asked.out)
    with asked.out.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for model, optimizer, solver, seed in product(
            asked.models, asked.optimizers, asked.solvers, asked.seeds
        ):
            if (model, optimizer, solver, str(seed)) in done:
                continue
            config = Config(
                model=model, optimizer=optimizer, solver=solver, seed=seed, threads=1, measure_every=10,
                observe=False, save_weights=False,
            )  # fmt: skip
            with TemporaryDirectory() as folder:
                last = train(config, Path(folder) / "run", dataset=digits).last
            named = {
                "model": model,
                "optimizer": optimizer,
                "solver": solver,
                "lr": config.settled().lr,
                "seed": seed,
            }
            found = {"loss": last["loss"], "accuracy": last["validation_accuracy"], "commit": commit()}
            writer.writerow(named | found)
            file.flush()


def _done(path: Path) -> set[tuple[str, str, str, str]]:
    """The runs that a file has."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["model"], row["optimizer"], row["solver"], row["seed"]) for row in csv.DictReader(file)}


if __name__ == "__main__":
    main()
