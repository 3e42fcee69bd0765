"""REPRODUCTION.md: verdicts, tables and what is different, written from the CSV files and nothing else."""

from collections import Counter
from collections.abc import Iterable, Sequence

from proxprop.lab.analysis import counted
from proxprop.lab.reproduction import grades
from proxprop.lab.reproduction.appendix import (
    beyond_section,
    robustness_section,
    spectrum_section,
    table1_section,
)
from proxprop.lab.reproduction.claims import Verdict, verdicts
from proxprop.lab.reproduction.markdown import table
from proxprop.lab.reproduction.results import Results
from proxprop.lab.reproduction.summary import summary

FIGURES = {
    "Figure 1": ("fig1",),
    "Table 1": ("table1",),
    "Figure 2": ("fig2-convnet-2pool", "fig2-convnet"),
    "Section 4.1, the spectrum": ("spectrum",),
    "Propositions": ("propositions",),
    "Beyond the paper's runs": ("beyond",),
}

DIFFERENT = """\
- **Data.** The committed records were trained on a copy of CIFAR-10 recompressed as JPEG (quality 75, colour at half
  resolution) and stored in another order; channel means agree with the original to 1e-4. Training and validation
  images are the first 45,000 and the last 5,000 of the training set, as in the released code, but of that other order.
- **Iteration.** The released conjugate gradients use one array for residual and search direction in the first step, so
  from the second step on they are not conjugate; they add 1e-6 to both denominators and stop early at a tolerance.
  *Published* is that iteration; *correct* is textbook conjugate gradients from 0. `lab/published.py` has the details.
- **Direction.** The released code takes the direction as a difference of updated and old parameters in float32, which
  rounds it. Ours is the solution of the linear system itself, in float32, with either iteration.
- **Seeds.** Initialisation and shuffling come from other random number generators. The paper shows one run each.
- **Time.** The paper's seconds are a Titan X's, ours those of the device named above, on a CUDA GPU with every step
  replayed from a CUDA graph; so only ratios to each one's own BackProp are compared. Ours solve in whichever space is
  cheapest, with the published iteration too, so its seconds are not those of the released code. Seconds are left out
  where several runs shared the device."""


def document(results: Results) -> str:
    """The whole document."""
    found = verdicts(results)
    parts = [
        "# Proximal Backpropagation, reproduced",
        _made(results),
        "## In short",
        summary(results, found),
        "## What differs from the paper's runs",
        DIFFERENT,
        "## When a number counts as reproduced",
        grades.RULE,
        "## Verdicts",
        _counts(found),
        *(_part(name, claims, results) for name, claims in found.items()),
        table1_section(results),
        robustness_section(results),
        spectrum_section(results),
        beyond_section(results),
        "## Run it again",
        RERUN,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


RERUN = """\
`proxprop reproduce all --data-dir DIR --device cuda --out results/paper` makes this folder; finished runs are read.
`proxprop reproduce all --only-write --out results/paper` writes it from the records that are there.

| file | what is in it |
| --- | --- |
| `fig1.csv`, `table1.csv`, `fig2.csv`, `beyond.csv` | a row per measured epoch of every run; `run` names it |
| `runs.csv` | a row per run: its experiments, the command that runs it again, how it ended, commit, versions, device |
| `spectrum.csv`, `propositions.csv` | a row per measurement (`proxprop reproduce spectrum`, `... propositions`) |
| `environment.json` | what the runs were made with |

`train_loss` is the full-batch training loss, `seconds` training time without evaluation, `tau` the optimizer's learning
rate, `iteration` whose conjugate gradients were taken. An empty loss is one that was not finite."""


def _made(results: Results) -> str:
    """What there is: runs, seeds, device, and what is missing."""
    status = Counter(row["status"] for row in results.runs)
    missing = status["missing"] + status["unfinished"]
    devices = ", ".join(sorted({row["device"] for row in results.runs if row["device"]}))
    lines = [
        "Every number here is computed from the CSV files in this folder, as mean ± standard deviation over seeds. "
        "`runs.csv` gives, for every row's `run`, the command that makes it again.",
        f"{counted(len(results.runs), 'run')}, {counted(results.seeds, 'seed')} of every setting"
        + (f", on {devices}" if devices else "")
        + f": {status['finished']} finished, {status['diverged']} diverged, {missing} missing.",
    ]
    if any(row["data"] != "cifar10" for row in results.runs):
        lines.insert(0, "**Made with `--quick`: it proves that the command works, nothing else.**")
    return "\n\n".join(lines)


def _counts(found: dict[str, list[Verdict]]) -> str:
    """How many single numbers come back, by part and by iteration."""
    rows = []
    for part, claims in found.items():
        graded = [claim.graded for claim in claims if claim.graded is not None]
        if graded:
            with_cg = [one for one in graded if one.published is not None]
            rows.append(
                [
                    part,
                    _tally(one.correct for one in graded if one.published is None),
                    _tally(one.published or "" for one in with_cg),
                    _tally(one.correct for one in with_cg),
                ]
            )
    columns = ["single numbers of", "BackProp and exact", "CG, published iteration", "CG, correct"]
    return table(columns, rows) if rows else ""


def _tally(marks: Iterable[str]) -> str:
    counts = Counter(marks)
    kinds = (grades.YES, grades.ROUGHLY, grades.NO, grades.NOT_RUN)
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "–"


def _part(name: str, claims: Sequence[Verdict], results: Results) -> str:
    source = FIGURES[name][0].partition("-")[0]
    drawn = bool(getattr(results, source))
    pictures = [f"![{name}]({figure}.png)" for figure in FIGURES[name] if drawn]
    return "\n\n".join([f"### {name} (`{source}.csv`)", *pictures, _verdicts(claims)])


def _verdicts(claims: Sequence[Verdict]) -> str:
    """The verdict table; without the column of the published iteration where nothing is iterated."""
    ends = [(f"**{claim.reproduced}**", claim.why) for claim in claims]
    if any(claim.published for claim in claims):
        columns = [
            "claim",
            "paper",
            "published iteration",
            "correct CG, exact or BackProp",
            "reproduced",
            "why",
        ]
        rows = [[c.claim, c.paper, c.published, c.correct, *end] for c, end in zip(claims, ends, strict=True)]
    else:
        columns = ["claim", "paper", "ours", "reproduced", "why"]
        rows = [[c.claim, c.paper, c.correct, *end] for c, end in zip(claims, ends, strict=True)]
    return table(columns, rows)
