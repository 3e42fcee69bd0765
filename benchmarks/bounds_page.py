"""The text of docs/bounds.md, from results/bounds/*.csv and results/paper/table1.csv."""

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import median

from bounds import RATES, SOLVERS, read

from proxprop.lab.reproduction.markdown import table

Losses = dict[float, list[float]]
"""By learning rate: the training losses of its seeds, infinite where a run diverged."""

TARGETS = {"digits": 0.1, "digits-convnet": 0.1, "cifar10-mlp": 0.1, "autoencoder-small": 30.0}
"""Below this training loss a rate counts as usable; the autoencoder's is about BackProp's best."""

TITLES = {
    "digits": "digits, MLP 64-128-128-10",
    "digits-convnet": "digits, the paper's ConvNet",
    "autoencoder-small": "autoencoder on small curves",
    "cifar10-mlp": "CIFAR-10, the paper's MLP",
}
SHORT = {
    "digits": "MLP",
    "digits-convnet": "ConvNet",
    "autoencoder-small": "autoencoder",
    "cifar10-mlp": "CIFAR-10",
}
"""What the widest table calls a task."""

NAMES = {"backprop": "BackProp", "cg3": "cg3", "exact": "exact"}
OPTIMIZERS = {"sgd": "SGD, Nesterov 0.95", "adam": "Adam"}
TRIED = {
    "none": "nothing",
    "relative-weights": "a step against the layer's present norm: ‖ΔV‖ ≤ 0.1·‖V‖",
    "relative-outputs": "a step against the layer's present outputs: ‖AΔV‖ ≤ 0.1·‖AV‖",
    "first-weights": "a step against the layer's first norm: ‖ΔV‖ ≤ 0.1·‖V₀‖",
    "budget-outputs": "all steps against the layer's first outputs: √Σ‖AΔV‖² ≤ 3·‖AV₀‖",
    "both-layers": "a step and all steps against the layer's first norm, 0.1 and 1",
    "budget-whole": "all steps of the whole model against its first norm",
    "looser": "`bound` with `step=0.2, budget=2`",
    "bound": "**`bound`**: a step (0.1) and all steps (1) of the whole model against its first norm",
}

INTRODUCTION = """# Steps that can't blow up

`tau_theta` can be as large as you like. The learning rate can't. The paper's MLP on CIFAR-10 (a copy recompressed as
JPEG and reordered) under SGD with momentum 0.95, over the rates of the paper's Table 1 (`results/paper/table1.csv`):
{diverging}.
One line bounds what the optimizer does:

```python
import proxprop
import torch
from torch import nn

model = proxprop.convert(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=50.0, momentum=0.95, nesterov=True)
bounded = proxprop.bound(optimizer)  # after convert, attach or wrap; on plain models too
```

A step that is too long is shortened, with one factor for all parameters. No step is longer than 0.1 of the norm that
the parameters had at the start, and the root of the summed squares of the last 1,000 steps is held to about that norm.
Steps that are short enough stay as they were, to the bit. So it is a cap on the learning rate, found while training.

**Use it** when the rate is not tuned, or while you search it over orders of magnitude. **Leave it** where the rate is
tuned and training is stable. There it does nothing, or at the edge of what trains, something small either way.

The robustness is not ProxProp's alone: BackProp gets as much of it. What S brings comes on top.
"""

LIMITS = """## Limits

- It bounds how far parameters move, not what comes of it. At the largest rates training loss ends low and validation
  loss higher than at a good rate, because weights grow. Tuning the rate still pays.
- Near the largest rate that trains by itself it cuts steps that would have gone well; the
  [gallery](auto_gallery/plot_step_sizes.rst) shows it in a short run. Of the rows above, the lowest training loss is
  higher with it in these: {cut}.
  The lowest validation loss is higher with it in {validation}.
- A large embedding that starts at unit variance dominates the norm of all parameters, so that other layers are hardly
  bounded. Give it an optimizer of its own, and each optimizer its own bound.
- The reference is the norm when `bound` is called: call it after weights are initialised or loaded. In a resumed run
  `bounded.load_state_dict` takes what `bounded.state_dict()` gave.
- It works in one process and under DistributedDataParallel, whose ranks all hold the same parameters. FSDP2 and tensor
  parallel are refused, and so are optimizers that keep weights of their own (Schedule-Free). Do not use it with the
  older FullyShardedDataParallel, which it can't tell from whole parameters.
- A compiled step runs it beside its graph, not in it. No step waits for a GPU. It has not run on one yet.
- It takes a copy of the parameters while the optimizer steps, and a few passes over memory, but no products.
- `step=0.1` and `budget=1` were chosen on digits with seed 0 under SGD, and on a few runs of the ConvNet with that
  seed. `horizon=1000` was not varied, and the runs here are shorter. CIFAR-10 has not been run:
  `python benchmarks/bounds.py run --task cifar10-mlp --optimizer sgd --steps 4500 --device cuda`.
"""


