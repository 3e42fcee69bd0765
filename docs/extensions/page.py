"""What executed pages share: figures that read on light and dark, warnings and errors without paths, the digits."""

import logging
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

INK = "#7c828b"
BLUE, ORANGE, GREEN, RED, PURPLE = "#3b82f6", "#e8710a", "#1f9d55", "#e5484d", "#a855f7"


def prepare() -> None:
    """Set up a page: its figures, its warnings and its random numbers."""
    from matplotlib_inline.backend_inline import set_matplotlib_formats  # a notebook has it

    set_matplotlib_formats("svg", metadata={"Date": None})
    plt.rcParams.update(
        {
            "svg.hashsalt": "proxprop",
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "legend.framealpha": 0.0,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, PURPLE, RED]),
            "font.size": 10.0,
            "figure.constrained_layout.use": True,
        }
    )
    warnings.formatwarning = _without_path  # type: ignore[assignment]
    torch.manual_seed(0)


def _without_path(message: Warning | str, category: type[Warning], *where: object) -> str:
    return textwrap.fill(f"{category.__name__}: {message}", 88) + "\n"


@contextmanager
def error() -> Iterator[None]:
    """Show the error of the block as its last line; an error must come."""
    try:
        yield
    except Exception as raised:
        print(textwrap.fill(f"{type(raised).__name__}: {raised}", 88))
    else:
        raise AssertionError("this block should have failed")


@contextmanager
def warning() -> Iterator[None]:
    """Show the warnings of the block; one must come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if not caught:
        raise AssertionError("this block should have warned")
    for warned in caught:
        print(_without_path(warned.message, warned.category), end="")


def listen(name: str, *words: str) -> None:
    """Print those lines of a logger's messages that hold one of the words, as far as they name no file."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for line in record.getMessage().splitlines():
                if any(word in line for word in words):
                    print(textwrap.fill(line.partition("#")[0].strip(), 88))

    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [Lines()], False


def digits(samples: int = 200) -> tuple[Tensor, Tensor]:
    """The first of scikit-learn's digits `[samples, 64]`, scaled to [0, 1], and their labels."""
    found = load_digits()
    return torch.tensor(found.data[:samples] / 16, dtype=torch.float32), torch.tensor(found.target[:samples])


def network(seed: int = 0) -> nn.Sequential:
    """A multilayer perceptron for the digits, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
