"""A run that is being written: its folder, its lock, and everything that goes into it."""

import fcntl
import hashlib
import os
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from proxprop.lab.config import INCIDENTAL, Config, from_mapping
from proxprop.lab.records import checkpoint, lines, sealed
from proxprop.lab.records.environment import environment
from proxprop.lab.records.fields import START, lists
from proxprop.lab.records.lines import Row
from proxprop.lab.refusal import Refused

LOCK = "lock"


class Run:
    """The one writer of a run's folder.

    Args:
        folder: made when it does not exist.
        config: what is run.
        resume: go on with what is there instead of refusing it.

    Raises:
        Refused: another process writes it; it holds a run, more than a start that failed, and `resume` is false; it
            holds another run.
    """

    def __init__(self, folder: Path, config: Config, resume: bool) -> None:
        self.folder = folder
        self.config = config.settled()
        self._lock = locked(folder)
        try:
            self._open(resume)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool) -> None:
        for left in self.folder.glob(f"*{sealed.UNFINISHED}"):
            left.unlink()
        path = self.folder / "config.json"
        if not path.exists():
            sealed.write(path, self.config.to_dict())
        elif resume:
            _same(stored_config(self.folder), self.config, self.folder)
        elif _begun(self.folder):
            raise Refused(
                f"{self.folder} already holds a run; go on with it by --resume or name another by --out"
            )
        else:
            self._forget()
            sealed.write(path, self.config.to_dict())

    def _forget(self) -> None:
        """Remove what a start left that failed before anything was measured."""
        for name in ("environment.json", "plan.json", "notes.jsonl"):
            (self.folder / name).unlink(missing_ok=True)

    @property
    def done(self) -> bool:
        """Whether the run has ended, well or in divergence."""
        return (self.folder / "result.json").exists()

    def check_data(self, digest: str | None) -> None:
        """Refuse to go on with a run, or to take it for this one, if the user's own data has changed since.

        Args:
            digest: the SHA-256 of the file as it is now; None where there is no file to compare.

        Raises:
            Refused: an earlier start had another one.
        """
        try:
            starts = self._starts()
        except sealed.Damaged:
            return
        for start in starts:
            before = start.get("data_sha256")
            if isinstance(before, str) and digest is not None and before != digest:
                raise Refused(
                    f"{self.folder} holds a run on other contents of {self.config.data}: its SHA-256 was "
                    f"{before[:12]}… and is {digest[:12]}… now; name another folder by --out"
                )

    def start(self, device: torch.device, at_once: int = 1, data: str | None = None) -> None:
        """Note the environment of this start after those of earlier starts.

        Args:
            device: where it trains.
            at_once: how many runs shared the machine; with more than one, training times are not comparable.
            data: the SHA-256 of the user's own data.
        """
        try:
            starts = self._starts()
        except sealed.Damaged as damage:
            starts = []
            self.note(f"{damage}; it was begun anew")
        now = environment(device) | {"runs_at_once": at_once}
        now |= {"data_sha256": data} if data is not None else {}
        sealed.write(self.folder / "environment.json", {"starts": [*starts, now]})

    def _starts(self) -> list[Row]:
        path = self.folder / "environment.json"
        found: list[Row] = sealed.read(path, lists("starts", START))["starts"] if path.exists() else []
        return found

    def note(self, text: str) -> None:
        """Keep something a person should know with the run."""
        lines.append(self.folder / "notes.jsonl", {"text": text})

    def write_plan(self, rows: list[Row]) -> None:
        """What the library does with every layer."""
        sealed.write(self.folder / "plan.json", {"layers": rows})

    def last_checkpoint(self) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        """The last good checkpoint, and a note for everything damaged that was found on the way."""
        found, notes = checkpoint.latest(self.folder)
        for name in ("metrics.jsonl", "timing.jsonl"):
            notes += lines.read(self.folder / name)[1]
        if notes and found is None:
            notes.append("no good checkpoint is left; starting from the beginning")
        return found, notes

    def checkpoint(self, step: int, content: checkpoint.Checkpoint) -> None:
        """Write a checkpoint; the two last ones are kept."""
        checkpoint.write(self.folder, step, content)

    def begin_rows(self, metrics: list[Row], timing: list[Row]) -> None:
        """Set both files to exactly these rows."""
        lines.rewrite(self.folder / "metrics.jsonl", metrics)
        lines.rewrite(self.folder / "timing.jsonl", timing)

    def add_metrics(self, row: Row) -> None:
        """Add one measurement."""
        lines.append(self.folder / "metrics.jsonl", row)

    def add_timing(self, row: Row) -> None:
        """Add one reading of the clock."""
        lines.append(self.folder / "timing.jsonl", row)

    def finish(self, status: str, weights: dict[str, Tensor], summary: dict[str, Any]) -> None:
        """Write weights, then the result that marks the run as done, then remove the checkpoints."""
        digest = None
        if self.config.save_weights:
            content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
            digest = hashlib.sha256(content).hexdigest()
            sealed.write_bytes(self.folder / "weights.safetensors", content)
        result = {"status": status, "weights_sha256": digest} | summary
        sealed.write(self.folder / "result.json", result)
        checkpoint.remove(self.folder)

    def close(self) -> None:
        """Let another process write this run."""
        self._lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stored_config(folder: Path) -> Config:
    """The Config a run's folder holds.

    Raises:
        Refused: there is none, it is damaged, or no run has such settings.
    """
    try:
        return from_mapping(sealed.read(folder / "config.json"), "config.json")
    except (sealed.Damaged, Refused) as damage:
        raise Refused(f"{folder} holds no readable run: {damage}") from damage


def _begun(folder: Path) -> bool:
    """Whether anything of a run would be lost with its folder: a measurement, a checkpoint, a result."""
    metrics = folder / "metrics.jsonl"
    measured = metrics.exists() and metrics.stat().st_size > 0
    return measured or bool(checkpoint.paths(folder)) or (folder / "result.json").exists()


def locked(folder: Path) -> IO[str]:
    """Hold the folder's lock until the file is closed or the process ends, however it ends.

    Raises:
        Refused: another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = sealed.unlinked(folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise Refused(f"cannot write into {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        who = lock.read().strip() or "unknown"
        lock.close()
        raise Refused(
            f"{folder} is being written by another process (id {who}); wait for it or stop it"
        ) from None
    with sealed.naming(folder / LOCK):
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
    return lock


def _same(stored: Config, asked: Config, folder: Path) -> None:
    old, new = stored.identity(), asked.identity()
    different = [f"{key} is {old[key]!r} there but {new[key]!r} here" for key in old if old[key] != new[key]]
    if different:
        free = ", ".join(INCIDENTAL)
        raise Refused(
            f"{folder} holds another run: {'; '.join(different)} (only {free} may change on --resume)"
        )
