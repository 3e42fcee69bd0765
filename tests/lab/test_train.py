"""The training loop: what it promises about its result, whatever happens to the process."""

import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from proxprop.lab import interruption
from proxprop.lab import step as stepping
from proxprop.lab import watch as watching
from proxprop.lab.config import Config
from proxprop.lab.data import load
from proxprop.lab.records import checkpoint
from proxprop.lab.refusal import Interrupted, Refused
from proxprop.lab.train import train


def outcome(folder):
    """What must be the same: the bytes of weights and metrics."""
    return [(folder / name).read_bytes() for name in ("weights.safetensors", "metrics.jsonl")]


@pytest.mark.parametrize("solver", ["backprop", "cg:2", "exact", "running:3", "published:2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "muon"])
def test_every_method_learns(tmp_path, small, solver, optimizer):
    record = train(replace(small, solver=solver, optimizer=optimizer, lr=0.03, epochs=12), tmp_path / "run")
    assert record.status == "finished"
    assert record.last["loss"] < record.epochs[0]["loss"] / 2
    assert record.last["test_accuracy"] >= 0.8


def test_the_same_config_gives_the_same_bytes(tmp_path, small):
    config = replace(small, solver="cg:2", optimizer="adam")
    one, other = train(config, tmp_path / "a").folder, train(config, tmp_path / "b").folder
    assert outcome(one) == outcome(other)
    assert outcome(train(replace(config, seed=1), tmp_path / "c").folder) != outcome(one)


def test_looking_does_not_change_the_result(tmp_path, small):
    config = replace(small, solver="exact", data="digits", model="convnet", epochs=1, batch_size=400)
    looked = train(replace(config, checkpoint_seconds=0.0), tmp_path / "a")
    blind = train(replace(config, observe=False), tmp_path / "b")
    assert outcome(looked.folder)[0] == outcome(blind.folder)[0]
    assert "cosine" not in blind.last


def test_the_random_numbers_of_the_caller_are_left_alone(tmp_path, small):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(small, tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_cover_every_sample_once_an_epoch(tmp_path, small, monkeypatch):
    seen = []
    take = stepping.take
    monkeypatch.setattr(
        stepping,
        "take",
        lambda m, o, inputs, labels, p: (seen.append(inputs), take(m, o, inputs, labels, p))[1],
    )
    train(replace(small, epochs=2, batch_size=7), tmp_path / "run")
    whole = load(small.data).train.inputs
    for epoch in (seen[:7], seen[7:]):
        assert sorted(torch.cat(epoch).tolist()) == sorted(whole.tolist())
    assert not torch.equal(torch.cat(seen[:7]), torch.cat(seen[7:]))


@pytest.mark.parametrize("solver", ["backprop", "cg:3", "exact"])
def test_divergence_is_recorded(tmp_path, small, solver):
    record = train(replace(small, solver=solver, lr=1e20, epochs=5), tmp_path / "run")
    assert record.status == "diverged"
    assert record.last["loss"] is None
    assert record.last["epoch"] < 5
    again = train(record.config, record.folder, resume=True)
    assert again.status == "diverged"


def test_measuring_less_often_changes_nothing_but_the_rows(tmp_path, small):
    often = train(replace(small, epochs=5), tmp_path / "a")
    seldom = train(replace(small, epochs=5, measure_every=2), tmp_path / "b")
    assert [row["epoch"] for row in seldom.epochs] == [0, 2, 4, 5]
    assert seldom.notes == []
    assert outcome(seldom.folder)[0] == outcome(often.folder)[0]
    for row in seldom.epochs:
        assert row["loss"] == often.epochs[row["epoch"]]["loss"]
    steps = [row["batch_loss"] for row in often.epochs[3:5]]
    assert seldom.epochs[2]["batch_loss"] == pytest.approx(sum(steps) / 2)


def test_divergence_is_noticed_between_measurements(tmp_path, small):
    record = train(replace(small, lr=1e20, epochs=50, measure_every=50), tmp_path / "run")
    assert record.status == "diverged"
    assert record.last["epoch"] < 5


def test_a_finished_run_is_not_run_again(tmp_path, small):
    folder = train(small, tmp_path / "run").folder
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"}
    train(small, folder, resume=True)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "lock"} == before
    assert checkpoint.paths(folder) == []


def test_weights_are_those_of_the_plain_model(tmp_path, small):
    folder = train(replace(small, solver="exact"), tmp_path / "run").folder
    assert {name: tuple(t.shape) for name, t in load_file(folder / "weights.safetensors").items()} == {
        "1.weight": (8, 6), "1.bias": (8,), "3.weight": (5, 8), "3.bias": (5,), "5.weight": (3, 5), "5.bias": (3,),
    }  # fmt: skip
    assert not (
        train(replace(small, save_weights=False), tmp_path / "b").folder / "weights.safetensors"
    ).exists()


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, small):
    for wrong in ({"data": "nowhere.npz"}, {"solver": "cg:x"}, {"device": "cuda:77"}, {"device": "tpu"}):
        with pytest.raises(Refused):
            train(replace(small, **wrong), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("model", "batch_size"), [("mlp-bn", 1), ("mlp-bn", 7), ("resnet18", 7)])
def test_a_last_batch_that_cannot_be_normalised_is_refused_before_the_first(tmp_path, model, batch_size):
    """Of 15 samples of 8×8 pixels, batches of 7 leave one of a single sample."""
    data = tmp_path / "own.npz"
    np.savez(data, inputs=np.ones((18, 1, 8, 8), np.float32), labels=np.arange(18) % 2)
    config = Config(data=str(data), model=model, hidden=(4,), batch_size=batch_size, validation=0, epochs=1)
    with pytest.raises(
        Refused, match=rf"batches of {batch_size} leave a last one of 1; choose another --batch"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("done", [True, False])
def test_a_run_is_not_taken_for_one_on_data_that_has_changed(tmp_path, small, done):
    """A path names no data: what was written there since is another task."""
    data, folder = tmp_path / "own.npz", tmp_path / "run"
    data.write_bytes(Path(small.data).read_bytes())
    config = replace(small, data=str(data), checkpoint_seconds=0.0)
    if done:
        train(config, folder)
    else:
        with pytest.raises(Interrupted):
            train(config, folder, watch=stop_after(4))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    with np.load(data) as arrays:
        np.savez(data, **{name: array[::-1] for name, array in arrays.items()})
    with pytest.raises(
        Refused, match=r"run holds a run on other contents of .*own\.npz: its SHA-256 was .*--out"
    ):
        train(config, folder, resume=True)
    assert {path: path.read_bytes() for path in before} == before
    data.write_bytes(Path(small.data).read_bytes())
    assert train(config, folder, resume=True).status == "finished"
    data.unlink()
    assert train(config, folder, resume=True).status == "finished"  # there is nothing to compare


def stop_after(steps):
    class Stop(watching.Quiet):
        def step(self, done, loss):
            if done == steps:
                os.kill(os.getpid(), signal.SIGINT)

    return Stop()


@pytest.mark.parametrize("solver", ["cg:2", "running:3"])
@pytest.mark.parametrize("steps", [1, 4, 5, 14])
def test_ctrl_c_stops_after_the_step_and_resumes(tmp_path, small, steps, solver):
    config = replace(small, solver=solver, log_steps=1)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"stopped after step {steps} in"):
        train(config, tmp_path / "run", watch=stop_after(steps))
    assert signal.getsignal(signal.SIGINT) is handler
    train(config, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(train(config, tmp_path / "whole").folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_the_last_step_is_heard_too(tmp_path, small, number):
    """Else the next run of a list would begin."""

    class Late(watching.Quiet):
        def epoch(self, row):
            if row["epoch"] == small.epochs:
                os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped after step 15 in"):
        train(small, tmp_path / "run", watch=Late())
    assert train(small, tmp_path / "run", resume=True).status == "finished"
    assert outcome(tmp_path / "run") == outcome(train(small, tmp_path / "whole").folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_step_that_does_not_end_by_itself(tmp_path, small, monkeypatch, number):
    class Endless(watching.Quiet):
        def step(self, done, loss):
            if done == 7:
                os.kill(os.getpid(), number)
                while True:
                    time.sleep(0.01)

    monkeypatch.setattr(interruption, "GRACE", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt):
        train(replace(small, checkpoint_seconds=0.0), tmp_path / "run", watch=Endless())
    assert signal.getsignal(signal.SIGALRM) is before
    train(small, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(train(small, tmp_path / "whole").folder)


class Notes(watching.Quiet):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def interrupted(config, folder, steps=8):
    """A run that stopped in its second epoch, with two checkpoints."""
    with pytest.raises(Interrupted):
        train(replace(config, checkpoint_seconds=0.0), folder, watch=stop_after(steps))
    assert len(checkpoint.paths(folder)) == 2


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_are_passed_over_and_said(tmp_path, small, damaged):
    interrupted(small, tmp_path / "run")
    for path in checkpoint.paths(tmp_path / "run")[-damaged:]:
        path.write_bytes(path.read_bytes()[:-1])
    notes = Notes()
    record = train(small, tmp_path / "run", resume=True, watch=notes)
    assert sum("is damaged" in text for text in notes.texts) == damaged
    assert any("starting from the beginning" in text for text in notes.texts) == (damaged == 2)
    assert set(notes.texts) <= set(record.notes)
    assert outcome(tmp_path / "run") == outcome(train(small, tmp_path / "whole").folder)


@pytest.mark.parametrize(
    ("other", "why"),
    [({"seed": 1}, "it is of blobs-mlp-sgd-backprop-lr0.05-seed1-"), ({"hidden": (4,)}, "it is of ")],
)
def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path, small, other, why):
    interrupted(small, tmp_path / "run")
    interrupted(replace(small, **other), tmp_path / "other")
    (own, stray), foreign = checkpoint.paths(tmp_path / "run"), checkpoint.paths(tmp_path / "other")[-1]
    whole = stray.read_bytes()
    stray.write_bytes(foreign.read_bytes())
    with pytest.raises(Refused, match=f"is not one of this run and version .{why}"):
        train(small, tmp_path / "run", resume=True)
    assert own.exists()
    assert stray.read_bytes() == foreign.read_bytes() != whole
    stray.unlink()
    train(small, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(train(small, tmp_path / "whole").folder)


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path, small):
    interrupted(small, tmp_path / "run")
    found = checkpoint.read(checkpoint.paths(tmp_path / "run")[-1])
    del found.tensors["model/1.weight"]
    checkpoint.write(tmp_path / "run", 99, found)
    with pytest.raises(
        Refused, match=r"is not one of this run and version \(Error\(s\) in loading state_dict"
    ):
        train(small, tmp_path / "run", resume=True)


def test_damaged_metrics_are_restored_and_said(tmp_path, small):
    interrupted(small, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    notes = Notes()
    train(small, tmp_path / "run", resume=True, watch=notes)
    assert any("metrics.jsonl line 2 is damaged" in text for text in notes.texts)
    assert outcome(tmp_path / "run") == outcome(train(small, tmp_path / "whole").folder)


def test_batch_normalisation_resumes_too(tmp_path):
    images = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "images.npz", inputs=images.numpy(), labels=np.arange(30) % 2)
    config = Config(data=str(tmp_path / "images.npz"), model="resnet18", batch_size=12, epochs=1, threads=1)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", watch=stop_after(1))
    train(config, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(train(config, tmp_path / "whole").folder)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions_learn_and_leave_settings_alone(tmp_path, small, precision):
    before = torch.get_float32_matmul_precision()
    record = train(replace(small, precision=precision, solver="cg:2", lr=0.3, epochs=8), tmp_path / "run")
    assert record.last["loss"] < record.epochs[0]["loss"]
    assert torch.get_float32_matmul_precision() == before


def test_tensorboard_gets_the_epochs_or_says_how_to_install(tmp_path, small, monkeypatch):
    written = []
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = type("SummaryWriter", (), {
        "__init__": lambda self, folder: written.append(folder),
        "add_scalar": lambda self, key, value, epoch: written.append((key, epoch)),
        "close": lambda self: written.append("closed"),
    })  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    train(replace(small, tensorboard=True, epochs=1), tmp_path / "run")
    assert written[0] == str(tmp_path / "run" / "tensorboard")
    assert ("loss", 1) in written
    assert written[-1] == "closed"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Refused, match=r"pip install '\.\[tensorboard\]' in a checkout of proxprop"):
        train(replace(small, tensorboard=True), tmp_path / "other")


def test_the_bar_shows_epoch_step_loss_accuracy_and_pace(tmp_path, small, monkeypatch, capsys):
    bar = watching.Bar()
    bar.SECONDS = 0.0
    shown = []
    update = bar._progress.update
    monkeypatch.setattr(
        bar._progress, "update", lambda task, **fields: (shown.append(fields), update(task, **fields))
    )
    train(replace(small, epochs=2), tmp_path / "run", watch=bar)
    steps = [fields for fields in shown if "loss" in fields]
    assert [fields["completed"] for fields in steps] == list(range(1, 11))
    assert [fields["epoch"] for fields in steps] == [1] * 5 + [2] * 5
    assert all(float(fields["loss"]) > 0 and float(fields["pace"]) >= 0 for fields in steps)
    assert shown[-1]["accuracy"].endswith("%")


def test_nothing_is_drawn_without_a_terminal():
    assert type(watching.default()) is watching.Quiet


KILLED = """
import sys
from proxprop.lab import Config, train
train(Config(**eval(sys.argv[1])), sys.argv[2], resume=True)
"""


def newest(folder):
    return max((path.name for path in checkpoint.paths(folder)), default=None)


@pytest.mark.parametrize(
    ("solver", "optimizer", "kills"),
    [
        ("cg:2", "adam", 2),
        pytest.param("cg:2", "adam", 4, marks=pytest.mark.slow),
        pytest.param("exact", "sgd", 4, marks=pytest.mark.slow),
    ],
)
def test_kill_nine_at_any_moment_changes_nothing(tmp_path, small, solver, optimizer, kills):
    """Really killed, again and again, at random moments of starting, stepping, measuring and writing."""
    import random

    config = replace(small, solver=solver, optimizer=optimizer, lr=0.05, epochs=20, log_steps=3)
    config = replace(config, checkpoint_seconds=0.0)
    began = time.perf_counter()
    whole = train(config, tmp_path / "whole").folder
    duration = time.perf_counter() - began
    moments = random.Random(kills)
    folder, killed = tmp_path / "run", 0
    for attempt in range(kills + 1):
        arguments = [sys.executable, "-c", KILLED, repr(vars(config)), str(folder)]
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
        before = newest(folder)
        # Importing torch takes longer than the run: wait for the first file, or later for the next checkpoint.
        while process.poll() is None and (
            newest(folder) == before if attempt else not (folder / "lock").exists()
        ):
            time.sleep(0.002)
        if attempt < kills:
            time.sleep(moments.uniform(0, duration / 6))
            process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert killed >= kills / 2
    assert outcome(folder) == outcome(whole)


BARE = """
import sys
for name in ("rich", "typer", "matplotlib", "sklearn", "scipy", "PIL"):
    sys.modules[name] = None
from proxprop.lab import Config, train
print(train(Config(**eval(sys.argv[1])), sys.argv[2]).status)
"""


def test_training_needs_torch_numpy_and_safetensors_only(tmp_path, small):
    config = replace(small, solver="cg:2")
    done = subprocess.run(
        [sys.executable, "-c", BARE, repr(vars(config)), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "finished\n", done.stderr
