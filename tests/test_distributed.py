"""Ranks take the step of one process: the cases of `tests/distributed/` under torchrun, on gloo processes.

All run on two ranks, and on four those for which four matter; the rest of the cross, also on three, is slow. A launch takes seconds, so
all cases of a number of ranks share one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "distributed" / "worker.py"

Launch = Callable[[int], dict[str, str]]
Run = Callable[[Sequence[str]], dict[str, str]]


def row(
    feature: str, *cases: str, note: str = "", status: str = "works", modes: tuple[str, ...] = ("deferred",)
) -> object:
    marks = [pytest.mark.compatibility(feature, mode=mode, note=note, status=status) for mode in modes]
    return pytest.param(cases, marks=marks, id=cases[0])


KINDS = ("ddp", "fsdp", "ddp-owner", "fsdp-owner")
WAYS = ("inverse", "gradient")
PLANS = ("both", "colwise", "rowwise")
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
        "ddp-embedded",
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
    row("DistributedDataParallel, `proxprop.bound`", "ddp-bounded"),
    row(
        "FSDP2, `proxprop.bound`",
        "fsdp-bounded-refused",
        status="refused",
        note="the norm of a part is not the norm of the whole",
    ),
    row("DistributedDataParallel, gradient scaling", "ddp-scaler"),
    row("DistributedDataParallel, `ZeroRedundancyOptimizer`", "ddp-zero"),
    row("DistributedDataParallel, `no_sync`", "ddp-no-sync", "ddp-accumulate", "ddp-given-up"),
    row("DistributedDataParallel, `static_graph`", "ddp-static-graph", "ddp-reentrant"),
    row("DistributedDataParallel, `gradient_as_bucket_view`", "ddp-bucket-view", "ddp-zero-gradient"),
    row(
        "DistributedDataParallel, `find_unused_parameters`",
        "ddp-unused",
        "ddp-unused-wrapped-later",
        "ddp-unused-attention",
    ),
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
        "fsdp-embedded",
        "fsdp-features",
        "fsdp-accumulate",
        "fsdp-owners",
        "fsdp-overlap",
        "fsdp-two-steps",
        "fsdp-two-optimizers",
        note="each rank solves for the layers it owns",
    ),
    row("FSDP2, mixed precision", "fsdp-bf16", note="S and the solve in float32"),
    row("FSDP2, CPU offload", "fsdp-offload-exact", "fsdp-offload-convnet"),
    row(
        "Tensor parallel (`parallelize_module`)",
        *(f"tensor-{plan}" for plan in PLANS),
        *(f"tensor-{plan}-{way}" for plan in PLANS for way in WAYS),
        "tensor-sequence",
        note="inputs that are cut by features or positions are gathered in observed steps",
    ),
    row(
        "Tensor parallel (`parallelize_module`)",
        "tensor-parallel-colwise",
        "tensor-parallel-rowwise",
        status="refused",
        modes=("immediate",),
        note="no rank has all features and outputs inside backward",
    ),
    row(
        "Tensor parallel inside DistributedDataParallel",
        "tensor-ddp-refused",
        status="refused",
        note="use `fully_shard` on a mesh with both dimensions",
    ),
    row(
        "FSDP1 (`FullyShardedDataParallel`)",
        "fsdp1-refused",
        status="refused",
        note="shards do not follow rows; use `fully_shard`",
    ),
    row(
        "Running averages over ranks",
        *(f"running-{kind}" for kind in KINDS),
        note="each rank keeps the averages and inverses of the layers it owns",
    ),
    row(
        "Statistics shared out over ranks (owners)",
        *(f"owned-{what}-{kind}" for what in ("copy", "turns") for kind in ("ddp", "fsdp")),
        *(f"owned-said-{kind}-{way}" for kind in ("ddp", "fsdp") for way in WAYS),
        *(
            f"owned-{kind}-{network}-{way}-{often}"
            for kind in ("ddp", "fsdp")
            for network in ("even", "tied")
            for way in WAYS
            for often in ("every", "tenth")
        ),
        *(
            f"owned-{kind}-{network}-{way}"
            for kind in ("ddp", "fsdp")
            for network in ("attention", "convnet", "cg")
            for way in WAYS
        ),
        *(f"owned-later-{way}" for way in WAYS),
        *(f"owned-bias-{way}" for way in WAYS),
        "owned-bf16",
        note="averages and inverses take one copy over all ranks; `Running(copies=...)` allows more",
    ),
    row(
        "Experts that one rank alone holds",
        *(f"experts-{kind}{how}" for kind in ("ddp", "fsdp") for how in ("", "-running")),
        note="S and its number of samples stay with the expert; DDP and FSDP2 have to ignore its parameters",
    ),
    row("Statistics shared out over ranks, CPU offload", *(f"owned-offload-{way}" for way in WAYS)),
    row(
        "Ranks that convert different layers",
        "owned-differ",
        status="refused",
        note="an error names the first layer that differs",
    ),
    row(
        "Running averages over ranks, observed in some steps (`Running(update_every=...)`)",
        *(f"observe-{kind}{how}" for kind in ("ddp", "fsdp") for how in OBSERVED),
        "observe-ddp-bucket-view",
        "observe-ddp-static-graph",
        "observe-ddp-unused",
        "observe-ddp-unused-in-place",
        "observe-ddp-unused-by-all",
        "observe-ddp-unused-by-all-absolute",
        "observe-ddp-unused-frozen",
        "observe-ddp-tied-unused",
        "observe-ddp-tied-unused-absolute",
        "observe-ddp-tied-frozen",
        "observe-ddp-frozen",
        "observe-ddp-join",
        "observe-ddp-resumed",
        note="nothing is sent for S in the steps between",
    ),
    row(
        "NaN and infinities on one rank",
        "broken-S",
        "broken-G",
        *(f"broken-running-{kind}" for kind in KINDS),
        note="decided from what was summed over ranks, so that all ranks decide alike",
    ),
]
ON_TWO = [
    row(
        "`torch.distributed.checkpoint`",
        *(f"resumed-{kind}" for kind in KINDS),
        note="a resumed run is bit for bit the uninterrupted one",
    ),
]
ON_FOUR = [
    row("FSDP2 and tensor parallel", *(f"tensor-fsdp-{way}" for way in WAYS)),
    row("FSDP2, hybrid mesh", "fsdp-hybrid", "fsdp-hybrid-cg", *(f"owned-hybrid-{way}" for way in WAYS)),
    row("`torch.distributed.checkpoint` onto another number of ranks", *(f"moved-{kind}" for kind in KINDS)),
]


def torchrun(ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, env=environment, timeout=300
    )


def outcomes_of(run: Run, cases: Sequence[str]) -> dict[str, str]:
    """What each case complains about, "" if nothing.

    A launch ends with its first failure, because ranks may be out of step then. The cases after it run in another.
    """
    found: dict[str, str] = {}
    while left := [case for case in cases if case not in found]:
        reached = run(left)
        assert left[0] in reached, f"{left[0]} was not begun: {reached}"
        found |= reached
    return found


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs the cases of all selected tests on so many ranks, once; the checkpoint of two ranks is there for four."""
    folder = tmp_path_factory.mktemp("ranks")
    calls = [item.callspec.params for item in request.session.items if "outcomes" in item.fixturenames]

    def run(ranks: int, cases: Sequence[str]) -> dict[str, str]:
        path = folder / f"{ranks}.json"
        path.write_text("{}")
        ended = torchrun(ranks, WORKER, path, *cases)
        found = json.loads(path.read_text())
        assert found, ended.stderr
        return {case: f"{said}\n{ended.stderr}" if said else "" for case, said in found.items()}

    @cache
    def launch(ranks: int) -> dict[str, str]:
        if ranks == 4:
            launch(2)
        selected = [case for call in calls if call["ranks"] == ranks for case in call["cases"]]
        kept = [case for row in ON_TWO for case in row.values[0]] if ranks == 2 else []
        return outcomes_of(partial(run, ranks), list(dict.fromkeys([*selected, *kept])))

    return launch


