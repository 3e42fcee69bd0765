"""What the paper proves, measured along real training runs of its MLP, for τ_θ over eight orders of magnitude.

Propositions 4 and 5: the direction D and the gradient enclose less than 90°. Section 4.1: for fixed activations the
proximal step never increases the penalty energy of a layer, whatever τ_θ, while an explicit step of the same size does
beyond 2 over the largest eigenvalue. With the paper's explicit steps on z, z½ = z − τG, that energy is

    E(θ) = ½‖φ(θ, a) − z½‖²,   E(θ − τD) / E(θ) = ‖G − φ(D, a)‖² / ‖G‖²     (φ is linear in θ, and τ cancels)

with D = (I/τ_θ + AᵀA)⁻¹AᵀG for the proximal step and D = τ_θ·AᵀG for the explicit one.
"""

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from proxprop.lab import models
from proxprop.lab.config import Config
from proxprop.lab.data import Dataset, load
from proxprop.lab.devices import device, matmul_precision
from proxprop.lab.methods import method
from proxprop.lab.paper import iteration
from proxprop.lab.reproduction.arguments import parse
from proxprop.lab.reproduction.files import Row, write_csv
from proxprop.lab.train import train
from proxprop.lab.watch import Quiet

COLUMNS = (
    "trained_with", "trained_tau", "trained_tau_theta", "seed", "epoch", "run", "precision", "layer",
    "largest_eigenvalue", "solver", "iteration", "tau_theta", "cosine", "angle", "energy",
)  # fmt: skip
SOLVERS = ("cg:1", "cg:3", "cg:5", "cg:10", "exact", "published:3")
TAU_THETAS = tuple(10.0**power for power in range(-4, 5))
EPOCHS = (0, 1, 5, 20)
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def runs(base: Config) -> list[Config]:
    """The runs to measure along: Figure 1's BackProp, cg3 and exact."""
    mlp = replace(base, model="mlp", optimizer="sgd", momentum=0.95, observe=False, save_weights=True)
    implicit = [replace(mlp, solver=solver, lr=1.0, tau_theta=0.05) for solver in ("cg:3", "exact")]
    return [replace(mlp, solver="backprop", lr=0.05), *implicit]


def along(config: Config, epochs: Sequence[int], folder: Path, dataset: Dataset) -> Iterator[Row]:
    """Train one run up to each of these epochs and measure there.

    Args:
        config: the run.
        epochs: 0 is before training.
        folder: for the runs' records.
        dataset: on the run's device.
    """
    inputs, labels = (part[: config.settled().batch_size] for part in vars(dataset.train).values())
    for epoch in epochs:
        until = replace(config, epochs=max(epoch, 1))
        model = _trained(until, folder, dataset) if epoch else _fresh(config, dataset)
        about = {
            "trained_with": config.solver,
            "trained_tau": config.settled().lr,
            "trained_tau_theta": None if config.solver == "backprop" else config.tau_theta,
            "seed": config.seed,
            "epoch": epoch,
            "run": until.slug() if epoch else None,
        }
        with matmul_precision("fp32"):
            yield from (about | row for row in at(model, inputs, labels, config))


def _fresh(config: Config, dataset: Dataset) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        return models.build(config, dataset.shape, dataset.classes).to(dataset.train.inputs.device)


def _trained(config: Config, folder: Path, dataset: Dataset) -> nn.Module:
    record = train(config, folder / config.slug(), resume=True, watch=Quiet(), dataset=dataset)
    model = _fresh(config, dataset)
    model.load_state_dict(load_file(record.folder / "weights.safetensors"))
    return model


