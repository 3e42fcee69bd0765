"""Ctrl-C, SIGTERM and `kill -9`: real processes, real signals, and nobody is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from proxprop.lab.cli import main
from proxprop.lab.workers import _Stop

LAB = (sys.executable, "-m", "proxprop.lab")
NET = ("--hidden", "8", "--batch-size", "10")
FEW = ("compare", *NET, "--epochs", "30", "--seeds", "1", "--solvers", "backprop,cg:3", "--optimizers", "sgd",
       "--lrs", "0.001,0.01,0.1", "--jobs", "2")  # fmt: skip
ENDLESS = ("compare", *NET, "--epochs", "100000", "--seeds", "1", "--lrs", "0.01,0.1", "--jobs", "2")


@contextlib.contextmanager
def started(folder, *arguments):
    """A command in a session of its own, as a terminal starts it; what is left of it is killed afterwards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*LAB, *arguments], cwd=folder, text=True, start_new_session=True, **pipes)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait(process, there):
    """Wait until something is there, or the process has ended."""
    while process.poll() is None and not there():
        time.sleep(0.02)


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}


def test_ctrl_c_says_how_to_go_on(here, blobs):
    train = ("train", "--data", str(blobs), *NET, "--epochs", "100000", "--threads", "1")
    with started(here, *train, "--out", "my run") as process:
        wait(process, (here / "my run" / "metrics.jsonl").exists)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Go on with: proxprop train --out 'my run' --resume" in told
    assert "Traceback" not in errors
    assert len(list((here / "my run").glob("checkpoint-*.ckpt"))) == 1


@pytest.mark.slow
def test_ctrl_c_stops_a_whole_comparison_and_the_same_command_goes_on(here, blobs):
    """Two workers, a signal to all of them, as a terminal sends it."""
    with started(here, *FEW, "--data", str(blobs)) as process:
        wait(process, lambda: stamps(here))
        os.killpg(process.pid, signal.SIGINT)
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Give the same command again to go on" in told
    assert "Traceback" not in errors
    finished = stamps(here)
    assert 0 < len(finished) < 6
    with pytest.raises(SystemExit) as left:
        main([*FEW, "--data", str(blobs)])
    assert not left.value.code
    assert len(stamps(here)) == 6
    assert finished.items() <= stamps(here).items()


@pytest.fixture
def comparison(here, blobs):
    """A real comparison with two runs under way."""
    with started(here, *ENDLESS, "--data", str(blobs)) as process:
        wait(process, lambda: len(list(here.rglob("metrics.jsonl"))) == 2)
        yield process


def test_workers_end_with_a_comparison_that_is_killed(comparison):
    """Both ends of the pipes are closed only when no process is left that writes into them."""
    comparison.kill()
    comparison.communicate(timeout=60)
    assert comparison.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_to_a_comparison_alone_stops_its_workers_too(comparison, here, number):
    comparison.send_signal(number)
    told, errors = comparison.communicate(timeout=60)
    assert comparison.returncode == 130, errors
    assert "Give the same command again to go on" in told
    assert errors == ""
    assert len(list(here.rglob("checkpoint-*.ckpt"))) == len(list(here.rglob("metrics.jsonl"))) == 2


@pytest.mark.parametrize("pause", [0.02, pytest.param(0.5, marks=pytest.mark.slow)])
def test_many_ctrl_c_end_a_comparison_without_a_traceback(comparison, pause):
    for _ in range(5):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(comparison.pid, signal.SIGINT)
        time.sleep(pause)
    told, errors = comparison.communicate(timeout=60)
    assert comparison.returncode == 130, errors
    assert "Give the same command again to go on" in told
    assert errors == ""


class Worker:
    """Stands in for a process and remembers what it is told."""

    def __init__(self):
        self.told = []

    def terminate(self):
        self.told.append("terminate")

    def kill(self):
        self.told.append("kill")


def test_workers_are_asked_to_stop_once_and_killed_by_a_second_signal():
    """A worker that is asked twice gives its step up and writes no checkpoint."""
    worker = Worker()
    stop = _Stop([worker])
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGINT, None)
    stop.ask()
    assert worker.told == ["terminate"]
    stop(signal.SIGINT, None)
    assert worker.told == ["terminate", "kill"]
