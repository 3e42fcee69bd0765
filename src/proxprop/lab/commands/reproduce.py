"""`proxprop reproduce`: the paper's experiments."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from proxprop.lab import experiments
from proxprop.lab.analysis import tasks
from proxprop.lab.commands import options
from proxprop.lab.commands.compare import _command, run_and_tell
from proxprop.lab.commands.console import say, show
from proxprop.lab.report import write_report
from proxprop.lab.report.tables import final_table, rate_table

TITLES = {
    "fig1": "Figure 1, exact and approximate solutions",
    "table1": "Table 1, stability for larger step sizes",
    "fig2": "Figure 2, Adam",
}


class What(StrEnum):
    """What to reproduce."""

    fig1 = "fig1"
    table1 = "table1"
    fig2 = "fig2"
    all = "all"


def reproduce(
    what: Annotated[What, typer.Argument(help="Which of the paper's experiments.")],
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training samples; the paper's are 50.")
    ] = 50,
    quick: Annotated[
        bool, typer.Option("--quick", help="Digits and tiny layers, two epochs: proves it works.")
    ] = False,
    seeds: options.Seeds = 1,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    save_weights: Annotated[
        bool, typer.Option(help="Keep every run's final weights (about 95 MB each).")
    ] = False,
    out: options.Out = Path("out/reproduce"),
    download: options.Download = False,
) -> None:
    """Run the paper's experiments on CIFAR-10.

    The report draws the paper's own curves behind yours. Finished runs are not run again, so the command can be
    stopped and given again at any time.

    \b
    Examples:
        proxprop reproduce fig1 --download
        proxprop reproduce table1 --device cuda --seeds 3
        proxprop reproduce all --quick
    """
    given = {
        "data": "cifar10",
        "data_dir": data_dir,
        "epochs": epochs,
        "device": device,
        "precision": precision,
    }
    base = options.config_from(None, given | {"save_weights": save_weights})
    names = list(experiments.EXPERIMENTS) if what is What.all else [what.value]
    shrunk = experiments.quick if quick else list
    parts = {TITLES[name]: shrunk(experiments.paper([name], base, seeds)) for name in names}
    if download and not quick:
        options.fetch(base)
    configs = {config.slug(): config for part in parts.values() for config in part}
    records = run_and_tell(list(configs.values()), out / ("quick" if quick else "runs"), 1)
    named = dict(zip(configs, records, strict=True))
    groups = {title: [named[config.slug()] for config in part] for title, part in parts.items()}
    title = "Proximal Backpropagation, reproduced" + (
        " (quick: proves the command, nothing else)" if quick else ""
    )
    path = write_report(records, out, title, rerun=_command(), formats=("png",), groups=groups)
    for heading, group in groups.items():
        for task in tasks(group):
            show(final_table(task), f"{heading}: {task.title}")
            if any(len(arm.rates) > 1 for arm in task.arms):
                show(rate_table(task, "sgd"), "Final full-batch loss, ours / the paper's")
    say(f"Report: {path.resolve()}")
