"""What a figure shows, in words, for those who cannot see it."""

import math

from proxprop.lab.analysis import Arm, Task, angles
from proxprop.lab.report.tables import loss_text, percent


def curves(task: Task, optimizer: str) -> str:
    """Where every curve of `figures.curves` ends."""
    ends = [
        f"{arm.name} at learning rate {arm.best_rate:g} ends at loss {loss_text(arm.final('loss', arm.best_rate))}, "
        f"validation accuracy {percent(arm.final('validation_accuracy', arm.best_rate))}"
        for arm in task.of(optimizer)
    ]
    return _told(
        "Four panels: training loss and validation accuracy, over epochs and over training time", ends
    )


def robustness(task: Task, optimizer: str) -> str:
    """The range, the best and the lost learning rates of every line of `figures.robustness`."""
    return _told(
        "Two panels over the learning rate: final training loss and final validation accuracy",
        [_rates(arm) for arm in task.of(optimizer)],
    )


def _rates(arm: Arm) -> str:
    lost = [f"{rate:g}" for rate in arm.rates if not math.isfinite(arm.final("loss", rate).mean)]
    best = loss_text(arm.final("loss", arm.best_rate))
    diverged = f", diverged at {', '.join(lost)}" if lost else ""
    tried = f"from {min(arm.rates):g} to {max(arm.rates):g}"
    return f"{arm.name} {tried}, best at {arm.best_rate:g} with loss {best}{diverged}"


def angle(task: Task, optimizer: str) -> str:
    """The first and the last angle of every line of `figures.angle`."""
    lines = [
        f"{arm.name}, layer {name} from {degrees[0]:.0f} to {degrees[-1]:.0f} degrees"
        for arm in task.of(optimizer)
        for name, degrees in angles(arm.best).items()
    ]
    return _told("A panel for each solver: the angle to the gradient over epochs", lines)


def _told(panels: str, lines: list[str]) -> str:
    return f"{panels}. {'; '.join(lines)}."
