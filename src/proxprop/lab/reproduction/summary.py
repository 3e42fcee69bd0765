"""What it comes to, in a few sentences; each computed, each left out while its numbers are missing."""

import math
from functools import partial

from proxprop.lab import paper
from proxprop.lab.reproduction import grades, words
from proxprop.lab.reproduction.claims import Verdict, fig2, table1
from proxprop.lab.reproduction.claims import propositions as proven
from proxprop.lab.reproduction.claims import spectrum as readings
from proxprop.lab.reproduction.claims.verdict import ours, short, theirs
from proxprop.lab.reproduction.measured import LOSS, TEST, at, distance, final, pace
from proxprop.lab.reproduction.results import Results

CG = ("ProxProp (cg3)", "ProxProp (cg5)", "ProxProp (cg10)")


def summary(results: Results, found: dict[str, list[Verdict]]) -> str:
    """The sentences as a list."""
    sentences = [
        _whose(results),
        _how_much(results),
        _cost(results),
        _tests(results),
        _robust(results),
        _architecture(results),
        _spectrum(results),
        _propositions(results),
        *(_beyond(verdict) for verdict in found["Beyond the paper's runs"]),
    ]
    told = [f"- {sentence}" for sentence in sentences if sentence]
    return "\n".join(told) or "Nothing has been run yet."


def _whose(results: Results) -> str:
    """Which iteration drew the paper's curves."""
    parts, nearer = [], []
    for method in CG:
        curve = theirs("fig1", method)
        apart = ours(results.fig1, method).map(partial(distance, column=LOSS, theirs=curve))
        if apart.published is not None and math.isfinite(apart.published + apart.correct):
            parts.append(f"{short(method)} {apart.published:.2f} and {apart.correct:.2f}")
            nearer.append(apart.published < apart.correct)
    if not parts:
        return ""
    return (
        f"**Figure 1's CG curves**: published is nearer than correct to {sum(nearer)} of {len(nearer)}. "
        f"Mean \\|ln(ours / the paper's)\\| of the loss, published and correct: {'; '.join(parts)}."
    )


def _how_much(results: Results) -> str:
    """What correct conjugate gradients are worth."""
    mine = ours(results.fig1, "ProxProp (cg3)").map(lambda rows: (at(rows, LOSS, 10), at(rows, LOSS, 49)))
    if mine.published is None or not all(one.values for one in (*mine.published, *mine.correct)):
        return ""
    told = [
        f"after {epoch} epochs {words.number(one.mean)} if correct, {words.number(other.mean)} if published"
        for one, other, epoch in zip(mine.correct, mine.published, (10, 49), strict=True)
    ]
    return f"**Three CG steps**, Figure 1's setting: loss {'; '.join(told)}."


def _cost(results: Results) -> str:
    base = pace(ours(results.fig1, "BackProp").correct)
    parts = []
    for method in (*CG, "ProxProp (exact)"):
        mine = pace(ours(results.fig1, method).correct)
        if base.values and mine.values:
            said = paper.pace("fig1", method) / paper.pace("fig1", "BackProp")
            parts.append(f"{short(method)} {mine.mean / base.mean:.2f}× (paper {said:.2f}×)")
    return f"**Time per epoch** relative to BackProp's, Figure 1: {', '.join(parts)}." if parts else ""


def _tests(results: Results) -> str:
    parts = []
    for method in ("BackProp", *CG, "ProxProp (exact)"):
        mine = ours(results.fig1, method).map(lambda rows: final(rows, TEST))
        if mine.correct.values:
            also = (
                f" (published {100 * mine.published.mean:.1f} %)"
                if mine.published and mine.published.values
                else ""
            )
            parts.append(f"{short(method)} {100 * mine.correct.mean:.1f} %{also}")
    said = "the paper: about 54 % for BackProp, about 56 % for ProxProp"
    return f"**Test accuracy**, Figure 1's runs after 50 epochs: {', '.join(parts)}; {said}." if parts else ""


def _robust(results: Results) -> str:
    found = table1.rows_of(results)
    backprop = found.get(("BackProp", None), {})
    if not backprop:
        return ""
    parts = []
    for (method, iteration), losses in found.items():
        if method != "BackProp":
            orders = table1.span(losses, table1.best(backprop))
            parts.append(f"{short(method)}{f' {iteration}' if iteration else ''} {words.number(orders, 2)}")
    if not parts:
        return ""
    return (
        "**Robustness**, Table 1: orders of magnitude of τ at which a method ends no higher than BackProp at its best "
        f"τ (loss {words.number(table1.best(backprop))}): {', '.join(parts)}."
    )


def _architecture(results: Results) -> str:
    apart = fig2.apart(results, ("BackProp",), "correct")
    which = fig2.nearer(apart)
    if which is None:
        return ""
    told = ", ".join(f"{fig2.ARCHITECTURES[model]} {value:.3f}" for model, value in apart.items())
    return f"**Figure 2's BackProp curve** is nearer to the network with {which}: mean \\|ln ratio\\| {told}."


def _spectrum(results: Results) -> str:
    if not results.spectrum:
        return ""
    first = readings.nearest(readings.natural(results.spectrum))[0]
    said = f"{paper.LARGEST_EIGENVALUE:.1e}, {paper.EIGENVALUE_ORDERS} orders"
    return f"**Section 4.1's largest eigenvalue** ({said}) is nearest to that of {readings.said(first)}."


def _propositions(results: Results) -> str:
    rows = results.propositions
    implicit = [*proven.of(rows, "exact"), *proven.of(rows, "cg")]
    angles = [row["angle"] for row in implicit if row["angle"] is not None]
    energies = [row["energy"] for row in implicit if row["energy"] is not None]
    explicit = [row["energy"] for row in proven.of(rows, "explicit", "float64") if row["energy"] is not None]
    if not (angles and energies and explicit):
        return ""
    return (
        f"**Propositions**: of {len(angles)} measured angles between direction and gradient the largest is "
        f"{max(angles):.2f}°; the penalty energy after a proximal step is at most {max(energies):.6f} of that before "
        f"({len(energies)} steps), after an explicit step of the same size up to {max(explicit):.1e} times it."
    )


def _beyond(verdict: Verdict) -> str:
    if verdict.reproduced == grades.NOT_RUN:
        return ""
    return f"{verdict.claim[0].upper()}{verdict.claim[1:]}: **{verdict.reproduced}**. {verdict.correct}."
