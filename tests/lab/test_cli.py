"""The command line: help, exit codes, no traceback for a mistake, and the whole way from a run to a report."""

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import proxprop_cli
from proxprop.lab import records
from proxprop.lab.cli import commands, main
from proxprop.lab.commands import compare
from proxprop.lab.commands.train import _tell
from proxprop.lab.refusal import install
from proxprop.lab.reproduction.files import read_csv


def run(*arguments):
    """Run a command in this process; returns its exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return left.value.code or 0


SMALL = ("--hidden", "8,5", "--batch-size", "10", "--epochs", "2")


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in commands())
    assert "proxprop train --data cifar10 --download" in text


@pytest.mark.parametrize("name", ["compare", "train", "reproduce", "report", "spectrum", "doctor"])
def test_every_command_has_help_with_examples(name, capsys):
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"\n      proxprop {name}" in text


def test_train_offers_every_setting(capsys):
    run("train", "--help")
    text = capsys.readouterr().out
    for name in ["data", "data-dir", "model", "hidden", "optimizer", "lr", "solver", "tau-theta", "batch-size", "epochs", "seed", "device", "precision", "out", "resume"]:  # fmt: skip
        assert f"--{name}" in text


MISTAKES = [
    (("train", "--solver", "cg:x"), "solver cg should be cg:K"),
    (("train", "--solver", "cg:99999999999"), "cg:K with K from 1 to 1000 iterations, like cg:3, but is"),
    (("train", "--solver", "published:" + 5000 * "9"), "published:K with K from 1 to 1000 iterations"),
    (("compare", "--solvers", "running:1000001"), "running:K with K from 1 to 1000000 steps"),
    (
        ("train", "--out", "runs/typo", "--resume"),
        "there is no run to go on with in runs/typo; leave out --resume",
    ),
    (("train", "--data", "cifar10"), "cifar10 was not found (looked in "),
    (("train", "--data", "nowhere.npz"), "there is no file nowhere.npz"),
    (("train", "--data", "my.csv"), "or a file that ends in .npz or .safetensors, but is 'my.csv'"),
    (("train", "--hidden", "99999999999999999999"), "hidden should be widths of 1 to 1000000"),
    (("train", "--seed", "99999999999999999999"), "seed should be 0 to 18446744073709551615"),
    (("train", "--threads", "99999999999999999999"), "threads should be 1 to 1024"),
    (("train", "--hidden", "4,x"), "--hidden should be widths like 4000,1000,4000"),
    (("train", "--lr", "0"), "lr should be > 0 and finite but is 0.0"),
    (("train", "--device", "cuda:9"), "device cuda:9 was asked for but torch sees"),
    (("train", "--config", "nowhere.toml"), "cannot read the settings file nowhere.toml"),
    (("compare", "--solvers", "bakprop"), "did you mean 'backprop'"),
    (("compare", "--lrs", "fast"), "--lrs should be numbers like 0.01,0.1,1"),
    (("compare", "--optimizers", "sgd,adm"), "did you mean 'adam'"),
    (("report", "nowhere"), "there is no folder nowhere"),
    (("report", ".", "--formats", "pnj"), "did you mean 'png'"),
    (("spectrum", "--data", "mnist"), "mnist was not found"),
    (("train", "--epohs", "3"), "--epochs"),
    (("train", "--epochs", "many"), "'--epochs'"),
    (("compare", "--seeds", "0"), "'--seeds'"),
    (("reproduce", "fig3"), "fig1"),
    (("reproduce",), "fig1"),
    (("repot", "runs"), "repot"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_told_in_a_line(here, capsys, arguments, message):
    assert run(*arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_toml_gives_settings_and_options_win(here, capsys, blobs):
    (here / "run.toml").write_text(
        f'data = "{blobs}"\nhidden = [8, 5]\nbatch-size = 10\nepochs = 9\nsolver = "exact"\n'
    )
    assert run("train", "--config", "run.toml", "--epochs", "1", "--out", "a") == 0
    config = records.read(here / "a").config
    assert (config.epochs, config.solver, config.hidden) == (1, "exact", (8, 5))
    (here / "run.toml").write_text("epoch = 3\n")
    assert run("train", "--config", "run.toml") == 2
    assert "run.toml: unknown key 'epoch'; did you mean 'epochs'?" in capsys.readouterr().err


def test_a_settings_file_is_heard_on_resume_too(here, capsys, blobs):
    assert run("train", "--data", blobs, *SMALL, "--out", "a") == 0
    (here / "run.toml").write_text("epochs = 9\n")
    assert run("train", "--config", "run.toml", "--out", "a", "--resume") == 2
    assert "epochs is 2 there but 9 here" in capsys.readouterr().err
    assert run("train", "--config", "run.toml", "--epochs", "2", "--out", "a", "--resume") == 0


def test_from_a_run_to_a_report(here, capsys, blobs):
    for solver in ("backprop", "cg:2"):
        assert run("train", "--data", blobs, "--solver", solver, *SMALL) == 0
    told = capsys.readouterr().out
    assert "Training loss" in told
    assert "Recorded in runs/blobs-mlp-sgd-cg2-tau1-lr0.4-seed0-" in told
    assert run("report", "runs", "--out", "out", "--formats", "png") == 0
    told = capsys.readouterr().out
    assert "Nesterov SGD · ProxProp cg2" in told
    assert f"Report: {here / 'out' / 'report.html'}" in told
    assert {path.name for path in (here / "out").iterdir()} >= {"report.html", "curves-sgd.png"}


def test_an_accuracy_of_zero_is_told_too(capsys, made):
    record = made()
    _tell(replace(record, epochs=[record.last | {"validation_accuracy": 0.0}]))
    assert "validation accuracy 0.0%" in capsys.readouterr().out
    _tell(replace(record, epochs=[record.last | {"validation_accuracy": None}]))
    assert "validation accuracy" not in capsys.readouterr().out


def test_a_second_train_into_a_folder_needs_resume(here, capsys, blobs):
    assert run("train", "--data", blobs, *SMALL, "--out", "a") == 0
    assert run("train", "--data", blobs, *SMALL, "--out", "a") == 2
    assert "a already holds a run; go on with it by --resume" in capsys.readouterr().err
    assert run("train", "--out", "a", "--resume") == 0
    assert run("train", "--out", "a", "--resume", "--lr", "7") == 2
    assert "lr is 0.05 there but 7.0 here" in capsys.readouterr().err


def test_a_mistyped_run_is_not_resumed_by_training_another(here, capsys, blobs):
    assert run("train", "--data", blobs, *SMALL, "--out", "runs/first") == 0
    assert run("train", "--out", "runs/frist", "--resume") == 2
    told = capsys.readouterr().err
    assert told == "error: there is no run to go on with in runs/frist; did you mean runs/first?\n"
    assert not (here / "runs" / "frist").exists()


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        ("backprop", "solver backprop, optimizer adam, lr 0.001, tau_theta unused"),
        ("cg:2", "solver cg:2, optimizer adam, lr 0.001, tau_theta 0.5"),
    ],
)
def test_train_says_first_and_last_what_it_trains_and_where(here, capsys, blobs, solver, settings):
    given = ("--solver", solver, "--optimizer", "adam", "--tau-theta", "0.5", "--out", "a")
    assert run("train", "--data", blobs, *SMALL, *given) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"Training into a: data {blobs}, model mlp, {settings}"
    assert last == f"Recorded in a: data {blobs}, model mlp, {settings}"
    assert run("train", "--out", "a", "--resume") == 0
    assert capsys.readouterr().out.startswith(f"Already done in a: data {blobs}, model mlp, {settings}\n")


def test_divergence_has_its_exit_code(here, capsys, blobs):
    assert run("train", "--data", blobs, *SMALL, "--lr", "1e20") == 3
    assert "Diverged in epoch" in capsys.readouterr().out


def test_compare_writes_a_report_and_does_not_run_twice(here, capsys, blobs):
    arguments = ("compare", "--data", blobs, "--hidden", "8", "--batch-size", "10", "--epochs", "2", "--seeds", "1",
                 "--solvers", "backprop,cg:2", "--optimizers", "muon", "--lrs", "0.01,0.1,1", "--jobs", "1")  # fmt: skip
    assert run(*arguments) == 0
    told = capsys.readouterr().out
    assert "6 runs" in told
    assert "Muon · ProxProp cg2" in told
    page = (here / "out" / "compare" / "report.html").read_text()
    assert "How much the learning rate matters" in page
    stamps = {path: path.stat().st_mtime_ns for path in here.rglob("result.json")}
    assert len(stamps) == 6
    assert run(*arguments) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in here.rglob("result.json")}


def test_compare_has_a_report_when_the_first_seed_is_through(here, capsys, blobs, monkeypatch):
    written = []
    write = compare.write_report
    monkeypatch.setattr(
        compare,
        "write_report",
        lambda records, *a, **k: written.append(len(records)) or write(records, *a, **k),
    )
    assert run("compare", "--data", blobs, "--hidden", "8", "--batch-size", "10", "--epochs", "1", "--seeds", "2",
               "--solvers", "backprop,cg:2", "--optimizers", "sgd", "--lrs", "0.1", "--jobs", "1") == 0  # fmt: skip
    assert written == [2, 4]
    told = capsys.readouterr().out
    assert told.index("[2/4]") < told.index("First report, of one seed") < told.index("[3/4]")


QUICK = ("reproduce", "fig1", "--quick", "--device", "cpu", "--out", "results")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """One seed of Figure 1, its records in a folder of their own, and what the command said."""
    folder, told = tmp_path_factory.mktemp("once"), io.StringIO()
    places = ("--out", folder / "results", "--runs", folder / "mine")
    with contextlib.redirect_stdout(told):
        assert run("reproduce", "fig1", "--quick", "--device", "cpu", "--seeds", "1", *places) == 0
    (folder / "told").write_text(told.getvalue())
    return folder


@pytest.fixture
def reproduced(here, once):
    """A copy of `once` to work on."""
    shutil.copytree(once, here, dirs_exist_ok=True)
    return here / "results" / "quick"


def test_reproduce_quick_writes_tables_figures_and_verdicts_and_any_row_runs_again(reproduced, here):
    assert "8 runs" in (here / "told").read_text()
    assert {path.name for path in reproduced.iterdir()} >= {
        "fig1.csv", "runs.csv", "environment.json", "fig1.svg", "fig1.png", "REPRODUCTION.md",
    }  # fmt: skip
    assert "Made with `--quick`" in (reproduced / "REPRODUCTION.md").read_text()
    row = next(row for row in read_csv(reproduced / "runs.csv") if "cg:5" in row["command"])
    assert run(*shlex.split(row["command"])[1:], "--no-save-weights") == 0
    first, again = (records.read(folder / row["run"]) for folder in (here / "mine", here / "runs"))
    assert first.epochs[-1]["loss"] == again.epochs[-1]["loss"]


def test_reproduce_without_records_leaves_the_tables_alone(reproduced, capsys):
    before = contents(reproduced)
    assert run(*QUICK, "--seeds", "1", "--only-write") == 2
    told = capsys.readouterr().err
    assert told.startswith("error: there is nothing to write from: there is no folder results/quick/runs;")
    assert told.endswith("name the folder of the runs by --runs\n")
    assert contents(reproduced) == before


def test_reproduce_never_replaces_tables_by_fewer_runs(reproduced, here, capsys):
    before = contents(reproduced)
    (gone,) = (here / "mine").glob("*-exact-*")
    gone.rename(here / "elsewhere")
    assert run(*QUICK, "--seeds", "1", "--runs", "mine", "--only-write") == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "error: results/quick/runs.csv holds more runs than would be written (fig1 7 of 8, "
    )
    assert told.endswith("name the folder that holds all of them by --runs, or another folder by --out\n")
    assert run("reproduce", "beyond", "--quick", "--device", "cpu", "--out", "results") == 2
    assert "(fig1 0 of 8" in capsys.readouterr().err
    assert contents(reproduced) == before
    assert not (reproduced / "runs").exists()


def test_reproduce_can_only_write(reproduced, capsys):
    (reproduced / "fig1.csv").unlink()
    before = contents(reproduced)
    assert run(*QUICK, "--seeds", "1", "--runs", "mine", "--only-write") == 0
    after = contents(reproduced)
    assert len(read_csv(reproduced / "fig1.csv")) == 8 * 3
    assert {name: after[name] for name in before} == before


def test_a_reproduction_that_fails_to_be_written_changes_nothing(reproduced, monkeypatch, capsys):
    def fail(results):
        raise OSError(28, "No space left on device", "fig1.svg")

    (reproduced / "environment.json").write_text("as it was")
    before = contents(reproduced)
    monkeypatch.setattr("proxprop.lab.figures.reproduction.figures", fail)
    assert run(*QUICK, "--seeds", "1", "--runs", "mine", "--only-write") == 2
    assert "fig1.svg" in capsys.readouterr().err
    assert contents(reproduced) == before
    assert {path.name for path in reproduced.iterdir()} == set(before)


def test_a_measurement_leaves_the_tables_of_runs_alone(reproduced, monkeypatch, capsys):
    monkeypatch.setattr("proxprop.lab.figures.reproduction.figures", lambda results: {})
    before = contents(reproduced)
    assert run("reproduce", "spectrum", "--quick", "--device", "cpu", "--out", "results") == 0
    after = contents(reproduced)
    assert {name: after[name] for name in before if name != "REPRODUCTION.md"} == {
        name: content for name, content in before.items() if name != "REPRODUCTION.md"
    }
    assert "spectrum.csv" in after


def test_nothing_is_written_from_nothing(here, capsys):
    assert run("reproduce", "spectrum", "--only-write", "--out", "results") == 2
    assert capsys.readouterr().err == "error: there is nothing to write from: results holds no tables\n"
    assert not (here / "results").exists()


def test_spectrum_measures_and_draws(here, capsys, blobs):
    assert run("spectrum", "--data", blobs, "--out", "s.png") == 0
    told = capsys.readouterr().out
    assert "largest eigenvalue" in told
    assert (here / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_spectrum_of_data_without_a_spectrum(here, capsys, scale):
    """Nothing but zeros; and a name that matplotlib would read as a formula."""
    np.savez("$x^$.npz", inputs=np.full((12, 3), scale), labels=np.arange(12) % 2)
    assert run("spectrum", "--data", "$x^$.npz", "--out", "s.svg") == 0
    assert ("none" in capsys.readouterr().out) == (scale == 0.0)


def test_a_comparison_without_any_loss_is_drawn_without_a_warning(here, capsys):
    np.savez("one.npz", inputs=np.ones((12, 3)), labels=np.zeros(12, dtype=int))
    assert run("compare", "--data", "one.npz", *SMALL, "--seeds", "1", "--lrs", "0.1,1", "--jobs", "1") == 0
    assert capsys.readouterr().err == ""


def test_on_a_cpu_auto_is_the_cpu(here, blobs, monkeypatch):
    """As many runs at a time and as many threads each."""
    asked = []
    monkeypatch.setattr(compare, "run_and_tell", lambda *found: asked.append(found) or sys.exit(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ((), ("--device", "cpu"), ("--device", "auto")):
        assert run("compare", "--data", blobs, *SMALL, *device) == 0
    (configs, folder, workers, _), *others = asked
    assert [(found[1], found[2]) for found in others] == 2 * [(folder, workers)]
    assert [[config.threads for config in found[0]] for found in others] == 2 * [[c.threads for c in configs]]


def test_doctor_tells_what_is_missing(here, capsys):
    assert run("doctor") == 0
    told = capsys.readouterr().out
    assert "cifar10" in told
    assert "proxprop train --data cifar10 --download" in told


@pytest.fixture
def homeless(here, monkeypatch):
    """A user whom the system does not know, as in a container that is given a bare number for one."""

    def unknown(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_no_home_folder_is_no_reason_to_crash(homeless, capsys):
    assert run("doctor") == 0
    assert "data (set PROXPROP_DATA for another)" in capsys.readouterr().out
    assert run("train", "--data", "mnist") == 2
    assert "mnist was not found (looked in data)" in capsys.readouterr().err
    assert run("train", "--data", "mnist", "--download") == 2
    told = "error: there is no home folder to keep data in; name a folder with --data-dir\n"
    assert capsys.readouterr().err == told


def test_doctor_fails_without_what_is_needed(monkeypatch, capsys):
    from proxprop.lab.commands import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "safetensors" else "1.0")
    assert run("doctor") == 1
    assert "For training: pip install '.[lab]' in a checkout of proxprop" in capsys.readouterr().out


def test_without_typer_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run("--help") == 2
    needs = "the command line needs more packages: pip install '.[lab]' in a checkout of proxprop"
    assert capsys.readouterr().err == f"error: {needs}\n"


def test_with_torch_alone_it_says_what_to_install():
    code = "import sys; sys.modules['numpy'] = None; import proxprop_cli; proxprop_cli.main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.endswith(f"the command line needs more packages: {install('lab')}\n")
    assert "Traceback" not in done.stderr


def console(*arguments, **environment):
    """Run the console command in a process of its own."""
    code = "from proxprop_cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def imported(*arguments, **environment):
    """The packages that a console command has imported by its end."""
    code = (
        "import atexit, sys, proxprop_cli\n"
        "atexit.register(lambda: print(*(name for name in sys.modules if '.' not in name), file=sys.stderr))\n"
        "proxprop_cli.main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


ASCII = {"PYTHONIOENCODING": "ascii", "LANG": "C"}


def test_help_and_doctor_import_little_and_need_no_greek_letters(here):
    assert not imported("--help", **ASCII) & {"proxprop", "torch", "numpy", "matplotlib", "sklearn"}
    assert not imported("doctor", **ASCII) & {"matplotlib", "sklearn", "tensorboard"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [("--help",), ("doctor",)])
def test_a_full_disk_behind_the_output_is_told_in_a_line(arguments):
    with open("/dev/full", "w") as full:
        code = [sys.executable, "-c", "from proxprop_cli import main; main()", *arguments]
        done = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_the_quick_help_is_the_whole_help(monkeypatch, capsys):
    run("--help")
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "--help"])
    with pytest.raises(SystemExit):
        proxprop_cli.main()
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("doctor",)])
def test_a_terminal_without_greek_letters_is_no_reason_to_crash(here, monkeypatch, arguments):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run(*arguments) == 0
    terminal.flush()
    assert b"proxprop" in terminal.buffer.getvalue()


def test_ctrl_c_while_torch_is_being_imported_is_a_line(tmp_path):
    """A torch that interrupts its own import, in the place of the real one."""
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(slow)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = console("doctor", PYTHONPATH=paths)
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


def test_ctrl_c_anywhere_else_is_a_line_too(here, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "find", stop)
    assert run("report", ".") == 130
    assert capsys.readouterr().err == "Stopped.\n"


def test_a_model_too_large_for_this_machine_is_told_in_a_line(here, monkeypatch, capsys, blobs):
    """Torch's own error, for more than any machine can address; what a large machine could fill would end the test."""
    monkeypatch.setattr("proxprop.lab.models.build", lambda *_: torch.empty(2**60))
    assert run("train", "--data", blobs) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: there is not enough memory for this: ")
    assert told.count("\n") == 1


def test_any_other_error_keeps_its_traceback(monkeypatch):
    def fail() -> None:
        raise RuntimeError("our own mistake")

    monkeypatch.setattr("proxprop.lab.cli.build", fail)
    with pytest.raises(RuntimeError, match="our own mistake"):
        main(["doctor"])


def test_a_damaged_run_is_left_out_of_a_report_and_named(here, capsys, blobs):
    for name in ("a", "b"):
        assert run("train", "--data", blobs, *SMALL, "--out", f"runs/{name}") == 0
    (here / "runs" / "b" / "config.json").write_text("{")
    assert run("report", "runs", "--formats", "") == 0
    assert "left out: runs/b holds no readable run" in capsys.readouterr().out


def test_an_unwritable_place_is_told_in_a_line(here, capsys, blobs):
    (here / "file").write_text("")
    assert run("spectrum", "--data", blobs, "--out", "file/plot.png") == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert run("spectrum", "--data", blobs, "--out", "plot.pgn") == 2
    assert "did you mean '.png'" in capsys.readouterr().err