def check(found: dict[str, str], cases: tuple[str, ...]) -> None:
    complaints = {case: found[case] for case in cases if found[case]}
    assert not complaints, "\n".join(f"{case}:\n{said}" for case, said in complaints.items())


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))])
@pytest.mark.parametrize("cases", ON_ANY_RANKS)
def test_ranks_take_the_step_of_one_process(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("cases", ON_TWO)
def test_two_ranks(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


@pytest.mark.parametrize("ranks", [1])
@pytest.mark.parametrize(
    "cases", [("fsdp-attention", "fsdp-convnet", "running-fsdp", "running-ddp")], ids=["all"]
)
def test_one_rank_is_one_process(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize("cases", ON_FOUR)
def test_four_ranks(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


def test_a_failure_hides_no_later_case() -> None:
    """A launch stops at the first case that fails, here "b" and "d"."""

    def run(cases: Sequence[str]) -> dict[str, str]:
        stop = next((i for i, case in enumerate(cases) if case in "bd"), len(cases))
        return {case: "failed" if case in "bd" else "" for case in cases[: stop + 1]}

    assert outcomes_of(run, "abcde") == {"a": "", "b": "failed", "c": "", "d": "failed", "e": ""}
    with pytest.raises(AssertionError, match="a was not begun"):
        outcomes_of(lambda cases: {}, "ab")


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
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("cases", [("ddp-immediate-warns", "fsdp-immediate-warns")], ids=["both"])
def test_immediate_mode_warns_once(outcomes: Launch, cases: tuple[str, ...], ranks: int) -> None:
    check(outcomes(ranks), cases)


@pytest.mark.compatibility(
    "A rank that dies or hangs",
    mode="deferred",
    note="the others fail with a clear error within the group's timeout",
)
@pytest.mark.parametrize("case", ["rank-died", pytest.param("rank-stuck", marks=pytest.mark.slow)])
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
    if example == "fsdp":
        (held,) = re.findall(r"on each rank, kB: (\d+), (\d+)", run.stdout)
        assert max(map(int, held)) <= 1.1 * sum(map(int, held)) / 2
        assert "distance of a resumed run: 0.0" in run.stdout
