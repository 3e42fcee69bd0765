"""Numbers and tables that pages show, each computed from a record under results/ when the site is made."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import derivative_rows
import running

RESULTS = Path(__file__).parents[2] / "results"
NAMES = {"backprop": "BackProp", "cg:3": "`CG(3)`", "exact": "`Exact()`", "running:10": "a running S"}
TENTH = "a running S, ρ = 0.3, S of one step in 10"
Row = dict[str, str]


def found() -> dict[str, str]:
    """All of them by the names that pages write in double braces."""
    derivatives = {"table_derivative_rows": derivative_rows.table(rows("questions/derivative-rows.csv"))}
    return {
        **digits(), **figure1(), **beyond(), **gpt(), **costs(), **versions(), **peers(), **derivatives,
    }  # fmt: skip


def rows(path: str) -> list[Row]:
    """A CSV file under results/."""
    with (RESULTS / path).open() as file:
        return list(csv.DictReader(file))


def digits() -> dict[str, str]:
    """The demo: each method at the best of its rates, by final training loss."""
    last: dict[tuple[str, float], list[float]] = defaultdict(list)
    records = [row for row in rows("digits/records.csv") if row["optimizer"] == "adam"]
    epochs = max(int(row["epoch"]) for row in records)
    for row in records:
        if int(row["epoch"]) == epochs and row["loss"]:
            last[row["solver"], float(row["lr"])].append(float(row["loss"]))
    best = {
        solver: min(fmean(losses) for (name, _), losses in last.items() if name == solver)
        for solver in ("backprop", "cg:3", "exact")
    }
    named = {f"digits_{solver.partition(':')[0]}": f"{loss:.2g}" for solver, loss in best.items()}
    return {"digits_epochs": str(epochs), "digits_rates": str(len({rate for _, rate in last})), **named}


def figure1() -> dict[str, str]:
    """The paper's MLP on CIFAR-10: loss after 10 epochs and accuracy after 50, over seeds."""
    records = rows("paper/fig1.csv")

    def mean(solver: str, epoch: str, column: str) -> float:
        return fmean(float(r[column]) for r in records if (r["solver"], r["epoch"]) == (solver, epoch))

    named = {"backprop": "backprop", "cg": "cg:3", "published": "published:3", "exact": "exact"}
    losses = {f"fig1_{name}_loss": f"{mean(s, '10', 'train_loss'):.3g}" for name, s in named.items()}
    tests = {
        f"fig1_{name}_test": f"{100 * mean(s, '50', 'test_accuracy'):.1f} %" for name, s in named.items()
    }
    return {**losses, **tests}


def beyond() -> dict[str, str]:
    """The paper's MLP for ten epochs, over step sizes, optimizers and batch sizes."""
    records = [row for row in rows("paper/beyond.csv") if row["epoch"] == "10"]
    records += [
        row for row in rows("paper/beyond.csv") if row["status"] == "diverged" and row["epoch"] != "10"
    ]

    def of(experiment: str, **settings: str) -> list[Row]:
        wanted = {"experiment": experiment, **settings}
        return [row for row in records if wanted.items() <= row.items()]

    plain, nesterov = of("optimizers", optimizer="sgd", momentum="0.0"), of("optimizers", momentum="0.95")
    nesterov = [row for row in nesterov if row["optimizer"] == "sgd"]
    return {
        "table_tau_theta": grid(of("tau_theta"), "tau_theta", "τ_θ"),
        "table_sgd": grid(plain, "tau", "lr, plain SGD"),
        "table_nesterov": grid(nesterov, "tau", "lr, SGD with Nesterov momentum"),
        "table_adam": grid(of("optimizers", optimizer="adam"), "tau", "lr, Adam"),
        "table_muon": grid(of("muon"), "tau", "lr, Muon"),
        "table_batches": grid(of("batches"), "batch_size", "batch size"),
    }


def grid(found: Iterable[Row], column: str, title: str) -> str:
    """Training loss and validation accuracy after ten epochs, mean over seeds: settings down, solvers across."""
    cells: dict[tuple[str, float], dict[str, Row]] = defaultdict(dict)
    for row in found:
        cells[row["solver"], float(row[column])][row["seed"]] = row
    solvers = [solver for solver in NAMES if any(name == solver for name, _ in cells)]
    lines = [
        [f"{value:g}", *(cell(cells[solver, value].values()) for solver in solvers)]
        for value in sorted({value for _, value in cells})
    ]
    return table([title, *(NAMES[solver] for solver in solvers)], lines)


def cell(seeds: Iterable[Row]) -> str:
    """Mean loss and accuracy of the seeds of one setting."""
    seeds = list(seeds)
    if any(row["status"] == "diverged" or not row["train_loss"] for row in seeds):
        return "diverged"
    loss, accuracy = (fmean(float(row[name]) for row in seeds) for name in ("train_loss", "val_accuracy"))
    return f"{loss:.3g} ({100 * accuracy:.1f} %)"


