"""Read records back: nothing here trains, and nothing here trusts what it reads."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxprop.lab.config import Config
from proxprop.lab.records import fields, lines, sealed
from proxprop.lab.records.lines import Row
from proxprop.lab.records.run import stored_config
from proxprop.lab.refusal import Refused


@dataclass(frozen=True)
class Record:
    """One run as its folder tells it.

    Args:
        folder: where it is.
        config: its settings.
        status: finished, diverged, or unfinished.
        epochs: one row per epoch, from 0 (before training): epoch, step, loss, accuracies, cosine, seconds.
        steps: one row per logged step: step, batch_loss.
        layers: one row per layer that owns parameters: what the library does with it.
        starts: the environment of every start.
        notes: what was damaged or passed over.
    """

    folder: Path
    config: Config
    status: str
    epochs: list[Row]
    steps: list[Row] = field(default_factory=list)
    layers: list[Row] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> Row:
        """The last epoch's row."""
        return self.epochs[-1]

    @property
    def environment(self) -> dict[str, Any]:
        """The environment of the last start, empty when unknown."""
        return self.starts[-1] if self.starts else {}

    def series(self, key: str) -> list[float]:
        """One number per epoch; what was not finite is NaN."""
        return [float("nan") if row.get(key) is None else float(row[key]) for row in self.epochs]


def read(folder: Path) -> Record:
    """Read one run's folder.

    Raises:
        Refused: it holds no run, or nothing of it can be read.
    """
    config = stored_config(folder)
    rows, notes = lines.read(folder / "metrics.jsonl", fields.measured)
    timing, more = lines.read(folder / "timing.jsonl", fields.holds(fields.TIMING))
    notes += more + [row["text"] for row in lines.read(folder / "notes.jsonl", fields.holds(fields.NOTE))[0]]
    clock = {row["epoch"]: row for row in timing}
    measured = {row["epoch"]: row for row in rows if row["kind"] == "epoch"}
    epochs = [measured[epoch] | clock.get(epoch, {}) for epoch in sorted(measured)]
    if not epochs:
        raise Refused(f"{folder} holds no measurements yet")
    result = _optional(folder / "result.json", fields.result, notes)
    plan = _optional(folder / "plan.json", fields.lists("layers", fields.LAYER), notes)
    environment = _optional(folder / "environment.json", fields.lists("starts", fields.START), notes)
    status = str(result.get("status", "unfinished"))
    notes += _missing(config, measured.keys(), config.epochs if status == "finished" else max(measured))
    return Record(
        folder,
        config,
        status,
        epochs,
        [row for row in rows if row["kind"] == "step"],
        plan.get("layers", []),
        environment.get("starts", []),
        notes,
    )


def _missing(config: Config, epochs: Collection[int], end: int) -> list[str]:
    """A note if epochs up to the end were lost. A damaged row may be of the two billionth, so they are not listed."""
    due = range(0, min(end, config.epochs), config.measure_every)
    count = len(due) - sum(epoch in due for epoch in epochs) + (end not in epochs)
    if not count:
        return []
    first = next((epoch for epoch in due if epoch not in epochs), end)
    return [f"metrics.jsonl lacks epoch {first}" + (f" and {count - 1} more" if count > 1 else "")]


def find(paths: Iterable[Path], tell: Callable[[str], None] = lambda why: None) -> list[Record]:
    """Every run in these folders and below them, by name; `tell` hears of each that cannot be read.

    Raises:
        Refused: a path does not exist, or none of them holds a readable run.
    """
    records: list[Record] = []
    refusals: list[str] = []
    for path in paths:
        if not path.is_dir():
            raise Refused(f"there is no folder {path}")
        for config in sorted(path.rglob("config.json")):
            try:
                records.append(read(config.parent))
            except Refused as refusal:
                refusals.append(str(refusal))
                tell(f"left out: {refusal}")
    if not records:
        why = f": {'; '.join(refusals)}" if refusals else "; a run is a folder with a config.json"
        raise Refused(f"no readable run in {', '.join(map(str, paths))}{why}")
    return records


def _optional(path: Path, check: Callable[[Row], None], notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return sealed.read(path, check)
    except sealed.Damaged as damage:
        notes.append(str(damage))
        return {}
