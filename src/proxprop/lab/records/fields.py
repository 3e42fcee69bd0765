"""What a row of a record must hold. A checksum says that a row is what was written, not that it makes sense."""

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from proxprop.lab.records.sealed import Damaged

Fields = Mapping[str, tuple[type, ...]]

WHOLE, NUMBER, MAYBE, TEXT = (int,), (int, float), (int, float, NoneType), (str,)
ACCURACIES = dict.fromkeys(("train_accuracy", "validation_accuracy", "test_accuracy"), MAYBE)
EPOCH: Fields = {"epoch": WHOLE, "step": WHOLE, "loss": MAYBE, "batch_loss": MAYBE, **ACCURACIES}
STEP: Fields = {"step": WHOLE, "batch_loss": MAYBE}
TIMING: Fields = {"epoch": WHOLE, "step": WHOLE, "seconds": NUMBER, "ms_per_step": MAYBE}
NOTE: Fields = {"text": TEXT}
LAYER: Fields = {
    "name": TEXT,
    "kind": TEXT,
    "parameters": WHOLE,
    "status": TEXT,
    "reason": (str, NoneType),
    "space": (str, NoneType),
    "flops": MAYBE,
    "backprop_flops": MAYBE,
    "bytes": MAYBE,
}
START: Fields = {}
STATUS = ("finished", "diverged")


def check(row: object, fields: Fields) -> None:
    """Look at the type of every field; a row may hold more than these. A whole number has 64 bits.

    >>> check({"epoch": "3"}, {"epoch": WHOLE})
    Traceback (most recent call last):
    ...
    proxprop.lab.records.sealed.Damaged: epoch should be int but is '3'

    Raises:
        Damaged: a field is missing or of another type.
    """
    if not isinstance(row, dict):
        raise Damaged(f"a row should have fields but is {row!r}")
    for name, kinds in fields.items():
        if name not in row:
            raise Damaged(f"{name} is missing")
        if type(row[name]) not in kinds:
            accepted = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise Damaged(f"{name} should be {accepted} but is {row[name]!r}")
        if type(row[name]) is int and row[name].bit_length() > 63:
            raise Damaged(f"{name} should have 64 bits but has {row[name].bit_length()}")


def measured(row: dict[str, Any]) -> None:
    """Check a row of metrics.jsonl: a measured epoch, or a logged step."""
    kind = row.get("kind")
    if kind not in ("epoch", "step"):
        raise Damaged(f"kind should be epoch or step but is {kind!r}")
    check(row, EPOCH if kind == "epoch" else STEP)
    if "cosine" in row:
        check(row, {"cosine": (dict,)})
        check(row["cosine"], dict.fromkeys(row["cosine"], MAYBE))


def holds(fields: Fields) -> Callable[[dict[str, Any]], None]:
    """A check that a row holds these fields."""
    return lambda row: check(row, fields)


def lists(name: str, fields: Fields) -> Callable[[dict[str, Any]], None]:
    """A check that a file holds rows with these fields under a name."""

    def look(values: dict[str, Any]) -> None:
        check(values, {name: (list,)})
        for row in values[name]:
            check(row, fields)

    return look


def result(values: dict[str, Any]) -> None:
    """Check result.json: how a run ended."""
    if (status := values.get("status")) not in STATUS:
        raise Damaged(f"status should be one of {', '.join(STATUS)} but is {status!r}")
