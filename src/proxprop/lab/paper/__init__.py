"""The paper's own curves, table and numbers, to draw behind runs that repeat its experiments and to compare with."""

import csv
from functools import cache
from importlib.resources import files

from proxprop.lab.config import PAPER_WIDTHS, Config

# Figure to (panel over epochs, panel over time) for each measured quantity.
PANELS: dict[str, dict[str, tuple[str, str | None]]] = {
    "fig1": {
        "loss": ("exact_vs_inexact_prox_mlp_plot", "inexact_prox_vs_sgd_mlp_plot"),
        "validation_accuracy": ("exact_vs_inexact_prox_mlp_plot_val_acc", None),
    },
    "fig2": {
        "loss": ("proxprop_vs_sgd_adam_convnet_epochs_plot", "proxprop_vs_sgd_adam_convnet_time_plot"),
        "validation_accuracy": (
            "proxprop_vs_sgd_adam_convnet_epochs_plot_val",
            "proxprop_vs_sgd_adam_convnet_time_plot_val",
        ),
    },
}
ADAM = {
    "BackProp": "Adam + BackProp",
    "ProxProp (cg3)": "Adam + ProxProp (3 cg)",
    "ProxProp (cg10)": "Adam + ProxProp (10 cg)",
}
Curve = tuple[list[float], list[float]]

# What the text says and no figure or table shows.
TEST_ACCURACY = {
    ("fig1", "BackProp"): 0.54,
    ("fig1", "ProxProp"): 0.56,
    ("fig2", "BackProp"): 0.696,
    ("fig2", "ProxProp"): 0.707,
}
BEST_VALIDATION = {"BackProp": 0.717, "ProxProp": 0.729}
LARGEST_EIGENVALUE, EIGENVALUE_ORDERS = 6.7e6, 7


def name(solver: str) -> str:
    """The paper's name of a method; it knows one conjugate gradient iteration, whichever it ran.

    >>> [name(solver) for solver in ("backprop", "exact", "cg:3", "published:3")]
    ['BackProp', 'ProxProp (exact)', 'ProxProp (cg3)', 'ProxProp (cg3)']
    """
    family, _, steps = solver.partition(":")
    if family == "backprop":
        return "BackProp"
    return f"ProxProp (cg{steps})" if family in ("cg", "published") else f"ProxProp ({solver})"


def iteration(solver: str) -> str | None:
    """Whose conjugate gradients a solver takes; None where there is nothing to iterate.

    >>> [iteration(solver) for solver in ("backprop", "exact", "cg:3", "published:3")]
    [None, None, 'correct', 'published']
    """
    return {"cg": "correct", "published": "published"}.get(solver.partition(":")[0])


def drawn(figure: str, method: str, quantity: str, over: str) -> Curve | None:
    """A curve of one of the paper's figures, or None when it has none.

    Args:
        figure: fig1 or fig2.
        method: the paper's name, as from `name`.
        quantity: loss or validation_accuracy.
        over: epoch or seconds (on the authors' GPU).

    >>> drawn("fig1", "ProxProp (cg3)", "loss", "epoch")[1][10]
    0.821107988225089
    """
    panel = PANELS[figure].get(quantity, (None, None))[0 if over == "epoch" else 1]
    series = method if figure == "fig1" else ADAM.get(method, "")
    return curves().get((panel, series)) if panel else None


def pace(figure: str, method: str) -> float:
    """Seconds an epoch took the authors, from the panel over time.

    >>> round(pace("fig1", "ProxProp (cg3)") / pace("fig1", "BackProp"), 2)
    2.77
    """
    found = drawn(figure, method, "loss", "seconds")
    assert found is not None, f"{figure} has no {method} over time"
    return found[0][-1] / (len(found[0]) - 1)


def curve(config: Config, quantity: str, over: str) -> Curve | None:
    """The paper's curve for the run a Config describes, or None when the paper has none.

    Args:
        config: a run.
        quantity: loss or validation_accuracy.
        over: epoch or seconds (on the authors' GPU).
    """
    config = config.settled()
    figure = "fig1" if _is_fig1(config) else "fig2" if _is_fig2(config) else None
    return drawn(figure, name(config.solver), quantity, over) if figure else None


def final_loss(config: Config) -> float | None:
    """Table 1's full-batch loss after 50 epochs for a run; NaN where it diverged, None where there is none."""
    config = config.settled()
    if not (_is_paper_mlp(config) and config.epochs == 50):
        return None
    if config.solver != "backprop" and config.tau_theta != 1.0:
        return None
    return table().get((name(config.solver), config.lr or 0.0))


def _is_fig1(config: Config) -> bool:
    explicit = config.solver == "backprop" and config.lr == 0.05
    implicit = config.solver != "backprop" and config.lr == 1.0 and config.tau_theta == 0.05
    return _is_paper_mlp(config) and (explicit or implicit)


def _is_fig2(config: Config) -> bool:
    right = config.data == "cifar10" and config.batch_size == 500 and config.lr == 1e-3
    right = right and config.model in ("convnet", "convnet-2pool") and config.optimizer == "adam"
    return right and (config.solver == "backprop" or config.tau_theta == 1.0)


def _is_paper_mlp(config: Config) -> bool:
    same = config.data == "cifar10" and config.batch_size == 500 and config.momentum == 0.95
    return same and config.model == "mlp" and config.hidden == PAPER_WIDTHS and config.optimizer == "sgd"


@cache
def curves() -> dict[tuple[str, str], Curve]:
    """(figure, series) to x and y, as digitised from the paper's own sources."""
    found: dict[tuple[str, str], Curve] = {}
    for row in _rows("curves.csv"):
        xs, ys = found.setdefault((row["figure"], row["series"]), ([], []))
        xs.append(float(row["x"]))
        ys.append(float(row["y"]))
    return found


@cache
def table() -> dict[tuple[str, float], float]:
    """(method, step size) to Table 1's final full-batch loss."""
    return {(r["method"], float(r["tau"])): float(r["final_full_batch_loss"]) for r in _rows("table1.csv")}


@cache
def rounding() -> dict[tuple[str, float], float]:
    """(method, step size) to half a unit in the last digit that Table 1 prints.

    >>> rounding()["ProxProp (cg5)", 1.0]
    5e-05
    """
    texts = {(r["method"], float(r["tau"])): r["final_full_batch_loss"] for r in _rows("table1.csv")}
    return {cell: 0.5 * 10.0 ** -len(text.partition(".")[2]) for cell, text in texts.items()}


def _rows(name: str) -> list[dict[str, str]]:
    text = files("proxprop.lab.paper").joinpath(name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
