"""The longer tables of the document: Table 1 cell by cell, robustness, readings of the spectrum, beyond the paper."""

import math
from collections.abc import Sequence

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims import beyond
from proxprop.lab.reproduction.claims import spectrum as readings
from proxprop.lab.reproduction.claims.table1 import METHODS, TAUS, Losses, best, grade, rows_of, span, theirs
from proxprop.lab.reproduction.claims.verdict import short
from proxprop.lab.reproduction.files import Row
from proxprop.lab.reproduction.markdown import table
from proxprop.lab.reproduction.measured import VALIDATION, Seeds, arm, final
from proxprop.lab.reproduction.results import Results

MARKS = {grades.YES: "✓", grades.ROUGHLY: "~", grades.NO: "✗", grades.NOT_RUN: ""}
NEAREST = 8


def table1_section(results: Results) -> str:
    """Ours under the paper's numbers, each marked."""
    found = rows_of(results)
    if not found:
        return ""
    rows = []
    for method in METHODS:
        if said := theirs(method):
            rows.append([f"{short(method)}, the paper's", *(_cell(said.get(tau)) for tau in TAUS)])
        for (name, iteration), losses in found.items():
            if name == method:
                title = f"**{short(method)}**" + (f", {iteration}" if iteration else "")
                rows.append(
                    [title, *(_marked(method, tau, losses, bool(said), results.seeds) for tau in TAUS)]
                )
    text = (
        f"Full-batch loss after 50 epochs. {MARKS[grades.YES]} reproduced, {MARKS[grades.ROUGHLY]} roughly, "
        f"{MARKS[grades.NO]} not, by the rule above; – diverged. The paper leaves the exact row out."
    )
    return "\n\n".join(["## Table 1, cell by cell", text, table(["τ", *(f"{tau:g}" for tau in TAUS)], rows)])


def _cell(loss: Seeds | None) -> str:
    if loss is None or not loss.count:
        return ""
    return words.number(loss.mean)


def _marked(method: str, tau: float, losses: Losses, said: bool, seeds: int) -> str:
    loss = losses.get(tau)
    if loss is None:
        return ""
    shown = (
        words.loss(loss, seeds) if loss.values else words.loss(loss, seeds).replace("diverged", words.NOTHING)
    )
    return f"{shown} {MARKS[grade(method, tau, loss)]}" if said else shown


def robustness_section(results: Results) -> str:
    """Learning-rate robustness as one number, three ways."""
    found = rows_of(results)
    if not found:
        return ""
    rows = []
    for source, lines in (("the paper's", _papers()), ("ours", found)):
        lowest = min((best(losses) for losses in lines.values()), default=math.inf)
        base = best(lines.get(("BackProp", None), {}))
        for (method, iteration), losses in lines.items():
            tau = min(losses, key=lambda tau: losses[tau].mean)
            title = short(method) + (f", {iteration}" if iteration else "")
            spans = [span(losses, 2 * best(losses)), span(losses, 2 * lowest), span(losses, base)]
            rows.append([f"{title}, {source}", f"{tau:g}", words.number(best(losses)), *map(_orders, spans)])
    columns = [
        "method", "best τ", "its loss", "within 2× of its own best", "within 2× of the lowest of all",
        "no higher than BackProp's best",
    ]  # fmt: skip
    text = (
        "Orders of magnitude of τ, on the grid of nine and around a method's best τ, at which the mean final loss is "
        "low enough; 0 is one τ only, – none. The grid has steps of a factor of 2 to 10, so these numbers are coarse."
    )
    return "\n\n".join(["## How wide a range of step sizes serves a method", text, table(columns, rows)])


def _papers() -> dict[tuple[str, str | None], Losses]:
    return {(method, None): losses for method in METHODS if (losses := theirs(method))}


def _orders(value: float | None) -> str:
    return words.NOTHING if value is None else f"{value:.1f}"


def spectrum_section(results: Results) -> str:
    """The readings nearest to the paper's largest eigenvalue."""
    if not results.spectrum:
        return ""
    single = {(r["reading"], r["images"]): r for r in results.spectrum if r["precision"] == "float32"}
    rows = [
        [
            row["reading"],
            str(row["images"]),
            f"{row['largest']:.3g}",
            f"{row['smallest']:.2g}",
            readings.orders(row),
            readings.orders(single[row["reading"], row["images"]]),
            f"{row['count'] * paper.LARGEST_EIGENVALUE / row['largest']:,.0f}",
        ]
        for row in readings.nearest(results.spectrum, NEAREST)
    ]
    columns = [
        "pixels",
        "images",
        "largest",
        "smallest",
        "orders",
        "orders in float32",
        "images for the paper's",
    ]
    text = (
        f"The {len(rows)} readings whose largest eigenvalue is nearest to the paper's, nearest first; all are in "
        "`spectrum.csv`. The largest eigenvalue grows in proportion to the number of images: the last column is the "
        "number at which it would be the paper's. JPEG with colour at half resolution leaves out fine colour detail, "
        "so the smallest eigenvalues are to be expected below the original's. 9,000 and 30,000 images were taken "
        "because of that column; no other set was chosen that way."
    )
    return "\n\n".join(["## Which spectrum the paper means", text, table(columns, rows)])


def beyond_section(results: Results) -> str:
    """Final losses and validation accuracies of everything beyond the paper's runs."""
    if not results.beyond:
        return ""
    rows = results.beyond
    sections = [
        _swept("Optimizers", arm(rows, **wanted), "tau", results.seeds, name)
        for name, wanted in beyond.OPTIMIZERS.items()
    ]
    sections.append(_swept("τ_θ", arm(rows, experiment="tau_theta"), "tau_theta", results.seeds, "τ = 1"))
    sections.append(_swept("Batch size", arm(rows, experiment="batches"), "batch_size", results.seeds))
    text = "Full-batch loss after ten epochs, and validation accuracy in brackets (`beyond.csv`)."
    return "\n\n".join(["## Beyond the paper, number by number", text, *filter(None, sections)])


def _swept(title: str, rows: Sequence[Row], column: str, seeds: int, more: str = "") -> str:
    values = sorted({row[column] for row in rows})
    lines = []
    for solver, name in beyond.SOLVERS.items():
        cells = [_both(arm(rows, solver=solver, **{column: value}), seeds) for value in values]
        if any(cells):
            lines.append([name, *cells])
    heading = f"{title}{f', {more}' if more else ''}"
    return table([heading, *(f"{value:g}" for value in values)], lines) if lines else ""


def _both(rows: list[Row], seeds: int) -> str:
    loss, accuracy = final(rows, "train_loss"), final(rows, VALIDATION)
    if not loss.count:
        return ""
    return words.loss(loss, seeds) + (f" ({100 * accuracy.mean:.1f} %)" if not loss.lost else "")