def gpt() -> dict[str, str]:
    """A byte-level GPT under AdamW: held-out loss at the best rate, and the time of a step."""
    losses: dict[tuple[str, float], list[float]] = defaultdict(list)
    for path in sorted((RESULTS / "gpt").glob("seed*.json")):
        for row in json.loads(path.read_text())["rows"]:
            losses[running.fed(row), row["lr"]].append(row["validation_loss"])
    best = {
        name: min(fmean(found) for (other, _), found in losses.items() if other == name) for name, _ in losses
    }
    times: dict[str, list[float]] = defaultdict(list)
    for row in json.loads((RESULTS / "gpt" / "time.json").read_text())["rows"]:
        times[running.fed(row)].append(row["seconds_per_step"])
    return {
        "gpt_adamw": f"{best[running.PLAIN]:.3f}",
        "gpt_running": f"{best[TENTH]:.3f}",
        "gpt_time": f"{fmean(times[TENTH]) / fmean(times[running.PLAIN]):.2f}",
    }


def costs() -> dict[str, str]:
    """Whole steps beside BackProp's, eager on one H200."""
    lines, measured, eager = [], [], {}
    for name, title in WAYS.items():
        record = json.loads((RESULTS / "bench" / f"h200-ways-{name}.json").read_text())["rows"]
        ratios = {(r["way"], r["method"]): f"{r['ratio']:.2f}" for r in record if r["ratio"]}
        keys = [(way, method) for way in ("eager", "compile") for method in ("cg3", "exact")]
        eager[name] = ratios["eager", "cg3"]
        measured += [float(ratios[key]) for key in keys if key in ratios]
        lines.append([title, *(ratios.get(key, "–") for key in keys)])
    head = ["network", "eager, cg3", "eager, exact", "compiled, cg3", "compiled, exact"]
    averaged = json.loads((RESULTS / "bench" / "running-h200.json").read_text())["rows"]
    steps = {(r["network"], r["method"]): f"{r['ratio']:.2f}" for r in averaged if r["way"] == "eager"}
    every = {"running_gpt_10": steps["gpt", "every 10"], "running_gpt_32": steps["gpt", "every 32"]}
    every["ways_gpt_cg"] = eager["gpt"]
    modes = [[WAYS[way], eager[way], steps[name, "every 10"]] for name, way in IN_BOTH.items()]
    compared = table(["network", "`CG(3)`, immediate", "running S, one step in ten"], modes)
    ends = {"ways_least": f"{min(measured):.1f}", "ways_most": f"{max(measured):.1f}"}
    return {"table_ways": table(head, lines), "table_modes": compared, **ends, **every}


def versions() -> dict[str, str]:
    """The Pythons and torches that the tests were run on, and how they ended."""
    tried = json.loads((RESULTS / "versions.json").read_text())["rows"]
    columns = ("python", "torch", "commit", "passed", "failed", "skipped")
    lines = [
        [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in columns] for row in tried
    ]
    gpu = json.loads((RESULTS / "gpu-tests.json").read_text())
    counts = ", ".join(f"{gpu[name]:,} {name}" for name in ("passed", "failed", "skipped"))
    tested = f"{gpu['device']}, torch {gpu['torch']}, commit {gpu['commit']}: {counts}"
    return {"table_versions": table([*columns], lines), "gpu_tests": tested}


def peers() -> dict[str, str]:
    """The verdict of the comparison, as the page says it that is written from its records."""
    page = " ".join((RESULTS.parent / "docs" / "peers.md").read_text().split())
    verdict = r"the best ProxProp wins (\d+), ties (\d+) and loses (\d+) of (\d+) small tasks"
    beside = r"You use \*\*AdamW\*\*:.*?a running √S (\d+) better, (\d+) worse"
    (wins, ties, losses, tasks), (better, worse) = (re.findall(found, page)[0] for found in (verdict, beside))
    named = {"wins": wins, "ties": ties, "losses": losses, "tasks": tasks, "better": better, "worse": worse}
    return {f"peers_{name}": number for name, number in named.items()}


WAYS = {
    "mlp-fp32": "the paper's MLP, batch 500, float32",
    "resnet": "ResNet-18, 128 images of 32², bf16",
    "gpt": "GPT-2 small, 8×1,024 tokens, bf16",
    "autoencoder": "autoencoder, batch 1,000, TF32",
}

IN_BOTH = {"mlp": "mlp-fp32", "resnet18": "resnet", "autoencoder": "autoencoder"}
"""Networks that both records have, by their name in the one of running averages; their GPTs differ in vocabulary."""


def table(header: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
