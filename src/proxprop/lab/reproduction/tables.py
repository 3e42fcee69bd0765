"""From records to tidy rows: one row per measured epoch of every run of an experiment, and one row per run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxprop.lab import paper
from proxprop.lab.config import INCIDENTAL, Config, command
from proxprop.lab.records import Record
from proxprop.lab.reproduction.files import Row

CURVES = (
    "model", "method", "solver", "iteration", "optimizer", "momentum", "tau", "tau_theta", "batch_size", "seed",
    "status", "epoch", "seconds", "train_loss", "val_accuracy", "test_accuracy", "run",
)  # fmt: skip
RUNS = (
    "run", "experiments", "data", "seed", "command", "status", "commit", "torch", "device", "runs_at_once", "time",
)  # fmt: skip
ENVIRONMENT = ("proxprop", "commit", "python", "torch", "numpy", "cuda", "device")

# Settings that change where a run computes and how often it looks, not what it learns.
APART = ("device", "threads", "observe", "log_steps", "measure_every")

Pair = tuple[Config, Record | None]


def pairs(configs: Iterable[Config], records: Iterable[Record]) -> list[Pair]:
    """Every run of an experiment with its record, or with None while there is none.

    A record belongs to a run when it learned the same, wherever it was computed. Where several do, the one that was
    measured as often as the experiment asks for is taken.
    """
    found: dict[object, list[Record]] = {}
    for record in records:
        found.setdefault(_key(record.config), []).append(record)
    return [(config, _nearest(config, found.get(_key(config), []))) for config in configs]


def _key(config: Config) -> object:
    apart = APART if config.solver != "backprop" else (*APART, "tau_theta")
    return tuple((name, value) for name, value in config.identity().items() if name not in apart)


def _nearest(config: Config, records: Sequence[Record]) -> Record | None:
    return min(records, key=lambda record: record.config.measure_every != config.measure_every, default=None)


def curve_rows(found: Iterable[Pair], **about: str) -> Iterator[Row]:
    """The measured epochs of every run that has a record; `about` is repeated in every row.

    `seconds` is training time, and empty where several runs shared the machine.
    """
    for _, record in found:
        if record is None:
            continue
        settings = about | _settings(record.config) | {"status": record.status, "run": record.folder.name}
        for epoch in record.epochs:
            yield settings | {
                "epoch": epoch["epoch"],
                "seconds": epoch.get("seconds") if _at_once(record) == 1 else None,
                "train_loss": epoch["loss"],
                "val_accuracy": epoch["validation_accuracy"],
                "test_accuracy": epoch["test_accuracy"],
            }


def _at_once(record: Record) -> int:
    return max((start.get("runs_at_once", 1) for start in record.starts), default=1)


def _settings(config: Config) -> Row:
    config = config.settled()
    return {
        "model": config.model,
        "method": paper.name(config.solver),
        "solver": config.solver,
        "iteration": paper.iteration(config.solver),
        "optimizer": config.optimizer,
        "momentum": config.momentum if config.optimizer == "sgd" else None,
        "tau": config.lr,
        "tau_theta": None if config.solver == "backprop" else config.tau_theta,
        "batch_size": config.batch_size,
        "seed": config.seed,
    }


def run_rows(experiments: Mapping[str, Iterable[Pair]]) -> list[Row]:
    """One row per run: the experiments it is in, the command that runs it, how it ended and on what; or "missing"."""
    found: dict[str, Row] = {}
    for name, part in experiments.items():
        for config, record in part:
            run = record.folder.name if record else config.slug()
            row = found.setdefault(run, _run_row(run, record.config if record else config, record))
            row["experiments"] = " ".join(filter(None, [row["experiments"], name]))
    return list(found.values())


def _run_row(run: str, config: Config, record: Record | None) -> Row:
    usual = {name: getattr(Config, name) for name in INCIDENTAL}
    anywhere = replace(config.settled(), **usual)
    row: Row = {"run": run, "experiments": "", "data": config.data, "seed": config.seed}
    row |= {"command": command(anywhere, f"runs/{run}"), "status": record.status if record else "missing"}
    environment = record.environment if record else {}
    row["runs_at_once"] = _at_once(record) if record else None
    return row | {name: environment.get(name) for name in ("commit", "torch", "device", "time")}


def environments(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every environment that runs were made in, with how many of them."""
    counts: dict[tuple[Any, ...], int] = {}
    for record in records:
        key = tuple(record.environment.get(name) for name in ENVIRONMENT)
        counts[key] = counts.get(key, 0) + 1
    return [dict(zip(ENVIRONMENT, key, strict=True)) | {"runs": count} for key, count in counts.items()]