RANGES = """## How far the rate may be off

Nine constant rates over five orders, under SGD (Nesterov momentum 0.95) those of the paper's Table 1; τ_θ = 1. *Lost*
counts runs that diverged or ended above the loss of a network that knows nothing. *Lowest* is over rates, of the median
over seeds, and at which rate. *Orders* is the widest range of neighbouring rates at which every seed's training loss
ends below """

CANDIDATES = """## What was tried

Training loss under SGD with seed 0, the seed that was chosen with. Limits against the present size do not hold: weights
can grow by a tenth in every step. A limit on single steps against the first size holds, and leaves steps jumping about.
Budgets of all steps shrink them. Measuring outputs, the proximal view, takes one more product of each layer, and was no
better than measuring weights. Factors for layers slow the last layer most, and one for the whole model costs less at
good rates. A looser bound ends higher at the largest rates, and lets BackProp's first steps kill the ReLUs of the
ConvNet. A bound that shrinks with every step that was cut, or with the number of steps, was tried without a record, and
was not better.
"""


def page(folder: Path) -> str:
    """The whole page."""
    rows = [row for path in sorted(folder.glob("*.csv")) for row in read(path)]
    introduction = INTRODUCTION.format(diverging=diverging(folder.parent / "paper" / "table1.csv"))
    limits = LIMITS.format(cut=cut(rows), validation=validation(rows))
    parts = [introduction, *_ranges(rows), *_tables(rows), *_tried(rows), limits]
    return "\n".join(parts).rstrip()


def diverging(path: Path) -> str:
    """At which rate of Table 1 each solver ends lowest, and from which rate on no seed of it survives."""
    with path.open() as file:
        ends = {row["run"]: row for row in csv.DictReader(file)}  # a run's last epoch comes last
    found = []
    for solver, name in (("exact", "`Exact()`"), ("cg:3", "`CG(3)`")):
        runs: Losses = defaultdict(list)
        for row in ends.values():
            if row["solver"] == solver:
                loss = float(row["train_loss"]) if row["status"] == "finished" else math.inf
                runs[float(row["tau"])].append(loss)
        best = min(runs, key=lambda lr: median(runs[lr]))
        first = min(lr for lr in runs if lr > best and min(runs[lr]) == math.inf)
        found.append(f"{name} ends lowest at {best:g} and diverges at {first:g}")
    return ", ".join(found)


def pairs(rows: list[dict[str, str]], column: str) -> dict[str, tuple[float, float]]:
    """By task and direction: the lowest loss over rates, without a bound and with it."""
    found = {}
    for task, optimizer in _settings(rows):
        for solver in SOLVERS:
            lowest = [
                min(median(seeds) for seeds in runs.values())
                for bound in ("none", "bound")
                if (
                    runs := losses(
                        fresh(rows), column, task=task, optimizer=optimizer, solver=solver, bound=bound
                    )
                )
            ]
            if len(lowest) == 2:
                name = f"{NAMES[solver]} on {TITLES[task]} under {OPTIMIZERS[optimizer]}"
                found[name] = (lowest[0], lowest[1])
    return found


def cut(rows: list[dict[str, str]]) -> str:
    """Where the lowest training loss is higher with a bound."""
    worse = [name for name, (alone, bounded) in pairs(rows, "train_loss").items() if bounded > alone]
    return "; ".join(worse)


def validation(rows: list[dict[str, str]]) -> str:
    """Whether the lowest validation loss suffers."""
    found = pairs(rows, "score").values()
    worse = sum(bounded > alone for alone, bounded in found)
    return f"{worse or 'none'} of the {len(found)}"


def losses(rows: list[dict[str, str]], column: str = "train_loss", **wanted: str) -> Losses:
    """The losses of the runs that are wanted, by rate."""
    found: Losses = defaultdict(list)
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            loss = float(row[column]) if row["status"] == "finished" else math.inf
            found[float(row["lr"])].append(loss)
    return found


