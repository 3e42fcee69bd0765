"""The command `proxprop`, as far as it goes without torch: its help, and a Ctrl-C while the rest is being imported.

It stands beside the package because importing anything from the package imports torch, which takes seconds.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

HELP = """Train with and without proximal steps, compare, and look at the result.

\b
Start here:
    proxprop compare                       a report in about a minute, no download
    proxprop doctor                        what this machine has, what is missing
    proxprop train --data cifar10 --download --solver cg:3    a run on CIFAR-10
    proxprop report runs --out out/report  look at your runs

\b
Exit codes: 0 done; 1 doctor misses something needed; 2 a mistake in the command;
3 the run diverged; 130 stopped by Ctrl-C, after the current step.
"""
COMMANDS = {
    "compare": "Train BackProp and ProxProp side by side.",
    "train": "Train one run and record it.",
    "reproduce": "Run the paper's experiments on CIFAR-10 and say what is true.",
    "bench": "Compare ProxProp with its peers: equal numbers of trials, targets fixed beforehand, time to target.",
    "report": "Draw figures and a report from records.",
    "spectrum": "Show how ill-conditioned a dataset is.",
    "doctor": "Say what is there and what is missing.",
}
INTERRUPTED = 130
MISTAKE = 2
LAB = ("matplotlib", "numpy", "rich", "safetensors", "sklearn", "typer")
"""What the extra `[lab]` brings, by the names that are imported."""
INSTALL = "pip install '.[lab]' in a checkout of proxprop"


def main() -> None:
    """Show the help, or import the lab and let it run the command."""
    if sys.argv[1:] in ([], ["--help"]):
        _show_help()
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from proxprop.lab.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in LAB:
            raise
        sys.stderr.write(f"error: the command line needs more packages: {INSTALL}\n")
        sys.exit(MISTAKE)

    signal.signal(signal.SIGINT, before)
    run()


def application(commands: Mapping[str, Callable[..., None]]) -> Any:
    """The typer application of these commands.

    Raises:
        ImportError: typer is not installed.
    """
    import typer

    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, command in commands.items():
        app.command(name, help=COMMANDS[name] if command is _shown_only else None)(command)
    return app


def _show_help() -> None:
    """Show the help and leave; without typer do nothing, the lab will say what to install."""
    try:
        app = application(dict.fromkeys(COMMANDS, _shown_only))
    except ImportError:
        return
    try:
        app()
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(MISTAKE)


def _shown_only() -> None:
    """Stand in for a command whose name and summary are wanted, but not the command."""


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: there is nothing to tidy up yet, and an exception would surface from inside somebody's import."""
    os.write(2, b"Stopped.\n")
    os._exit(INTERRUPTED)
