"""The experiments: lists of runs, exactly as the paper has them, and one function that runs a list."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from pathlib import Path

from proxprop.lab.config import PAPER_WIDTHS, Config
from proxprop.lab.data import Dataset, load
from proxprop.lab.devices import device
from proxprop.lab.records import Record
from proxprop.lab.train import train
from proxprop.lab.watch import Quiet, Watch
from proxprop.lab.workers import spread

PAPER_EPOCHS = 50
TABLE1_RATES = (50.0, 10.0, 5.0, 1.0, 0.5, 0.1, 0.05, 0.005, 0.0005)

BEYOND_EPOCHS = 10
OPTIMIZER_RATES = {
    ("sgd", 0.0): (0.01, 0.1, 1.0, 10.0),
    ("sgd", 0.95): (0.01, 0.1, 1.0, 10.0),
    ("adam", 0.95): (0.0001, 0.001, 0.01),
}
TAU_THETAS = (0.001, 0.01, 0.05, 0.1, 1.0, 10.0, 100.0)
MUON_RATES = (0.0001, 0.0003, 0.001)
BATCH_SIZES = (50, 150, 500, 1500, 5000)

# Half-decade steps, wide enough that every method has both too small and too large a step in it.
COMPARED_RATES = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "adam": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
}


def fig1(base: Config) -> list[Config]:
    """Figure 1: the MLP, Nesterov momentum; BackProp's best τ=0.05 against τ_θ=0.05, τ=1."""
    mlp = _paper_mlp(base)
    solvers = ("cg:3", "cg:5", "cg:10", "exact", "published:3", "published:5", "published:10")
    implicit = [replace(mlp, solver=s, lr=1.0, tau_theta=0.05) for s in solvers]
    return [replace(mlp, solver="backprop", lr=0.05), *implicit]


def table1(base: Config) -> list[Config]:
    """Table 1: the MLP over nine step sizes with τ_θ=1; the exact row is ours. Only final losses are compared."""
    mlp = replace(_paper_mlp(base), measure_every=10, observe=False)
    solvers = ("backprop", "cg:1", "cg:3", "cg:5", "exact", "published:1", "published:3", "published:5")
    return [replace(mlp, solver=s, lr=lr, tau_theta=1.0) for s in solvers for lr in TABLE1_RATES]


def fig2(base: Config) -> list[Config]:
    """Figure 2: the ConvNet with Adam, τ=0.001, τ_θ=1; as released (two poolings) and as in the text (three)."""
    adam = replace(base, optimizer="adam", lr=0.001, tau_theta=1.0, batch_size=500)
    solvers = ("backprop", "cg:3", "cg:10", "exact", "published:3", "published:10")
    return [replace(adam, model=m, solver=s) for m in ("convnet-2pool", "convnet") for s in solvers]


def batchnorm(base: Config) -> list[Config]:
    """Figure 1's comparison with batch normalisation in the network, for ten epochs."""
    mlp = replace(_short(_paper_mlp(base)), model="mlp-bn", measure_every=1)
    return _against_backprop(mlp)


def optimizers(base: Config) -> list[Config]:
    """The MLP for ten epochs under plain SGD, Nesterov momentum and Adam, each over decades of learning rates."""
    mlp = replace(_short(_paper_mlp(base)), tau_theta=1.0)
    return [
        replace(mlp, optimizer=optimizer, momentum=momentum, lr=lr, solver=solver)
        for (optimizer, momentum), rates in OPTIMIZER_RATES.items()
        for lr in rates
        for solver in ("backprop", "cg:3", "exact")
    ]


def tau_theta(base: Config) -> list[Config]:
    """The MLP for ten epochs at τ=1 over five orders of τ_θ, exactly and by conjugate gradients."""
    mlp = replace(_short(_paper_mlp(base)), lr=1.0)
    return [replace(mlp, solver=s, tau_theta=tau) for tau in TAU_THETAS for s in ("cg:3", "exact")]


def batches(base: Config) -> list[Config]:
    """Figure 1's comparison for ten epochs over batch sizes; the step sizes stay as they are."""
    mlp = _short(_paper_mlp(base))
    return [config for size in BATCH_SIZES for config in _against_backprop(replace(mlp, batch_size=size))]


def muon(base: Config) -> list[Config]:
    """The MLP for ten epochs under Muon, fed by BackProp, by exact directions and by those of a running S.

    Rates are AdamW's; 0.0003 moves these matrices as far as 0.003 does in Muon's original scaling.
    """
    mlp = replace(_short(_paper_mlp(base)), optimizer="muon")
    taus = {"backprop": 1.0, "exact": 1.0, "running:10": 1 / 0.3}
    return [
        replace(mlp, lr=lr, solver=solver, tau_theta=tau) for lr in MUON_RATES for solver, tau in taus.items()
    ]


