"""`proxprop doctor`: what was found, and what to do about what is missing."""

import platform
from importlib import metadata

import torch
import typer

import proxprop
from proxprop.lab.commands.console import say, show
from proxprop.lab.data import folders
from proxprop.lab.records.environment import commit, device_name
from proxprop.lab.refusal import install
from proxprop.lab.report.tables import Table

NEEDED = {
    "numpy": "training",
    "safetensors": "training",
    "rich": "progress and tables",
    "typer": "this command",
}
WANTED = {"matplotlib": "figures", "scikit-learn": "the digits", "tensorboard": "--tensorboard"}
EXTRAS = {"tensorboard": "tensorboard"}


def doctor() -> None:
    """Say what is there and what is missing.

    Packages, devices, datasets, and what to do about each that is not there.

    \b
    Example:
        proxprop doctor
    """
    advice: list[str] = []
    rows = [
        ["proxprop", f"{proxprop.__version__} ({commit() or 'no checkout'})"],
        ["Python", platform.python_version()],
    ]
    rows += [["torch", torch.__version__], *_packages(advice), *_devices(advice), *_datasets(advice)]
    show(Table(["what", "found"], rows, frozenset({1})), "What this machine has")
    for line in advice:
        say(f"• {line}")
    missing = [name for name in NEEDED if _version(name) is None]
    if missing:
        raise typer.Exit(1)
    say("Everything that is needed is there." if advice else "Everything is there.")


def _packages(advice: list[str]) -> list[list[str]]:
    rows = []
    for name, use in (NEEDED | WANTED).items():
        version = _version(name)
        rows.append([name, version or f"missing (for {use})"])
        if version is None:
            advice.append(f"For {use}: {install(EXTRAS.get(name, 'lab'))}")
    return rows


def _devices(advice: list[str]) -> list[list[str]]:
    rows = [["cpu", f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads"]]
    for index in range(torch.cuda.device_count()):
        gpu = torch.device("cuda", index)
        memory = torch.cuda.get_device_properties(gpu).total_memory / 2**30
        rows.append([f"cuda:{index}", f"{device_name(gpu)}, {memory:.0f} GiB"])
    if torch.backends.mps.is_available():
        rows.append(["mps", "Apple GPU"])
    if len(rows) == 1:
        rows.append(["GPU", "none that torch can use"])
        advice.append(
            "Without a GPU use --device cpu (the default); `reproduce` without --quick takes days there."
        )
    return rows


def _datasets(advice: list[str]) -> list[list[str]]:
    rows = []
    for name in folders.INSIDE:
        found = folders.find(name)
        rows.append([name, str(found) if found else "not found"])
        if found is None:
            advice.append(
                f"For {name}: proxprop train --data {name} --download, or name its folder by --data-dir."
            )
    searched = ", ".join(str(root) for root in folders.roots())
    return [*rows, ["searched", f"{searched} (set {folders.VARIABLE} for another)"]]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
