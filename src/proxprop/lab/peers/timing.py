"""Seconds of a step, apart from training: all methods of a task in turns, on a machine that does nothing else.

A step is timed at the chosen setting, from fresh weights, batch and optimizer included, in periods of as many steps as
a running S or SOAP takes between two inversions. The fastest way that runs a method counts: one operation after the
other ("eager"), compiled ("compile"), or on a CUDA GPU replayed from a graph ("graph"). Compilation and warm-up are not
counted.
"""

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from statistics import median, quantiles

import torch
from torch import Tensor

from proxprop.lab import devices
from proxprop.lab.peers import protocol
from proxprop.lab.peers.memory import peak
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.run import Trained, problem
from proxprop.lab.peers.spaces import Setting, setting
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.task import Task
from proxprop.lab.peers.tasks import TASKS
from proxprop.lab.records.environment import environment
from proxprop.lab.refusal import Refused

PERIOD, WARMING, ROUNDS = 10, 20, 7
GRAPHED = ("sgd", "adamw", "muon", "exact+sgd", "cg3+sgd", "exact+adamw", "cg3+adamw")
"""Methods whose steps are all alike and leave nothing to the host, as a graph needs them."""

Step = Callable[[], object]


def time_all(
    store: Store,
    tasks: Sequence[str],
    methods: Sequence[str],
    device: torch.device,
    ways: Sequence[str],
    tell: Callable[[str], None],
) -> None:
    """Time every method of every task and record it, task by task.

    Raises:
        Refused: no trial of these tasks is recorded, or another process adds records.
    """
    chosen = {task: _chosen(store, task, methods) for task in tasks}
    if not any(chosen.values()):
        raise Refused(
            f"there is nothing to time: no trial of {', '.join(tasks)} is recorded in {store.folder}; run "
            "`proxprop bench` first"
        )
    with store.locked():
        for task, trials in chosen.items():
            if not trials:
                continue
            rows, failed = time_task(TASKS[task], trials, device, ways, ROUNDS)
            store.add_times(rows)
            tell(f"{task}: timed {len(rows)} methods and ways in {ROUNDS} rounds")
            for line in failed:
                tell(f"{task}: {line}")


def _chosen(store: Store, task: str, methods: Sequence[str]) -> dict[str, int]:
    """The chosen trial of each method that has one."""
    runs = store.runs(task)
    trials = {name: protocol.choice(runs, task, name) for name in methods}
    return {name: trial for name, trial in trials.items() if trial is not None}


def time_task(
    task: Task, chosen: dict[str, int], device: torch.device, ways: Sequence[str], rounds: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of times.csv for methods at their trials, and a line for each way that does not run a method."""
    where, load = environment(device), f"{os.getloadavg()[0]:.1f}"
    problem(task, device)  # its data is no method's memory
    steps: dict[tuple[str, str], Step] = {}
    memory: dict[tuple[str, str], int] = {}
    failed: list[str] = []
    with devices.matmul_precision(task.precision):
        for (name, trial), way in product(chosen.items(), ways):
            if way == "graph" and (name not in GRAPHED or device.type != "cuda"):
                continue
            make = partial(_step, task, name, setting(name, trial), device, way)
            try:
                steps[name, way], memory[name, way] = peak(make, device)
            except RuntimeError as error:
                failed.append(f"{way} does not run {name}: {str(error).partition(chr(10))[0]}")
        times = interleaved(steps, device, rounds)
    shared = {key: str(where[key] or "") for key in ("commit", "torch", "device", "threads", "time")}
    rows = [
        {
            "task": task.name,
            "method": name,
            "way": way,
            **_spread(times[name, way]),
            "megabytes": f"{memory[name, way] / 2**20:.4g}",
            "rounds": str(rounds),
            "load": load,
            "command": f"proxprop bench time --task {task.name}",
            **shared,
        }
        for name, way in steps
    ]
    return rows, failed


def interleaved(
    steps: dict[tuple[str, str], Step], device: torch.device, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a step of each, in each round; all take their turn in every round."""
    found: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            gc.collect()
            began = devices.wait(device)
            for _ in range(PERIOD):
                step()
            found[key].append(1000 * (devices.wait(device) - began) / PERIOD)
    return found


def _spread(times: list[float]) -> dict[str, str]:
    low, _, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return {"ms": f"{median(times):.4g}", "low": f"{low:.4g}", "high": f"{high:.4g}"}


def _step(task: Task, name: str, chosen: Setting, device: torch.device, way: str) -> Step:
    """A warm step of a method in a way."""
    trained = Trained(task, METHODS[name], chosen, protocol.TRIAL_SEED, device)
    if way == "compile":
        torch.compiler.reset()
        trained.model.compile()
    if way == "graph":
        return _graph(trained)
    for _ in range(WARMING):
        trained.step()
    return trained.step


def _graph(trained: Trained) -> Step:
    """Steps replayed from a CUDA graph, at a constant learning rate; the batch is drawn outside of it."""
    stream = torch.cuda.Stream()
    held = trained.problem.batch(trained.generator)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMING):
            trained.step_on(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        trained.step_on(held)

    def step() -> None:
        _fill(held, trained.problem.batch(trained.generator))
        graph.replay()

    return step


def _fill(held: Iterable[Tensor], batch: Iterable[Tensor]) -> None:
    for kept, fresh in zip(held, batch, strict=True):
        kept.copy_(fresh)
