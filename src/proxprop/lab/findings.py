"""The report's sentences, each computed from the records; what they say depends on what was measured."""

import math
from collections.abc import Callable

from proxprop.lab.analysis import CLOSE, OPTIMIZER_NAMES, Arm, Task, counted, reach, usable_rates
from proxprop.lab.methods import is_proximal
from proxprop.lab.records import Record


def headline(task: Task) -> str | None:
    """What it took ProxProp's soonest solver to reach the loss BackProp ends at; None without both to compare.

    The loss BackProp ends at is that of its worst seed at its best learning rate, so that every seed reaches it.
    """
    parts, fewer = [], []
    for name, backprop, others in _contests(task):
        target = max(_last_loss(record) for record in backprop.best)
        if not math.isfinite(target):
            parts.append(f"BackProp diverged at every learning rate with {name}")
            continue
        before, clock = reach(backprop.best, target, "epoch"), reach(backprop.best, target, "seconds")
        assert before is not None, "every seed of BackProp reaches the loss that its worst one ends at"
        reached = [
            (epochs, arm) for arm in others if (epochs := reach(arm.best, target, "epoch")) is not None
        ]
        if not reached:
            parts.append(f"no solver got there with {name}")
            fewer.append(False)
            continue
        soonest, arm = min(reached, key=lambda pair: pair[0])
        fewer.append(soonest < before)
        seconds = reach(arm.best, target, "seconds")
        time = f" ({seconds / clock:.2g}× the time)" if seconds is not None and clock else ""
        parts.append(f"{arm.name} took {counted(soonest, 'epoch')} instead of {before:g} with {name}{time}")
    return f"{_verdict(fewer)} To get to the loss BackProp ends at: {'; '.join(parts)}." if parts else None


def _verdict(fewer: list[bool]) -> str:
    if not fewer:
        return "There was nothing to catch up with."
    if all(fewer):
        return "ProxProp needed fewer epochs than BackProp."
    return (
        "ProxProp needed fewer epochs with some optimizers only."
        if any(fewer)
        else "ProxProp saved no epochs here."
    )


def _last_loss(record: Record) -> float:
    loss = record.last["loss"]
    return math.inf if loss is None else float(loss)


def findings(task: Task) -> list[str]:
    """A sentence on each question; none where there is nothing to compare."""
    questions: list[tuple[str, Callable[[Task, Arm, list[Arm]], str | None]]] = [
        (
            f"Learning rates that end within {100 * CLOSE:.0f} points of the best validation accuracy",
            _robustness,
        ),
        ("Final training loss, each at its best learning rate", _losses),
        ("Test accuracy at that learning rate", _accuracies),
        ("Time per step, measured", _costs),
    ]
    sentences = []
    for title, answer in questions:
        parts = [(name, answer(task, backprop, others)) for name, backprop, others in _contests(task)]
        told = [f"{name} – {part}" for name, part in parts if part]
        if told:
            sentences.append(f"{title}: {'; '.join(told)}.")
    return sentences


def _contests(task: Task) -> list[tuple[str, Arm, list[Arm]]]:
    """Per optimizer: its name, BackProp, and ProxProp's solvers; peers are in the tables and figures."""
    found = []
    for optimizer in task.optimizers():
        backprop = task.backprop(optimizer)
        others = [arm for arm in task.of(optimizer) if is_proximal(arm.solver)]
        if backprop is not None and others:
            found.append((OPTIMIZER_NAMES.get(optimizer, optimizer), backprop, others))
    return found


def _robustness(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """How many of the learning rates that were tried serve each method."""
    if len(backprop.rates) < 3:
        return None
    counts = [f"{arm.name} {len(usable_rates(task, arm))} of {len(arm.rates)}" for arm in (backprop, *others)]
    return ", ".join(counts)


def _losses(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """Where each ends at its own best learning rate."""
    ends = [(arm.name, arm.final("loss", arm.best_rate).mean) for arm in (backprop, *others)]
    return ", ".join(
        f"{name} {loss:.2g}" if math.isfinite(loss) else f"{name} diverged" for name, loss in ends
    )


def _accuracies(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """Test accuracy at the learning rate that was chosen by training loss."""
    ends = [(arm.name, arm.final("test_accuracy", arm.best_rate).mean) for arm in (backprop, *others)]
    return (
        ", ".join(f"{name} {100 * accuracy:.1f} %" for name, accuracy in ends if math.isfinite(accuracy))
        or None
    )


def _costs(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """What a step costs, measured."""
    base = backprop.ms_per_step
    if not math.isfinite(base):
        return None
    parts = [f"{arm.name} {arm.ms_per_step / base:.2f}×" for arm in others if math.isfinite(arm.ms_per_step)]
    return f"BackProp {base:.2f} ms, {', '.join(parts)}" if parts else None
