"""From records to comparisons: tasks, arms, and the numbers that are said about them. Pure functions of records.

A *task* is what was to be learned (data, model, batch size, epochs, precision, device). An *arm* is how: optimizer,
solver, τ_θ. Each arm was run over some learning rates and seeds; its *best* learning rate is the one with the lowest
mean final full-batch training loss, the paper's own criterion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from proxprop.lab.config import Config
from proxprop.lab.methods import solver_name
from proxprop.lab.records import Record

CLOSE = 0.02  # Two points of accuracy: what counts as "about as good as the best".
HIDDEN = {"mlp": "MLP", "mlp-bn": "MLP with BatchNorm"}  # Models whose hidden widths are a setting.
OPTIMIZER_NAMES = {"sgd": "Nesterov SGD", "adam": "Adam", "adamw": "AdamW", "muon": "Muon"}


def counted(count: float, noun: str) -> str:
    """How many of something.

    >>> counted(1, "run"), counted(2, "run"), counted(2.5, "epoch")
    ('1 run', '2 runs', '2.5 epochs')
    """
    return f"{count:.12g} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Number:
    """A mean over seeds and its spread, the sample standard deviation (NaN for a single seed)."""

    mean: float
    spread: float

    @staticmethod
    def of(values: Sequence[float]) -> "Number":
        """Mean and spread; a value that is not finite makes the mean infinite.

        >>> Number.of([1.0, 3.0])
        Number(mean=2.0, spread=1.4142135623730951)
        """
        if not values or not all(math.isfinite(value) for value in values):
            return Number(math.inf, math.nan)
        return Number(fmean(values), stdev(values) if len(values) > 1 else math.nan)


@dataclass(frozen=True)
class Arm:
    """One method of a task: its records by learning rate, ascending."""

    optimizer: str
    solver: str
    tau_theta: float | None
    rates: dict[float, list[Record]]

    @property
    def name(self) -> str:
        """The method's name for people, without its optimizer."""
        return solver_name(self.solver)

    @property
    def full_name(self) -> str:
        """The method's name for people, with its optimizer."""
        return f"{OPTIMIZER_NAMES.get(self.optimizer, self.optimizer)} · {self.name}"

    @property
    def best_rate(self) -> float:
        """The learning rate with the lowest mean final loss."""
        return min(self.rates, key=lambda rate: self.final("loss", rate).mean)

    @property
    def best(self) -> list[Record]:
        """The records at the best learning rate, one per seed."""
        return self.rates[self.best_rate]

    @property
    def ms_per_step(self) -> float:
        """The median over runs and epochs, without each run's first epoch, which pays for warming up."""
        rows = [row for records in self.rates.values() for record in records for row in record.epochs]
        paces = [row["ms_per_step"] for row in rows if row["epoch"] > 1 and row.get("ms_per_step")]
        return median(paces) if paces else math.nan

    def final(self, key: str, rate: float) -> Number:
        """A quantity of the last epoch at one learning rate; infinite where a run diverged."""
        return Number.of([_last(record, key) for record in self.rates[rate]])


@dataclass(frozen=True)
class Task:
    """What was to be learned, and the arms that did.

    Args:
        config: of one of its runs.
        arms: by optimizer, solver and τ_θ; of each learning rate one record per seed.
        repeated: how many further records repeat a seed of an arm; they count nowhere.
    """

    config: Config
    arms: list[Arm]
    repeated: int = 0

    @property
    def title(self) -> str:
        """For people: what was learned with which model."""
        full = self.config.settled()
        widths = "-".join(map(str, full.hidden or ())) if full.model in HIDDEN else ""
        model = f"{HIDDEN[full.model]} {widths}" if widths else full.model
        momentum = f", momentum {full.momentum:g}" if full.momentum != Config.momentum else ""
        return f"{full.data}, {model}, batch {full.batch_size}, {counted(full.epochs, 'epoch')}{momentum}"

    def optimizers(self) -> list[str]:
        """The optimizers that were used, in the order of the arms."""
        return list(dict.fromkeys(arm.optimizer for arm in self.arms))

    def of(self, optimizer: str) -> list[Arm]:
        """The arms of one optimizer."""
        return [arm for arm in self.arms if arm.optimizer == optimizer]

    def backprop(self, optimizer: str) -> Arm | None:
        """BackProp with this optimizer, if it was run."""
        return next((arm for arm in self.of(optimizer) if arm.solver == "backprop"), None)

    def tau_thetas(self) -> list[float]:
        """Every τ_θ that occurs."""
        return sorted({arm.tau_theta for arm in self.arms if arm.tau_theta is not None})


