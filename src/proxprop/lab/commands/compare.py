"""`proxprop compare`: BackProp and ProxProp side by side, and a report to look at."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from proxprop.lab import devices, experiments
from proxprop.lab.analysis import counted, tasks
from proxprop.lab.commands import options
from proxprop.lab.commands.console import say, show
from proxprop.lab.config import Config
from proxprop.lab.methods import method
from proxprop.lab.records import Record
from proxprop.lab.refusal import Interrupted, Refused, one_of
from proxprop.lab.report import write_report
from proxprop.lab.report.tables import final_table

TITLE = "BackProp and ProxProp side by side"


def compare(
    data: options.Data = None,
    data_dir: options.DataDir = None,
    model: Annotated[str, typer.Option(help="As in train.")] = "mlp",
    hidden: Annotated[str | None, typer.Option(help="Hidden widths of the mlp.")] = None,
    solvers: Annotated[str, typer.Option(help="Solvers, separated by commas.")] = "backprop,cg:3,exact",
    optimizers: Annotated[str, typer.Option(help="Optimizers, separated by commas.")] = "sgd,adam",
    lrs: Annotated[
        str | None, typer.Option(help="Learning rates for every optimizer, separated by commas.")
    ] = None,
    tau_theta: Annotated[float | None, typer.Option(help="Proximal step size τ_θ.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training samples.")] = 15,
    seeds: options.Seeds = 3,
    device: options.Device = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; one per core (two at most) on CPU.")
    ] = None,
    out: options.Out = Path("out/compare"),
    download: options.Download = False,
) -> None:
    """Train BackProp and ProxProp side by side.

    Every solver with every optimizer over the same learning rates and seeds; one HTML report of it all. By default
    on the digits inside scikit-learn, about a minute on two cores. Finished runs are not run again.

    \b
    Examples:
        proxprop compare
        proxprop compare --solvers backprop,cg:1,cg:3,cg:10 --optimizers sgd,adamw,muon --seeds 5
        proxprop compare --data cifar10 --download --model convnet --device cuda --epochs 20 --out out/cifar
    """
    on_cpu, cores = devices.device(device or "cpu").type == "cpu", os.cpu_count() or 1
    workers = jobs if jobs is not None else (min(2, cores) if on_cpu else 1)
    threads = max(1, cores // workers) if on_cpu else None
    settings = {
        "data": data, "data_dir": data_dir, "model": model, "hidden": options.widths(hidden), "tau_theta": tau_theta,
        "batch_size": batch_size, "epochs": epochs, "device": device, "threads": threads,
    }  # fmt: skip
    base = options.config_from(None, settings)
    configs = experiments.compare(base, _listed(solvers, base), _rates(optimizers, lrs), seeds)
    if download:
        options.fetch(base)
    records = run_and_tell(configs, out / "runs", workers, _first_report(configs, out))
    path = write_report(records, out, TITLE, rerun=_command())
    for task in tasks(records):
        show(final_table(task), task.title)
    say(f"Report: {path.resolve()}")


Tell = Callable[[int, Record], None]
"""Called after each run with how many are done and with its record."""


def run_and_tell(
    configs: Sequence[Config], folder: Path, jobs: int, also: Tell = lambda number, record: None
) -> list[Record]:
    """Run a list; in a terminal with a bar over all of it, or one per run where they come one by one."""
    say(f"{counted(len(configs), 'run')} into {folder}; those already finished are not run again.")
    stop, show_progress = _bar(len(configs)) if jobs > 1 else _lines(len(configs))

    def tell(number: int, record: Record) -> None:
        show_progress(number, record)
        also(number, record)

    try:
        return experiments.run_all(configs, folder, jobs, tell=tell)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        stop()
        say(
            "Stopped. Give the same command again to go on: finished runs are kept, those under way are resumed."
        )
        raise typer.Exit(130) from interrupted
    finally:
        stop()


def _first_report(configs: Sequence[Config], out: Path) -> Tell:
    """Writes a report as soon as every setting has run with its first seed, while the other seeds run."""
    first = sum(config.seed == configs[0].seed for config in configs)
    records: list[Record] = []

    def tell(number: int, record: Record) -> None:
        records.append(record)
        if number == first < len(configs):
            path = write_report(records, out, TITLE, rerun=_command())
            say(f"First report, of one seed: {path.resolve()}")

    return tell


def _bar(total: int) -> tuple[Callable[[], None], Tell]:
    if not sys.stderr.isatty():
        return lambda: None, lambda number, record: None
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = [*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("runs", total=total)
    bar.start()
    return bar.stop, lambda number, record: bar.update(task, completed=number)


def _lines(total: int) -> tuple[Callable[[], None], Tell]:
    def tell(number: int, record: Record) -> None:
        loss = record.last["loss"]
        ended = "diverged" if loss is None else f"loss {loss:.4g}"
        say(f"[{number}/{total}] {record.folder.name}: {ended}")

    return lambda: None, tell


def _listed(solvers: str, base: Config) -> list[str]:
    names = solvers.split(",")
    for name in names:
        method(options.config_from(None, {"solver": name}))
    return names


def _rates(optimizers: str, lrs: str | None) -> dict[str, Sequence[float]]:
    names = [one_of("optimizer", name, ("sgd", "adam", "adamw", "muon")) for name in optimizers.split(",")]
    if lrs is None:
        return {name: experiments.COMPARED_RATES["sgd" if name == "sgd" else "adam"] for name in names}
    try:
        rates = [float(text) for text in lrs.split(",")]
    except ValueError as error:
        raise Refused(f"--lrs should be numbers like 0.01,0.1,1 but is '{lrs}'") from error
    return dict.fromkeys(names, rates)


def _command() -> str:
    return shlex.join(["proxprop", *sys.argv[1:]])
