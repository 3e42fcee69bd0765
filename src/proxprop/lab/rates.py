"""The learning rate of a run that names none.

Each was chosen on digits (the mlp, τ_θ = 1, ten epochs), where every solver with its rate ends no higher than BackProp
with its own. `tests/lab/test_rates.py` trains them again. Other networks may need other rates, K = 1 most of all: with
batch normalisation and in the convnet its rate is too large.
"""

from collections.abc import Mapping

Rates = Mapping[str, Mapping[int, float]]

SGD: Rates = {
    "backprop": {1: 0.05},  # the paper's
    "cg": {1: 2.0, 2: 0.4},
    "exact": {1: 0.4},
    "published": {1: 2.0, 2: 1.0, 4: 0.4},
    "running": {1: 0.1},
}
"""Rates of Nesterov's SGD: by the solver's family, then by the least K (of cg:K) that takes the rate."""

ADAM: Rates = {
    "backprop": {1: 0.001},
    "cg": {1: 0.003, 2: 0.001},
    "exact": {1: 0.001},
    "published": {1: 0.003, 2: 0.001},
    "running": {1: 0.001},
}
"""Rates of Adam and AdamW."""

MUON: Rates = {
    "backprop": {1: 0.001},
    "cg": {1: 0.002},
    "exact": {1: 0.002},
    "published": {1: 0.002},
    "running": {1: 0.003},
}
"""Rates of Muon."""

RATES = {"sgd": SGD, "adam": ADAM, "adamw": ADAM, "muon": MUON}


def rate(optimizer: str, solver: str) -> float:
    """The learning rate for an optimizer fed by a solver; a solver that is not in the tables takes BackProp's.

    >>> [rate("sgd", solver) for solver in ("backprop", "cg:1", "cg:3", "cg:99", "exact", "kfac")]
    [0.05, 2.0, 0.4, 0.4, 0.4, 0.05]
    """
    family, _, argument = solver.partition(":")
    by_least = RATES[optimizer].get(family, RATES[optimizer]["backprop"])
    count = int(argument[:9]) if argument.isascii() and argument.isdigit() else 1
    return by_least[max(least for least in by_least if least <= max(count, 1))]
