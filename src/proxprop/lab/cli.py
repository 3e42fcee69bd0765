"""The command `proxprop`: one table of commands, and one place where refusals become messages and exit codes."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from proxprop.lab.refusal import Refused

MISTAKE, INTERRUPTED = 2, 130
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave by its exit code."""
    try:
        app = build()
        app(args=list(arguments) if arguments is not None else None)
    except Refused as refusal:
        if os.environ.get("PROXPROP_TRACEBACK"):
            raise
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(MISTAKE)
    except OSError as error:
        if os.environ.get("PROXPROP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # heard: one more would only be a traceback on the way out
        raise


def build() -> Any:
    """The typer application."""
    try:
        import typer
    except ImportError:
        raise Refused("the command line needs more packages: pip install 'proxprop[lab]'") from None
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, command in commands().items():
        app.command(name)(command)
    return app


def commands() -> dict[str, Callable[..., None]]:
    """Every command by its name."""
    from proxprop.lab.commands.compare import compare
    from proxprop.lab.commands.doctor import doctor
    from proxprop.lab.commands.report import report
    from proxprop.lab.commands.reproduce import reproduce
    from proxprop.lab.commands.spectrum import spectrum
    from proxprop.lab.commands.train import train

    named: list[Callable[..., None]] = [compare, train, reproduce, report, spectrum, doctor]
    return {command.__name__: command for command in named}
