"""The parts of a report, each a function from a task to HTML."""

import math
from collections.abc import Iterator, Sequence

from proxprop.lab import figures, paper
from proxprop.lab.analysis import CLOSE, OPTIMIZER_NAMES, Task, counted
from proxprop.lab.config import command
from proxprop.lab.findings import findings, headline
from proxprop.lab.records import Record
from proxprop.lab.report import descriptions, html
from proxprop.lab.report.tables import Table, estimated, final_table, layer_table, rate_table


def task_sections(task: Task, salt: str) -> str:
    """Everything about one task."""
    parts = [f'<p class="task">{html.escaped(task.title)}</p>', html.paragraph(_lead(task), "lead")]
    parts += [html.findings_box(headline(task), findings(task)), *_final(task), *_curves(task, salt)]
    parts += [*_robustness(task, salt), *_angles(task, salt), *_layers(task)]
    return "\n".join(parts)


def _lead(task: Task) -> str:
    records = [record for arm in task.arms for found in arm.rates.values() for record in found]
    seeds = len({record.config.seed for record in records})
    taus = ", ".join(f"{tau:g}" for tau in task.tau_thetas())
    implicit = f", τ_θ = {taus}" if taus else ""
    open_ends = sum(record.status == "unfinished" for record in records)
    ends = (
        "is unfinished and counts as far as it"
        if open_ends == 1
        else "are unfinished and count as far as they"
    )
    unfinished = f" {open_ends} of them {ends} got." if open_ends else ""
    again = (
        f" {counted(task.repeated, 'more record')} of a seed that is already there left out."
        if task.repeated
        else ""
    )
    counts = [counted(len(records), "run"), counted(len(task.arms), "method"), counted(seeds, "seed")]
    return f"{', '.join(counts)} each{implicit}.{unfinished}{again}"


def _final(task: Task) -> Iterator[str]:
    yield html.heading("Where each method ends")
    yield html.paragraph(
        "Each method at its own best learning rate, the one with the lowest mean final full-batch training loss; "
        "mean ± standard deviation over seeds. A learning rate is usable when it ends within "
        f"{100 * CLOSE:.0f} points of the best validation accuracy any method reached with the same optimizer. "
        "Time per step is the median over all runs."
    )
    yield html.table(final_table(task), f"Where each method ends: {task.title}")


def _curves(task: Task, salt: str) -> Iterator[str]:
    yield html.heading("Over epochs and over time")
    for optimizer in task.optimizers():
        yield html.heading(OPTIMIZER_NAMES.get(optimizer, optimizer), 3)
        caption = (
            "Mean over seeds, shaded from the lowest to the highest seed; evaluation is not counted as training time. "
            "The dotted line marks where the fastest method had finished."
        )
        if any(paper.curve(arm.best[0].config, "loss", "epoch") for arm in task.of(optimizer)):
            caption += " A wide pale line is the paper's own curve."
        told = descriptions.curves(task, optimizer)
        yield html.figure(figures.curves(task, optimizer), caption, told, f"{salt}-curves-{optimizer}")


def _robustness(task: Task, salt: str) -> Iterator[str]:
    searched = [name for name in task.optimizers() if any(len(arm.rates) > 1 for arm in task.of(name))]
    if not searched:
        return
    yield html.heading("How much the learning rate matters")
    for optimizer in searched:
        yield html.heading(OPTIMIZER_NAMES.get(optimizer, optimizer), 3)
        caption = (
            "The same learning rates for every method. Bars reach from the lowest to the highest seed; "
            "× at the edge marks a learning rate at which a seed diverged or ended at a loss beyond 1000."
        )
        told = descriptions.robustness(task, optimizer)
        yield html.figure(figures.robustness(task, optimizer), caption, told, f"{salt}-rates-{optimizer}")
        yield html.table(rate_table(task, optimizer), f"Final loss at every learning rate, {optimizer}")


def _angles(task: Task, salt: str) -> Iterator[str]:
    drawn = [(name, figures.angle(task, name)) for name in task.optimizers()]
    drawn = [(name, figure) for name, figure in drawn if figure is not None]
    if not drawn:
        return
    yield html.heading("How far the direction turns away from the gradient")
    yield html.paragraph(
        "The angle between the proximal direction D = (I/τ_θ + AᵀA)⁻¹AᵀG and the gradient AᵀG of each converted layer, "
        "on the first batch of the training samples. Below 90° it is a direction of descent."
    )
    for optimizer, figure in drawn:
        yield html.heading(OPTIMIZER_NAMES.get(optimizer, optimizer), 3)
        caption = "Each method at its best learning rate, mean over seeds."
        told = descriptions.angle(task, optimizer)
        yield html.figure(figure, caption, told, f"{salt}-angle-{optimizer}")


def _layers(task: Task) -> Iterator[str]:
    arms = {arm.solver: arm for arm in task.arms if arm.solver != "backprop" and arm.best[0].layers}
    if arms:
        yield html.heading("What is solved where, and what it costs")
        yield html.paragraph(
            "The plan of the library for this batch size, with the extra work and memory it estimates beside "
            "BackProp's own work for the layer. Time also goes into everything that is not arithmetic, which weighs "
            "most where layers are small; so what a whole step took stands beside it, as measured."
        )
    for solver, arm in arms.items():
        yield html.heading(arm.name, 3)
        yield html.table(layer_table(arm), f"Layers under {arm.name}")
        yield html.paragraph(_overhead(task, solver, estimated(arm)))


def _overhead(task: Task, solver: str, share: float) -> str:
    ratios = []
    for arm in task.arms:
        base = task.backprop(arm.optimizer)
        if arm.solver == solver and base is not None and math.isfinite(arm.ms_per_step / base.ms_per_step):
            ratio = arm.ms_per_step / base.ms_per_step
            ratios.append(f"{ratio:.2f}× with {OPTIMIZER_NAMES.get(arm.optimizer, arm.optimizer)}")
    measured = f" A whole step took, measured beside BackProp's, {', '.join(ratios)}." if ratios else ""
    reckoning = f"Converted layers together: +{share:.0%} FLOPs, estimated." if math.isfinite(share) else ""
    return reckoning + measured


def rerun_section(records: Sequence[Record], rerun: str | None) -> str:
    """What was run, on what, and how to run it again."""
    parts = [html.heading("What was run, and how to run it again")]
    if rerun:
        parts.append(html.code(rerun))
    environments = _environments(records)
    parts.append(html.table(Table(["environment", "value"], environments, frozenset({1})), "Environment"))
    commands = "\n".join(command(r.config, str(r.folder)) for r in records)
    runs = [[r.folder.name, r.status, str(r.last["epoch"])] for r in records]
    parts.append(html.folded("Every run by itself", html.code(commands)))
    ended = "How every run ended"
    parts.append(html.folded(ended, html.table(Table(["run", "status", "epochs"], runs), ended)))
    notes = list(dict.fromkeys(f"{r.folder.name}: {note}" for r in records for note in r.notes))
    if notes:
        listed = "".join(html.paragraph(note) for note in notes)
        parts.append(
            html.folded(f"{counted(len(notes), 'note')} from the runs", f'<div class="note">{listed}</div>')
        )
    return "\n".join(parts)


def _environments(records: Sequence[Record]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for record in records:
        for key, value in record.environment.items():
            if key != "time" and value is not None:
                found.setdefault(key, []).append(str(value))
    return [[key, ", ".join(dict.fromkeys(values))] for key, values in found.items()]