def _paper_mlp(base: Config) -> Config:
    """The paper's MLP and its optimizer."""
    return replace(base, model="mlp", hidden=PAPER_WIDTHS, optimizer="sgd", momentum=0.95, batch_size=500)


def _short(config: Config) -> Config:
    """For ten epochs, measured at their end."""
    return replace(
        config, epochs=min(BEYOND_EPOCHS, config.epochs), measure_every=BEYOND_EPOCHS, observe=False
    )


def _against_backprop(config: Config) -> list[Config]:
    """Figure 1's step sizes: BackProp τ=0.05; cg3 and exact τ_θ=0.05, τ=1."""
    implicit = [replace(config, solver=s, lr=1.0, tau_theta=0.05) for s in ("cg:3", "exact")]
    return [replace(config, solver="backprop", lr=0.05), *implicit]


PAPER: dict[str, Callable[[Config], list[Config]]] = {"fig1": fig1, "table1": table1, "fig2": fig2}
BEYOND: dict[str, Callable[[Config], list[Config]]] = {
    "batchnorm": batchnorm,
    "optimizers": optimizers,
    "tau_theta": tau_theta,
    "batches": batches,
    "muon": muon,
}
EXPERIMENTS = PAPER | BEYOND


def paper(names: Iterable[str], base: Config, seeds: int = 1) -> list[Config]:
    """The runs of some of the experiments; one that is in two of them is listed once."""
    runs = [config for name in names for config in EXPERIMENTS[name](base)]
    return _seeded(runs, seeds)


def quick(configs: Iterable[Config]) -> list[Config]:
    """The same list, small: digits, narrow layers, two epochs; proves that the command works, nothing else."""
    return [
        replace(
            c,
            data="digits",
            hidden=(32, 16, 32) if c.hidden else None,
            batch_size=min(c.batch_size or 100, 100),
            epochs=2,
        )
        for c in configs
    ]


def compare(
    base: Config, solvers: Sequence[str], rates: dict[str, Sequence[float]], seeds: int
) -> list[Config]:
    """Every solver with every optimizer over the same learning rates and seeds, so that none is favoured."""
    runs = [
        replace(base, optimizer=optimizer, solver=solver, lr=lr)
        for optimizer, grid in rates.items()
        for lr in grid
        for solver in solvers
    ]
    return _seeded(runs, seeds)


def run_all(
    configs: Sequence[Config],
    folder: Path,
    jobs: int = 1,
    watch: Watch | None = None,
    tell: Callable[[int, Record], None] = lambda number, record: None,
) -> list[Record]:
    """Run a list into one folder; finished runs are read, unfinished ones resumed.

    Args:
        configs: what to run.
        folder: holds one folder per run, named by `Config.slug`.
        jobs: runs at a time, each in a process of its own where there are several.
        watch: who is told about progress within a run, when there is one job only.
        tell: called after each run with how many are done and with its record.
    """
    records: list[Record] = []
    if jobs == 1:
        return _collected((_run(config, folder, 1, watch) for config in configs), records, tell)
    with spread(_run, jobs, configs, repeat(folder), repeat(jobs), repeat(Quiet())) as results:
        return _collected(results, records, tell)


def _collected(
    results: Iterable[Record], records: list[Record], tell: Callable[[int, Record], None]
) -> list[Record]:
    for record in results:
        records.append(record)
        tell(len(records), record)
    return records


def _run(config: Config, folder: Path, at_once: int, watch: Watch | None = None) -> Record:
    where = folder / config.slug()
    dataset = None if (where / "result.json").exists() else _dataset(config)
    return train(config, where, resume=True, watch=watch, dataset=dataset, at_once=at_once)


def _dataset(config: Config) -> Dataset:
    return _loaded(config.data, config.data_dir, config.validation, config.device)


@lru_cache(maxsize=1)
def _loaded(name: str, data_dir: str | None, validation: int | None, where: str) -> Dataset:
    """The runs of a list mostly share one dataset, and reading it takes longer than a small run."""
    return load(name, data_dir, validation).to(device(where))


def _seeded(configs: Iterable[Config], seeds: int) -> list[Config]:
    """Every run once per seed, each only once, seeds outermost so that a first picture is there early."""
    found: dict[str, Config] = {}
    chosen = list(configs)
    for seed in range(seeds):
        for config in chosen:
            seeded = replace(config, seed=seed)
            found.setdefault(seeded.slug(), seeded)
    return list(found.values())
