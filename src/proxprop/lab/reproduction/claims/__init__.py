"""Verdicts: each claim of the paper against what was measured; pure functions of the tables.

One module per part of the paper. A verdict's numbers are means over seeds out of one CSV file, its grade follows from
`grades`, and its last column says in numbers what is different.
"""

from proxprop.lab.reproduction.claims import beyond, fig1, fig2, propositions, spectrum, table1
from proxprop.lab.reproduction.claims.verdict import Verdict
from proxprop.lab.reproduction.results import Results

PARTS = {
    "Figure 1": fig1.claims,
    "Table 1": table1.claims,
    "Figure 2": fig2.claims,
    "Section 4.1, the spectrum": spectrum.claims,
    "Propositions": propositions.claims,
    "Beyond the paper's runs": beyond.claims,
}


def verdicts(results: Results) -> dict[str, list[Verdict]]:
    """Every claim, by part."""
    return {part: claims(results) for part, claims in PARTS.items()}


__all__ = ["PARTS", "Verdict", "verdicts"]
