"""The command `proxprop`: one table of commands, and one place where refusals become messages and exit codes."""

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

from proxprop.lab.refusal import Refused, install
from proxprop_cli import INTERRUPTED, MISTAKE, application


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave by its exit code."""
    _forgive_ascii()
    try:
        app = build()
        given = list(arguments) if arguments is not None else None
        sys.exit(app(args=given, standalone_mode=False) or 0)
    except Exception as error:
        if os.environ.get("PROXPROP_TRACEBACK") or not (message := _message(error)):
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(MISTAKE)
    except KeyboardInterrupt:
        _stopped()
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:  # one more Ctrl-C would only be a traceback on the way out
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


def build() -> Any:
    """The typer application."""
    try:
        return application({name: _stoppable(command) for name, command in commands().items()})
    except ImportError as error:
        if error.name != "typer":
            raise
        raise Refused(f"the command line needs more packages: {install('lab')}") from None


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, for which Ctrl-C means what it means everywhere here, whatever typer would make of it."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            _stopped()

    return run


def _stopped() -> NoReturn:
    print("Stopped.", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _message(error: Exception) -> str | None:
    """What to tell about an error; None for one that is our own mistake and should leave a traceback.

    torch has no exception of its own for a failed allocation on the CPU. What typer raises for an option it does not
    take is known by its method alone: the class is typer's own in some versions, click's in others.
    """
    if isinstance(error, (Refused, OSError)):
        return str(error)
    if (told := getattr(error, "format_message", None)) is not None:
        return " ".join(told().split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error)):
        return f"there is not enough memory for this: {str(error).partition(chr(10))[0]}"
    return None


def _forgive_ascii() -> None:
    """Let a terminal that knows no Greek letters show a question mark for each."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def commands() -> dict[str, Callable[..., None]]:
    """Every command by its name."""
    from proxprop.lab.commands.bench import bench
    from proxprop.lab.commands.compare import compare
    from proxprop.lab.commands.doctor import doctor
    from proxprop.lab.commands.report import report
    from proxprop.lab.commands.reproduce import reproduce
    from proxprop.lab.commands.spectrum import spectrum
    from proxprop.lab.commands.train import train

    named: list[Callable[..., None]] = [compare, train, reproduce, bench, report, spectrum, doctor]
    return {command.__name__: command for command in named}
