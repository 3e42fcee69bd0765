"""`proxprop reproduce`: the paper, claim by claim."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from proxprop.lab import devices, experiments, records
from proxprop.lab.commands import options
from proxprop.lab.commands.compare import run_and_tell
from proxprop.lab.commands.console import say
from proxprop.lab.config import Config
from proxprop.lab.data import load
from proxprop.lab.records import Record
from proxprop.lab.refusal import Refused
from proxprop.lab.reproduction import propositions, spectrum
from proxprop.lab.reproduction.files import write_csv
from proxprop.lab.reproduction.results import TABLES
from proxprop.lab.reproduction.write import DOCUMENT, refuse_fewer, staged, write_document, write_tables

QUICK_WIDTHS, QUICK_EPOCHS = (32, 16, 32), (0, 1)
RUNS = Path("out/reproduce/runs")


class What(StrEnum):
    """What to reproduce."""

    fig1 = "fig1"
    table1 = "table1"
    fig2 = "fig2"
    spectrum = "spectrum"
    propositions = "propositions"
    beyond = "beyond"
    all = "all"


def reproduce(
    what: Annotated[What, typer.Argument(help="Which part of the paper.")],
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training samples; the paper's are 50.")
    ] = experiments.PAPER_EPOCHS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Digits and tiny layers, two epochs: proves it works.")
    ] = False,
    only_write: Annotated[
        bool, typer.Option("--only-write", help="Run nothing: write from the records that are there.")
    ] = False,
    seeds: options.Seeds = 3,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    save_weights: Annotated[
        bool, typer.Option(help="Keep every run's final weights (about 95 MB each).")
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(help=f"Folder with the runs' records [{RUNS}; with --quick: OUT/quick/runs]."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and REPRODUCTION.md.")] = Path(
        "out/reproduce"
    ),
    download: options.Download = False,
) -> None:
    """Run the paper's experiments on CIFAR-10 and say what is true.

    Writes tidy tables, figures with the paper's curves behind ours, and REPRODUCTION.md with a verdict on every claim.
    Finished runs are not run again, so the command can be stopped and given again at any time; what is still missing
    is left out and said. Tables are never replaced by tables of fewer runs.

    \b
    Examples:
        proxprop reproduce fig1 --download
        proxprop reproduce all --device cuda --out results/paper
        proxprop reproduce all --only-write --runs my/runs --out out/mine
        proxprop reproduce all --quick
    """
    given = {"data": "cifar10", "data_dir": data_dir, "epochs": epochs, "precision": precision}
    given |= {"device": device if only_write else str(devices.device(device or "auto"))}
    base = options.config_from(None, given | {"save_weights": save_weights})
    out = out / "quick" if quick else out
    folder = runs or (out / "runs" if quick else RUNS)
    shrunk = experiments.quick if quick else list
    wanted = {name: shrunk(experiments.paper([name], base, seeds)) for name in experiments.EXPERIMENTS}
    names = _names(what)
    if names:
        refuse_fewer(_records(folder, only_write), wanted, [] if only_write else names, out)
    elif only_write and not any((out / f"{name}.csv").is_file() for name in TABLES):
        raise Refused(f"there is nothing to write from: {out} holds no tables")
    if not only_write:
        if download and not quick:
            options.fetch(base)
        _run([config for name in names for config in wanted[name]], folder)
        _measure(what, Config(data="digits", hidden=QUICK_WIDTHS) if quick else base, out, quick)
    with staged(out) as fresh:
        if names:
            write_tables(records.find([folder], tell=say), wanted, fresh)
        write_document(fresh)
    say(f"Written: {(out / DOCUMENT).resolve()}")


def _records(folder: Path, needed: bool) -> list[Record]:
    """The runs of a folder; where there are none, an empty list, or a refusal when they are needed."""
    try:
        return records.find([folder])
    except Refused as refusal:
        if needed:
            raise Refused(
                f"there is nothing to write from: {refusal}; name the folder of the runs by --runs"
            ) from refusal
        return []


def _names(what: What) -> list[str]:
    """The experiments a word stands for; the two measurements are none."""
    if what is What.all:
        return list(experiments.EXPERIMENTS)
    if what is What.beyond:
        return list(experiments.BEYOND)
    return [what.value] if what.value in experiments.PAPER else []


def _run(configs: list[Config], folder: Path) -> None:
    """Run what is missing, each run once."""
    once = {config.slug(): config for config in configs}
    if once:
        run_and_tell(list(once.values()), folder, 1)


def _measure(what: What, base: Config, out: Path, quick: bool) -> None:
    """Measure the spectrum and the propositions, unless they are already there."""
    if what in (What.all, What.spectrum) and not (path := out / "spectrum.csv").is_file():
        say("Measuring the spectrum.")
        dataset = load(base.data, base.data_dir, validation=0).to(devices.device(base.device))
        write_csv(path, spectrum.COLUMNS, spectrum.measure(spectrum.samples(dataset)))
    if what in (What.all, What.propositions) and not (path := out / "propositions.csv").is_file():
        say("Measuring angles and energies along training runs.")
        propositions.write(base, path, QUICK_EPOCHS if quick else propositions.EPOCHS)
