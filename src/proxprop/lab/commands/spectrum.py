"""`proxprop spectrum`: how ill-conditioned the inputs of a dataset are (Section 4.1 of the paper)."""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer

import proxprop
from proxprop.lab import figures, paper
from proxprop.lab.commands import options
from proxprop.lab.commands.console import say, show
from proxprop.lab.data import load
from proxprop.lab.refusal import one_of
from proxprop.lab.report.tables import Table

PAPER = {
    "cifar10": f"The paper says: largest {paper.LARGEST_EIGENVALUE:.1e}, {paper.EIGENVALUE_ORDERS} orders above the "
    "smallest; `proxprop reproduce spectrum` looks for what it means."
}


def spectrum(
    data: options.Data = "digits",
    data_dir: options.DataDir = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many training samples.")
    ] = None,
    tau_theta: Annotated[float, typer.Option(help="τ_θ of the implicit step to compare with.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Where to put the plot.")] = Path("out/spectrum.png"),
    download: options.Download = False,
) -> None:
    """Show how ill-conditioned a dataset is.

    The eigenvalues of XᵀX, where the rows of X are the inputs (Section 4.1 of the paper), and what 1/τ_θ does to them.

    \b
    Examples:
        proxprop spectrum
        proxprop spectrum --data cifar10 --samples 10000 --out out/cifar-spectrum.png
    """
    one_of("the plot's suffix", out.suffix, (".png", ".svg", ".pdf"))
    config = options.config_from(None, {"data": data, "data_dir": data_dir, "tau_theta": tau_theta})
    if download:
        options.fetch(config)
    X = load(config.data, data_dir, validation=0).train.inputs.flatten(1)[:samples]
    found = proxprop.diagnostics.spectrum(X.to(torch.float64))
    low, high = float(found.smallest), float(found.largest)
    # Below this an eigenvalue of a float64 matrix is rounding, not data.
    floor = high * X.shape[1] * torch.finfo(torch.float64).eps
    above = [float(value) for value in found.eigenvalues if float(value) > floor]
    least = (
        f"{min(above):.3g}, {math.log10(high / min(above)):.1f} orders below the largest" if above else "none"
    )
    rows = [
        ["samples × features", f"{X.shape[0]} × {X.shape[1]}"],
        ["largest eigenvalue", f"{high:.3g}"],
        ["smallest eigenvalue", f"{low:.3g}" if low > floor else "0 (to rounding)"],
        ["smallest above 0", least],
        ["eigenvalues that are 0", str(len(found.eigenvalues) - len(above))],
        ["condition of I/τ_θ + XᵀX", f"{(1 / tau_theta + high) / (1 / tau_theta + max(low, 0.0)):.3g}"],
    ]
    show(Table(["inputs of", config.data], rows, frozenset({1})), "Spectrum of XᵀX")
    if config.data in PAPER:
        say(PAPER[config.data])
    figure = figures.spectrum(found.eigenvalues.tolist(), f"{config.data}: {X.shape[0]} samples", tau_theta)
    out.parent.mkdir(parents=True, exist_ok=True)
    figures.save(figure, out)
    say(f"Plot: {out.resolve()}")