def fresh(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Runs with other seeds than the one that was chosen with."""
    return [row for row in rows if row["seed"] != "0"]


def orders(found: Losses, most: float) -> str:
    """How many orders of magnitude the widest row of neighbouring rates spans whose losses are all below `most`.

    >>> orders({0.1: [1.0], 1.0: [0.05], 10.0: [0.01], 100.0: [math.inf]}, 0.1)
    '1.0'
    """
    best, start = -1.0, None
    for lr in sorted(found):
        if max(found[lr]) > most:
            start = None
            continue
        start = lr if start is None else start
        best = max(best, math.log10(lr / start))
    return "–" if best < 0 else f"{best:.1f}"


def _settings(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
    there = dict.fromkeys((row["task"], row["optimizer"]) for row in fresh(rows))
    return sorted(there, key=lambda pair: list(TITLES).index(pair[0]))


def _ranges(rows: list[dict[str, str]]) -> list[str]:
    """How far rates may be off: with and without a bound."""
    lines = []
    for task, optimizer in _settings(rows):
        for solver in SOLVERS:
            cells = [f"{SHORT[task]}, {OPTIMIZERS[optimizer].partition(',')[0]}", NAMES[solver]]
            runs = {
                bound: losses(fresh(rows), task=task, optimizer=optimizer, solver=solver, bound=bound)
                for bound in ("none", "bound")
            }
            if not all(len(found) == len(RATES[optimizer]) for found in runs.values()):
                continue
            for found in runs.values():
                cells += [_lost(found, _start(task)), orders(found, TARGETS[task]), _best(found)]
            scores = [
                losses(fresh(rows), "score", task=task, optimizer=optimizer, solver=solver, bound=bound)
                for bound in ("none", "bound")
            ]
            cells += [_best(found) for found in scores]
            lines.append(cells)
    kinds = ["lost", "orders", "lowest loss"]
    head = [
        "task",
        "direction",
        *kinds,
        *(f"{kind}, bounded" for kind in kinds),
        "lowest validation loss",
        "bounded",
    ]
    return [
        RANGES + f"{', '.join(f'{TARGETS[t]:g} ({TITLES[t]})' for t in _tasks(rows))}.\n",
        table(head, lines),
        "",
    ]


def _tasks(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(task for task, _ in _settings(rows)))


def _start(task: str) -> float:
    return math.log(10) + 0.01 if task != "autoencoder-small" else 140.0


def _lost(found: Losses, start: float) -> str:
    every = [loss for losses_ in found.values() for loss in losses_]
    return f"{sum(not loss <= start for loss in every)} of {len(every)}"


def _best(found: Losses) -> str:
    lr = min(found, key=lambda rate: median(found[rate]))
    return f"{median(found[lr]):.2g} at {lr:g}"


def _tables(rows: list[dict[str, str]]) -> list[str]:
    parts = ["## Rate by rate", ""]
    for task, optimizer in _settings(rows):
        chosen = [row for row in fresh(rows) if row["task"] == task and row["optimizer"] == optimizer]
        seeds = sorted({row["seed"] for row in chosen})
        steps = chosen[0]["steps"]
        command = (
            f"python benchmarks/bounds.py run --task {task} --optimizer {optimizer} --seeds {' '.join(seeds)}"
        )
        lines = []
        for solver in SOLVERS:
            for bound in ("none", "bound"):
                found = losses(chosen, solver=solver, bound=bound)
                if not found:
                    continue
                name = NAMES[solver] + (", bounded" if bound == "bound" else "")
                lines.append([name, *(_cell(found.get(lr, [])) for lr in RATES[optimizer])])
        parts += [
            f"{TITLES.get(task, task)}, {OPTIMIZERS[optimizer]}: training loss after {steps} steps, median of "
            f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}; – diverged. `{command}`",
            "",
            table(["lr", *(f"{lr:g}" for lr in RATES[optimizer])], lines),
            "",
        ]
    return parts


def _tried(rows: list[dict[str, str]]) -> list[str]:
    lines = []
    for name, title in TRIED.items():
        for task, solver in (("digits", "cg3"), ("digits-convnet", "backprop")):
            found = losses(rows, task=task, optimizer="sgd", solver=solver, bound=name, seed="0")
            if found:
                cells = [_cell(found.get(lr, [])) for lr in RATES["sgd"][:6]]
                lines.append([title, f"{TITLES[task]}, {NAMES[solver]}", *cells])
    head = ["bounded is", "task", *(f"{lr:g}" for lr in RATES["sgd"][:6])]
    return [CANDIDATES, table(head, lines), ""] if lines else []


def _cell(found: list[float]) -> str:
    if not found:
        return ""
    middle = median(found)
    return "–" if math.isinf(middle) else f"{middle:.2g}"
