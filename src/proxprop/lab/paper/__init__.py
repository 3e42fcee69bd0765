"""The paper's own curves and table, to draw behind a run that repeats one of its experiments."""

import csv
from functools import cache
from importlib.resources import files

from proxprop.lab.config import PAPER_WIDTHS, Config

Figures = dict[str, tuple[str, str | None]]

# (figure over epochs, figure over time) for each measured quantity.
MLP: Figures = {
    "loss": ("exact_vs_inexact_prox_mlp_plot", "inexact_prox_vs_sgd_mlp_plot"),
    "validation_accuracy": ("exact_vs_inexact_prox_mlp_plot_val_acc", None),
}
CONVNET: Figures = {
    "loss": ("proxprop_vs_sgd_adam_convnet_epochs_plot", "proxprop_vs_sgd_adam_convnet_time_plot"),
    "validation_accuracy": (
        "proxprop_vs_sgd_adam_convnet_epochs_plot_val",
        "proxprop_vs_sgd_adam_convnet_time_plot_val",
    ),
}
Curve = tuple[list[float], list[float]]


def curve(config: Config, quantity: str, over: str) -> Curve | None:
    """The paper's curve for the run a Config describes, or None when the paper has none.

    Args:
        config: a run.
        quantity: loss or validation_accuracy.
        over: epoch or seconds (on the authors' GPU).
    """
    config = config.settled()
    if config.data != "cifar10" or config.batch_size != 500:
        return None
    found = _mlp(config) or _convnet(config)
    if found is None:
        return None
    figures, series = found
    name = figures.get(quantity, (None, None))[0 if over == "epoch" else 1]
    return curves().get((name, series)) if name else None


def final_loss(config: Config) -> float | None:
    """Table 1's full-batch loss after 50 epochs for a run; NaN where it diverged, None where there is none."""
    config = config.settled()
    if not (_is_paper_mlp(config) and config.epochs == 50):
        return None
    if config.solver != "backprop" and config.tau_theta != 1.0:
        return None
    return table().get((_series(config.solver), config.lr or 0.0))


def _mlp(config: Config) -> tuple[Figures, str] | None:
    explicit = config.solver == "backprop" and config.lr == 0.05
    implicit = config.solver != "backprop" and config.lr == 1.0 and config.tau_theta == 0.05
    if not (_is_paper_mlp(config) and (explicit or implicit)):
        return None
    return MLP, _series(config.solver)


def _convnet(config: Config) -> tuple[Figures, str] | None:
    right = config.model in ("convnet", "convnet-2pool") and config.optimizer == "adam" and config.lr == 1e-3
    if not right or (config.solver != "backprop" and config.tau_theta != 1.0):
        return None
    names = {"backprop": "BackProp", "cg:3": "ProxProp (3 cg)", "cg:10": "ProxProp (10 cg)"}
    return CONVNET, f"Adam + {names.get(config.solver, '')}"


def _is_paper_mlp(config: Config) -> bool:
    same = config.data == "cifar10" and config.batch_size == 500 and config.momentum == 0.95
    return same and config.model == "mlp" and config.hidden == PAPER_WIDTHS and config.optimizer == "sgd"


def _series(solver: str) -> str:
    return "BackProp" if solver == "backprop" else f"ProxProp ({solver.replace(':', '')})"


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


def _rows(name: str) -> list[dict[str, str]]:
    text = files("proxprop.lab.paper").joinpath(name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
