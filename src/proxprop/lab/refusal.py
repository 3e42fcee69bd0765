"""How the lab says no: one exception for a person's mistake, one for a person's Ctrl-C."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class Refused(ValueError):
    """A request that cannot be carried out; the message is for whoever made it, without a traceback."""


class Interrupted(Exception):
    """A run was asked to stop and did so after the current step, leaving a checkpoint or its end in `folder`."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder, step)
        self.folder = folder
        self.step = step

    def __str__(self) -> str:
        return f"stopped after step {self.step} in {self.folder}"


def install(extra: str) -> str:
    """The command that installs an extra of this package, which no index has: from its checkout.

    >>> install("lab")
    "pip install '.[lab]' in a checkout of proxprop"
    """
    return f"pip install '.[{extra}]' in a checkout of proxprop"


def nearest(value: str, accepted: Iterable[str]) -> str | None:
    """The accepted word most like `value`, or None when none is like it.

    >>> nearest("epoch", ["data", "epochs"])
    'epochs'
    """
    return next(iter(get_close_matches(value, list(accepted), n=1, cutoff=0.5)), None)


def one_of(what: str, value: str, accepted: Iterable[str]) -> str:
    """Return `value` if it is accepted, else refuse, naming the nearest accepted one.

    >>> one_of("optimizer", "adma", ["sgd", "adam"])
    Traceback (most recent call last):
    ...
    proxprop.lab.refusal.Refused: optimizer should be one of sgd, adam but is 'adma'; did you mean 'adam'?
    """
    choices = list(accepted)
    if value in choices:
        return value
    near = nearest(value, choices)
    hint = f"; did you mean '{near}'?" if near else ""
    raise Refused(f"{what} should be one of {', '.join(choices)} but is '{value}'{hint}")
