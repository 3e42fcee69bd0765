"""Who watches a run: nobody, a progress bar, TensorBoard. Watching never changes what is computed."""

import sys
import time
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from proxprop.lab.config import Config
from proxprop.lab.refusal import Refused, install

Row = dict[str, Any]


class Watch(Protocol):
    """What the training loop tells."""

    def begin(self, config: Config, steps_per_epoch: int, done: int) -> None:
        """Training starts, `done` steps are already behind it."""

    def step(self, done: int, loss: Tensor) -> None:
        """One step was taken; reading `loss` makes the device wait, so do it seldom."""

    def epoch(self, row: Row) -> None:
        """An epoch was measured."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def end(self) -> None:
        """Training stopped, for whatever reason."""


class Quiet:
    """Says nothing but notes, to standard error."""

    def begin(self, config: Config, steps_per_epoch: int, done: int) -> None:
        """Nothing."""

    def step(self, done: int, loss: Tensor) -> None:
        """Nothing."""

    def epoch(self, row: Row) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Print it."""
        print(f"note: {text}", file=sys.stderr)

    def end(self) -> None:
        """Nothing."""


class Bar(Quiet):
    """A rich progress bar: epoch, step, loss, accuracy, ms/step, time left."""

    SECONDS = 0.25

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn(
                "loss {task.fields[loss]}  val acc {task.fields[accuracy]}  {task.fields[pace]} ms/step  ETA"
            ),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def begin(self, config: Config, steps_per_epoch: int, done: int) -> None:
        """Draw the bar."""
        self._per_epoch, self._first, self._began = steps_per_epoch, done, time.perf_counter()
        self._drawn = 0.0
        self._task = self._progress.add_task(
            "", total=config.epochs * steps_per_epoch, completed=done, epochs=config.epochs,
            epoch=done // steps_per_epoch, loss="–", accuracy="–", pace="–",
        )  # fmt: skip
        self._progress.start()

    def step(self, done: int, loss: Tensor) -> None:
        """Redraw, four times a second at most."""
        now = time.perf_counter()
        if now - self._drawn < self.SECONDS:
            return
        self._drawn = now
        pace = 1000 * (now - self._began) / max(done - self._first, 1)
        self._progress.update(
            self._task,
            completed=done,
            loss=f"{float(loss):.4f}",
            pace=f"{pace:.1f}",
            epoch=(done - 1) // self._per_epoch + 1,
        )

    def epoch(self, row: Row) -> None:
        """Show the accuracy."""
        accuracy = row["validation_accuracy"]
        shown = "–" if accuracy is None else f"{accuracy:.1%}"
        self._progress.update(self._task, accuracy=shown, completed=row["step"])

    def note(self, text: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(f"note: {text}", highlight=False, markup=False)

    def end(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class TensorBoard(Quiet):
    """Scalars for TensorBoard in the run's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise Refused(f"--tensorboard needs TensorBoard: {install('tensorboard')}") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def epoch(self, row: Row) -> None:
        """Write the epoch's numbers."""
        for key in ("loss", "train_accuracy", "validation_accuracy", "test_accuracy"):
            if row.get(key) is not None:
                self._writer.add_scalar(key, row[key], row["epoch"])

    def note(self, text: str) -> None:
        """Nothing: another watcher prints it."""

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


def default() -> Watch:
    """A bar in a terminal, where rich is there; else nothing."""
    if not sys.stderr.isatty():
        return Quiet()
    try:
        return Bar()
    except ImportError:
        return Quiet()
