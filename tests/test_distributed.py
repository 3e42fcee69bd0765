"""Ranks against one process: every case of `tests/distributed/` under torchrun, on two and on four gloo processes.

A launch takes seconds, so that all cases of a number of ranks share one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "distributed" / "worker.py"

Launch = Callable[[int], dict[str, str]]


def row(
    feature: str, *cases: str, note: str = "", status: str = "works", modes: tuple[str, ...] = ("deferred",)
) -> object:
    marks = [pytest.mark.compatibility(feature, mode=mode, note=note, status=status) for mode in modes]
    return pytest.param(cases, marks=marks, id=cases[0])


OBSERVED = [
    "",
    "-in-place",
    "-clip",
    "-clip-in-place",
    "-accumulate",
    "-accumulate-in-place",
    "-skip",
    "-skip-in-place",
    "-attention",
]
ON_ANY_RANKS = [
    row(
        "DistributedDataParallel",
        "ddp-exact",
        "ddp-cg",
        "ddp-cg-flat",
        "ddp-gradient",
        "ddp-convnet",
        "ddp-attention",
        "ddp-small-buckets",
        "ddp-wrapped-later",
        "ddp-solve",
        "ddp-skipped-step",
        "ddp-two-optimizers",
        "ddp-bytes",
        "ddp-dropped",
        "ddp-overlap",
        note="the direction of one process with the concatenated batch; see `docs/scaling.md` for unequal shares",
    ),
    row("DistributedDataParallel, gradient scaling", "ddp-scaler"),
    row("DistributedDataParallel, `ZeroRedundancyOptimizer`", "ddp-zero"),
    row("DistributedDataParallel, `no_sync`", "ddp-no-sync", "ddp-accumulate"),
    row("DistributedDataParallel, `static_graph`", "ddp-static-graph", "ddp-reentrant"),
    row("DistributedDataParallel, `gradient_as_bucket_view`", "ddp-bucket-view"),
    row("DistributedDataParallel, `find_unused_parameters`", "ddp-unused"),
    row(
        "DistributedDataParallel, shares of different size",
        "ddp-unequal",
        "ddp-unequal-weighted",
        note="weight the loss by `ranks · own samples / all samples` for the mean over all samples",
    ),
    row(
        "DistributedDataParallel, uneven inputs (`Join`)",
        "ddp-join",
        "ddp-join-divide",
        "ddp-join-refused",
        note="`with Join([model, attached])`; `model.join()` alone is refused with a reason",
    ),
    row(
        "FSDP2 (`fully_shard`)",
        "fsdp-exact",
        "fsdp-even",
        "fsdp-cg",
        "fsdp-cg-flat",
        "fsdp-gradient",
        "fsdp-convnet",
        "fsdp-attention",
        "fsdp-features",
        "fsdp-accumulate",
        "fsdp-own-rows",
        "fsdp-two-steps",
        note="each rank solves for the rows it owns",
    ),
    row("FSDP2, mixed precision", "fsdp-bf16", note="S and the solve in float32"),
    row("FSDP2, CPU offload", "fsdp-offload-exact", "fsdp-offload-convnet"),
    row(
        "Tensor parallel (`parallelize_module`)",
        "tensor-parallel-colwise",
        "tensor-parallel-rowwise",
        status="refused",
        modes=("immediate", "deferred"),
        note="where ranks hold different features, no rank can form S alone",
    ),
    row(
        "FSDP1 (`FullyShardedDataParallel`)",
        "fsdp1-refused",
        status="refused",
        note="shards do not follow rows; use `fully_shard`",
    ),
    row("Running averages over ranks", "running-ddp", "running-fsdp"),
    row(
        "Running averages over ranks, observed in some steps (`Running(update_every=...)`)",
        *(f"observe-{kind}{how}" for kind in ("ddp", "fsdp") for how in OBSERVED),
        "observe-ddp-bucket-view",
        "observe-ddp-static-graph",
        "observe-ddp-unused",
        "observe-ddp-unused-in-place",
        "observe-ddp-join",
        "observe-ddp-resumed",
        note="nothing is sent for S in the steps between",
    ),
    row(
        "NaN and infinities on one rank",
        "broken-S",
        "broken-G",
        "broken-running",
        note="decided from what was summed over ranks, so that all ranks decide alike",
    ),
]
ON_TWO = [
    row(
        "`torch.distributed.checkpoint`",
        "resumed-ddp",
        "resumed-fsdp",
        note="a resumed run is bit for bit the uninterrupted one",
    ),
]
ON_FOUR = [
    row("FSDP2, hybrid mesh", "fsdp-hybrid", "fsdp-hybrid-cg"),
    row("`torch.distributed.checkpoint` onto another number of ranks", "moved-ddp", "moved-fsdp"),
]
IMMEDIATE = ["ddp-immediate-warns", "fsdp-immediate-warns"]


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs all cases on so many ranks, once; the checkpoint of two ranks is there for four."""
    folder = tmp_path_factory.mktemp("ranks")

    @cache
    def launch(ranks: int) -> dict[str, str]:
        if ranks == 4:
            launch(2)
        rows = [*ON_ANY_RANKS, *(ON_FOUR if ranks == 4 else ON_TWO)]
        cases = [case for row in rows for case in row.values[0]]
        run = torchrun(ranks, WORKER, folder / f"{ranks}.json", *cases, *IMMEDIATE)
        assert run.returncode == 0, run.stderr
        return json.loads((folder / f"{ranks}.json").read_text())

    return launch


def check(found: dict[str, str], cases: tuple[str, ...]) -> None:
    failed = next((complaint for complaint in found.values() if complaint), None)
    for case in cases:
        assert case in found, f"not reached, because an earlier case failed:\n{failed}"
        assert not found[case], f"{case}:\n{found[case]}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cases", ON_ANY_RANKS)
def test_ranks_take_the_step_of_one_process(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


@pytest.mark.parametrize("cases", ON_TWO)
def test_two_ranks(outcomes: Launch, cases: tuple[str, ...]) -> None:
    check(outcomes(2), cases)


@pytest.mark.parametrize("cases", ON_FOUR)
def test_four_ranks(outcomes: Launch, cases: tuple[str, ...]) -> None:
    check(outcomes(4), cases)


@pytest.mark.compatibility(
    "DistributedDataParallel",
    status="approximate",
    note="immediate mode averages the ranks' own solutions, and warns once",
)
@pytest.mark.compatibility(
    "FSDP2 (`fully_shard`)",
    status="approximate",
    note="immediate mode averages the ranks' own solutions, and warns once",
)
def test_immediate_mode_warns_once(outcomes: Launch) -> None:
    check(outcomes(2), tuple(IMMEDIATE))


@pytest.mark.compatibility(
    "A rank that dies or hangs",
    mode="deferred",
    note="the others fail with a clear error within the group's timeout",
)
@pytest.mark.parametrize("case", ["rank-died", "rank-stuck"])
def test_other_ranks_fail_within_the_timeout(case: str, tmp_path: Path) -> None:
    torchrun(2, WORKER, tmp_path / "outcome.json", case)
    check(json.loads((tmp_path / "outcome.json").read_text()), (case,))


@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_the_examples_run_and_take_the_step_of_one_process(example: str) -> None:
    run = torchrun(2, ROOT / "examples" / f"{example}.py")
    assert run.returncode == 0, run.stderr
    losses = [float(found) for found in re.findall(r"loss (\S+)", run.stdout)]
    assert losses[-1] < 0.8 * losses[0]
    (distance,) = re.findall(r"one process with all samples: (\S+)", run.stdout)
    assert float(distance) < 1e-5
