"""The learning rate of a run that names none.

Rates were chosen on digits (τ_θ = 1, ten epochs), where every solver with its rate ends no higher than BackProp with
its own, but for noise of seeds. `results/digits/rates.csv` has the losses, `benchmarks/rates.py` makes it, and
`tests/lab/test_rates.py` trains some again. Other data may need other rates. `resnet18` takes those of `mlp-bn`,
because both normalise batches; it was not tuned.
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

SGD_WITH_BATCH_NORM: Rates = {
    "backprop": {1: 0.05},
    "cg": {1: 0.1},
    "exact": {1: 0.1},
    "published": {1: 0.1},
    "running": {1: 0.03},
}
"""Rates of SGD for networks that normalise batches."""

SGD_FOR_CONVOLUTIONS: Rates = {
    "backprop": {1: 0.05},
    "cg": {1: 6.0, 2: 2.0, 3: 1.0, 10: 0.4},
    "exact": {1: 0.4},
    "published": {1: 8.0, 3: 4.0, 5: 2.0, 10: 1.0},
    "running": {1: 0.05},
}
"""Rates of SGD for the convnets: with the positions of all images as samples, few steps come less far."""

ADAM: Rates = {
    "backprop": {1: 0.001},
    "cg": {1: 0.003, 2: 0.001},
    "exact": {1: 0.001},
    "published": {1: 0.003, 2: 0.001},
    "running": {1: 0.001},
}
"""Rates of Adam and AdamW."""

ADAM_FOR_OTHERS: Rates = {
    "backprop": {1: 0.001},
    "cg": {1: 0.003},
    "exact": {1: 0.003},
    "published": {1: 0.003},
    "running": {1: 0.001},
}
"""Rates of Adam and AdamW for networks with batch normalisation or convolutions."""

MUON: Rates = {
    "backprop": {1: 0.001},
    "cg": {1: 0.002},
    "exact": {1: 0.002},
    "published": {1: 0.002},
    "running": {1: 0.003},
}
"""Rates of Muon."""

RATES: Mapping[str, Mapping[str, Rates]] = {
    "mlp": {"sgd": SGD, "adam": ADAM, "muon": MUON},
    "mlp-bn": {"sgd": SGD_WITH_BATCH_NORM, "adam": ADAM_FOR_OTHERS, "muon": MUON},
    "convnet": {"sgd": SGD_FOR_CONVOLUTIONS, "adam": ADAM_FOR_OTHERS, "muon": MUON},
}
"""By network, then by optimizer."""

ALIKE = {"convnet-2pool": "convnet", "resnet18": "mlp-bn", "adamw": "adam"}
"""Networks and optimizers that take the rates of another one."""


def rate(optimizer: str, solver: str, model: str = "mlp") -> float:
    """The learning rate for an optimizer fed by a solver; a solver that is not in the tables takes BackProp's.

    >>> [rate("sgd", solver) for solver in ("backprop", "cg:1", "cg:3", "cg:99", "exact", "kfac")]
    [0.05, 2.0, 0.4, 0.4, 0.4, 0.05]
    >>> [rate("sgd", "cg:3", model) for model in ("mlp-bn", "resnet18", "convnet", "convnet-2pool")]
    [0.1, 0.1, 1.0, 1.0]
    """
    rates = RATES[ALIKE.get(model, model)][ALIKE.get(optimizer, optimizer)]
    family, _, argument = solver.partition(":")
    by_least = rates.get(family, rates["backprop"])
    count = int(argument[:9]) if argument.isascii() and argument.isdigit() else 1
    return by_least[max(least for least in by_least if least <= max(count, 1))]
