"""`proxprop bench`: against its peers, with equal budgets."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from proxprop.lab import devices
from proxprop.lab.commands.console import say
from proxprop.lab.commands.options import MOST
from proxprop.lab.data import folders
from proxprop.lab.peers import protocol
from proxprop.lab.peers.go import Tell, go, line, once
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.refusal import Refused, one_of

WAYS = ("eager", "compile", "graph")
"""How a step can be run; on a CPU compilation would take longer than all the timing, so it has to be asked for."""


class What(StrEnum):
    """What to do."""

    run = "run"
    time = "time"
    write = "write"


def bench(
    what: Annotated[
        What, typer.Argument(help="run what is missing, time steps, or write the figures.")
    ] = What.run,
    task: Annotated[
        list[str] | None, typer.Option(help="A task, or several by repeating it [all of this device's size].")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method, or several by repeating it [all].")
    ] = None,
    trial: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Run this trial again [the chosen one].")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Run this seed again; 0 is the trials'.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=MOST, help="Trials of every method.")] = protocol.TRIALS,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST, help="Fresh seeds of every choice.")
    ] = protocol.SEEDS,
    way: Annotated[
        list[str] | None,
        typer.Option(help="How `time` runs a step: eager, compile, graph [eager; on a CUDA GPU all three]."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results/peers"),
) -> None:
    """Compare ProxProp with its peers: equal numbers of trials, targets fixed beforehand, time to target.

    Runs what is missing and records each run as soon as it has ended, so that it can be stopped and given again at any
    time. AdamW's runs of a task come first, because its target is made from them. With --trial or --seed it runs one
    row of the tables again and shows it beside the recorded one. `time` times steps with all methods in turns, and
    wants a quiet machine. `write` draws the figures from the records.

    \b
    Examples:
        proxprop bench --task digits
        proxprop bench --task digits --method muon --seed 3
        proxprop bench time
        proxprop bench write
    """
    where = devices.device(device)
    tasks = [one_of("task", name, TASKS) for name in task or _fitting(where)]
    methods = [one_of("method", name, METHODS) for name in method or METHODS]
    store = Store(out)
    if what is What.write:
        from proxprop.lab.peers import figures

        figures.write(store)
        say(f"Written: {out.resolve()}")
    elif what is What.time:
        from proxprop.lab.peers import timing

        ways = [one_of("way", name, WAYS) for name in way or (WAYS if where.type == "cuda" else WAYS[:1])]
        timing.time_all(store, tasks, methods, where, ways, say)
    elif trial is not None or seed is not None:
        _again(store, tasks, methods, trial, seed, where)
    else:
        with _telling() as tell:
            go(store, tasks, methods, trials, seeds, where, tell)


def _again(
    store: Store,
    tasks: Sequence[str],
    methods: Sequence[str],
    trial: int | None,
    seed: int | None,
    where: torch.device,
) -> None:
    """Run one row again and show it beside the recorded one."""
    if len(tasks) != 1 or len(methods) != 1:
        raise Refused("--trial and --seed run one row again: name one --task and one --method")
    runs = store.runs(tasks[0])
    chosen = protocol.choice(runs, tasks[0], methods[0]) if trial is None else trial
    if chosen is None:
        raise Refused(f"no trial of {methods[0]} in {tasks[0]} is recorded in {store.folder}: give --trial")
    job = protocol.Job(tasks[0], methods[0], chosen, protocol.TRIAL_SEED if seed is None else seed)
    say(f"now:      {line(once(job, where))}")
    for run in runs:
        if run.key == job:
            say(f"recorded: {line(run)} ({run.device}, torch {run.torch}, commit {run.commit})")


def _fitting(where: torch.device) -> list[str]:
    """The tasks of a device's size; those whose data is missing are named and left out."""
    sized = [task for task in TASKS.values() if (task.size == "gpu") == (where.type == "cuda")]
    missing = [task for task in sized if task.dataset and folders.find(task.dataset, None) is None]
    for task in missing:
        say(
            f"{task.name} is left out: {task.dataset} was not found; `proxprop doctor` says where it is looked for"
        )
    return [task.name for task in sized if task not in missing]


@contextmanager
def _telling() -> Iterator[Tell]:
    """A bar in a terminal, a line for each run elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text, part: say(text)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(BarColumn(bar_width=24), TextColumn("{task.description}"), console=Console(stderr=True))
    row = bar.add_task("", total=1.0)
    with bar:
        yield lambda text, part: bar.update(row, description=text, completed=part)
