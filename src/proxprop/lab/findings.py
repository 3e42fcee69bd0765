"""The report's sentences, each computed from the records; what they say depends on what was measured."""

import math
from collections.abc import Callable

from proxprop.lab.analysis import CLOSE, OPTIMIZER_NAMES, Arm, Task, reach, usable_rates


def headline(task: Task) -> str | None:
    """What it took ProxProp's soonest solver to reach BackProp's best final loss; None without both to compare."""
    parts = []
    for name, backprop, others in _contests(task):
        target = backprop.final("loss", backprop.best_rate).mean
        before, clock = (reach(backprop.best, target, key) for key in ("epoch", "seconds"))
        reached = [
            (epochs, arm) for arm in others if (epochs := reach(arm.best, target, "epoch")) is not None
        ]
        if before is None:
            parts.append(f"with {name} BackProp never settled")
        elif not reached:
            parts.append(f"with {name} no ProxProp solver reached it")
        else:
            soonest, arm = min(reached, key=lambda pair: pair[0])
            seconds = reach(arm.best, target, "seconds")
            time = f", {seconds / clock:.2g}× its time" if seconds and clock else ""
            parts.append(f"with {name} {arm.name} took {soonest:g} epochs instead of {before:g}{time}")
    return f"To reach BackProp's best final training loss: {'; '.join(parts)}." if parts else None


def findings(task: Task) -> list[str]:
    """A sentence on each question; none where there is nothing to compare."""
    questions: list[tuple[str, Callable[[Task, Arm, list[Arm]], str | None]]] = [
        ("Choice of learning rate", _robustness),
        ("Training loss", _losses),
        ("Test accuracy", _accuracies),
        ("Time per step", _costs),
    ]
    sentences = []
    for title, answer in questions:
        parts = [(name, answer(task, backprop, others)) for name, backprop, others in _contests(task)]
        told = [f"with {name}, {part}" for name, part in parts if part]
        if told:
            sentences.append(f"{title}: {'; '.join(told)}.")
    return sentences


def _contests(task: Task) -> list[tuple[str, Arm, list[Arm]]]:
    """Per optimizer: its name, BackProp, and what is compared with it."""
    found = []
    for optimizer in task.optimizers():
        backprop = task.backprop(optimizer)
        others = [arm for arm in task.of(optimizer) if arm.solver != "backprop"]
        if backprop is not None and others:
            found.append((OPTIMIZER_NAMES.get(optimizer, optimizer), backprop, others))
    return found


def _robustness(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """How many of the learning rates that were tried serve each method."""
    if len(backprop.rates) < 3:
        return None
    counts = [f"{arm.name} {len(usable_rates(task, arm))} of {len(arm.rates)}" for arm in (backprop, *others)]
    return f"rates ending within {100 * CLOSE:.0f} points of the best validation accuracy are " + ", ".join(
        counts
    )


def _losses(task: Task, backprop: Arm, others: list[Arm]) -> str | None:
    """Where each ends at its own best learning rate."""
    ends = [(arm.name, arm.final("loss", arm.best_rate).mean) for arm in (backprop, *others)]
    return ", ".join(
        f"{name} ends at {loss:.2g}" if math.isfinite(loss) else f"{name} diverged" for name, loss in ends
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