def at(model: nn.Module, inputs: Tensor, labels: Tensor, config: Config) -> Iterator[Row]:
    """Measure every solver with every τ_θ at one set of weights, on one batch, in single and in double precision.

    Args:
        model: linear layers, not converted.
        inputs: [samples, ...].
        labels: [samples].
        config: of the run, for all that is not varied.
    """
    for precision, dtype in PRECISIONS.items():
        plain, batch = copy.deepcopy(model).to(dtype), inputs.to(dtype)
        layers = _layers(plain, batch, labels)
        gradient = _gradients(plain)
        for tau_theta in TAU_THETAS:
            for solver in SOLVERS:
                chosen = method(replace(config, solver=solver, tau_theta=tau_theta))
                direction = _directions(chosen.prepare(copy.deepcopy(plain)), batch, labels)
                about = {"precision": precision, "solver": solver, "tau_theta": tau_theta}
                about["iteration"] = iteration(solver)
                yield from (about | row for row in _compared(layers, gradient, direction))
            step = {name: tau_theta * value for name, value in gradient.items()}
            about = {"precision": precision, "solver": "explicit", "tau_theta": tau_theta, "iteration": None}
            yield from (about | row for row in _compared(layers, gradient, step) if row["layer"] != "all")


@dataclass(frozen=True)
class Layer:
    """A layer that takes proximal steps: its name, its input a and the gradient G at its output, in float64."""

    name: str
    a: Tensor
    G: Tensor

    @property
    def largest_eigenvalue(self) -> float:
        """Of AᵀA, by way of AAᵀ; A has a column of ones for the bias."""
        return float(torch.linalg.eigvalsh(self.a @ self.a.T + 1)[-1])

    def energy(self, weight: Tensor, bias: Tensor) -> float:
        """‖G − φ(D, a)‖² / ‖G‖² for D made of a weight and a bias."""
        left = self.G - linear(self.a, weight, bias)
        return float(left.square().sum() / self.G.square().sum())


def _layers(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[tuple[Layer, float]]:
    """All linear layers but the last, each with its largest eigenvalue; leaves the gradient in `.grad`."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
            output.retain_grad()
            seen.append((name, given[0].detach(), output))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep(name))
    cross_entropy(model(inputs), labels).backward()
    found = []
    for name, a, output in seen[:-1]:
        assert output.grad is not None
        layer = Layer(name, a.double(), output.grad.double())
        found.append((layer, layer.largest_eigenvalue))
    return found


def _directions(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    cross_entropy(model(inputs), labels).backward()
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name to what backward left in `.grad`, in float64."""
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def _compared(
    layers: Sequence[tuple[Layer, float]], gradient: dict[str, Tensor], direction: dict[str, Tensor]
) -> Iterator[dict[str, Any]]:
    """A row per layer, and one for all parameters together, the last layer's explicit ones included."""
    for layer, largest in layers:
        names = [f"{layer.name}.weight", f"{layer.name}.bias"]
        weight, bias = (direction[name] for name in names)
        energy = layer.energy(weight, bias)
        cosine = _cosine([direction[name] for name in names], [gradient[name] for name in names])
        yield _row(layer.name, largest, cosine) | {"energy": energy if math.isfinite(energy) else None}
    yield _row("all", None, _cosine(list(direction.values()), list(gradient.values()))) | {"energy": None}


def _row(layer: str, largest: float | None, cosine: float) -> dict[str, Any]:
    known = math.isfinite(cosine)
    return {
        "layer": layer,
        "largest_eigenvalue": largest,
        "cosine": cosine if known else None,
        "angle": math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) if known else None,
    }


def _cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    def inner(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        return sum(float((x * y).sum()) for x, y in zip(some, others, strict=True))

    return inner(left, right) / math.sqrt(inner(left, left) * inner(right, right) or math.nan)


def measure(base: Config, folder: Path, epochs: Sequence[int] = EPOCHS) -> Iterator[Row]:
    """Every row of propositions.csv; epoch 0 is the same for every run and measured once."""
    where = device(base.device)
    dataset = load(base.data, base.data_dir, base.validation).to(where)
    for number, config in enumerate(runs(base)):
        yield from along(config, [e for e in epochs if e or not number], folder, dataset)


def write(base: Config, out: Path, epochs: Sequence[int] = EPOCHS) -> None:
    """Measure and write the file; the runs' records are not kept."""
    with tempfile.TemporaryDirectory() as folder:
        write_csv(out, COLUMNS, measure(base, Path(folder), epochs))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the file, on a machine without the command line's packages."""
    config, out = parse(__doc__, arguments)
    write(config, out)


if __name__ == "__main__":
    main()
