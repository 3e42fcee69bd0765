"""What the lab's tests share: small data, small runs, records made by hand."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxprop.lab.config import Config
from proxprop.lab.records import Record
from proxprop.lab.train import train


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Train on one thread: more gain nothing on networks this small, and lose much on shared cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def blobs(tmp_path_factory):
    """A dataset of our own, not to be changed: three clouds of points, 60 samples of 6 features."""
    generator = np.random.default_rng(3)
    labels = np.arange(60) % 3
    inputs = generator.normal(size=(60, 6)).astype(np.float32) + 3 * np.eye(3, 6, dtype=np.float32)[labels]
    path = tmp_path_factory.mktemp("data") / "blobs.npz"
    np.savez(path, inputs=inputs, labels=labels)
    return path


@pytest.fixture(scope="session")
def small(blobs):
    """A run of a fraction of a second."""
    return Config(data=str(blobs), hidden=(8, 5), batch_size=10, epochs=3, threads=1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, small):
    """The folder of a finished run with cg:2, not to be changed."""
    return train(
        replace(small, solver="cg:2", log_steps=2), tmp_path_factory.mktemp("finished") / "run"
    ).folder


@pytest.fixture
def finished_copy(tmp_path, finished):
    """A copy of `finished` to work on."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, with no data to be found anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PROXPROP_DATA", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def made():
    """A function that makes a record by hand: final losses go down geometrically from 2 to `loss`."""

    def make(
        solver="backprop", lr=0.1, seed=0, loss=0.1, seconds=1.0, status="finished", epochs=4, **settings
    ):
        settings = {"optimizer": "sgd", "hidden": (8,), "batch_size": 10} | settings
        config = Config(
            data=settings.pop("data", "digits"), solver=solver, lr=lr, seed=seed, epochs=epochs, **settings
        )
        rows = []
        for epoch in range(epochs + 1):
            now = None if status == "diverged" and epoch == epochs else 2.0 * (loss / 2.0) ** (epoch / epochs)
            row = {"epoch": epoch, "step": 10 * epoch, "loss": now, "batch_loss": now}
            row |= dict.fromkeys(
                ("train_accuracy", "validation_accuracy", "test_accuracy"), 0.1 + 0.8 * epoch / epochs
            )
            row |= {
                "seconds": seconds * epoch / epochs,
                "ms_per_step": None if epoch == 0 else 100 * seconds / epochs,
            }
            rows.append(row | ({} if solver == "backprop" else {"cosine": {"1": 0.5, "3": 0.25}}))
        layer = {"name": "1", "kind": "Linear", "parameters": 520, "status": "converted", "reason": ""}
        layer |= {"space": "sample", "flops": 50.0, "backprop_flops": 100.0, "bytes": 4096}
        layers = [] if solver == "backprop" else [layer]
        return Record(
            Path(f"runs/{config.slug()}"), config, status, rows, layers=layers, starts=[{"torch": "2.13"}]
        )

    return make