def tasks(records: Sequence[Record]) -> list[Task]:
    """Group records into tasks and arms, both in the order in which they are usually read."""
    grouped: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        c = record.config.settled()
        hidden = c.hidden if c.model in HIDDEN else None
        key = (
            c.data,
            c.model,
            hidden,
            c.batch_size,
            c.epochs,
            c.precision,
            c.device,
            c.validation,
            c.momentum,
        )
        grouped.setdefault(key, []).append(record)
    return [_task(found) for found in grouped.values()]


def usable_rates(task: Task, arm: Arm) -> list[float]:
    """The learning rates at which an arm ends within two points of the optimizer's best mean validation accuracy."""
    best = max(_accuracy(peer, rate) for peer in task.of(arm.optimizer) for rate in peer.rates)
    return [rate for rate in arm.rates if _accuracy(arm, rate) >= best - CLOSE] if math.isfinite(best) else []


def reach(records: Sequence[Record], target: float, key: str) -> float | None:
    """The median over seeds of the epoch (or seconds) at which the full-batch loss is first at or below `target`.

    Args:
        records: one per seed.
        target: a full-batch loss.
        key: epoch or seconds.

    Returns:
        None when fewer than half of the seeds get there.
    """
    found = []
    for record in records:
        hit = next((row for row in record.epochs if row["loss"] is not None and row["loss"] <= target), None)
        found.append(math.inf if hit is None else float(hit.get(key, math.inf)))
    middle = median(found)
    return middle if math.isfinite(middle) else None


def angles(records: Sequence[Record]) -> dict[str, list[float]]:
    """Layer name to the angle in degrees between direction and gradient, per epoch, averaged over seeds."""
    found: dict[str, list[float]] = {}
    names = list(records[0].epochs[0].get("cosine", {})) if records else []
    epochs = min((len(record.epochs) for record in records), default=0)
    for name in names:
        for index in range(epochs):
            cosines = [record.epochs[index].get("cosine", {}).get(name) for record in records]
            degrees = [math.degrees(math.acos(max(-1.0, min(1.0, c)))) for c in cosines if c is not None]
            found.setdefault(name, []).append(fmean(degrees) if degrees else math.nan)
    return found


def _task(records: Sequence[Record]) -> Task:
    arms = _arms(records)
    kept = sum(len(found) for arm in arms for found in arm.rates.values())
    return Task(records[0].config, arms, len(records) - kept)


def _arms(records: Sequence[Record]) -> list[Arm]:
    found: dict[tuple[str, str, float | None], dict[float, list[Record]]] = {}
    for record in records:
        c = record.config.settled()
        tau = None if c.solver == "backprop" else c.tau_theta
        found.setdefault((c.optimizer, c.solver, tau), {}).setdefault(c.lr or 0.0, []).append(record)
    order = sorted(found, key=lambda key: (key[0] != "sgd", key[0], _solver_order(key[1]), key[2] or 0.0))
    return [Arm(*key, rates={rate: _once(found[key][rate]) for rate in sorted(found[key])}) for key in order]


def _once(records: Sequence[Record]) -> list[Record]:
    """One record per seed: of several the one that got furthest, else the first. A copy is no second sample."""
    found: dict[int, Record] = {}
    for record in records:
        before = found.setdefault(record.config.seed, record)
        if record.last["epoch"] > before.last["epoch"]:
            found[record.config.seed] = record
    return list(found.values())


def _solver_order(solver: str) -> tuple[int, int]:
    family, _, argument = solver.partition(":")
    rank = {"backprop": 0, "published": 1, "cg": 2, "exact": 3}.get(family, 4)
    return rank, int(argument) if argument.isdigit() else 0


def _last(record: Record, key: str) -> float:
    value = record.last.get(key)
    return math.nan if value is None or record.status == "diverged" else float(value)


def _accuracy(arm: Arm, rate: float) -> float:
    """Mean final validation accuracy; a learning rate with a diverged run counts as useless."""
    mean = arm.final("validation_accuracy", rate).mean
    return mean if math.isfinite(mean) else -math.inf
