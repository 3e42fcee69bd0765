"""The benchmark's protocol, records and analysis, and the command that runs it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from proxprop.lab.cli import main
from proxprop.lab.peers import analysis, figures, go, protocol, timing
from proxprop.lab.peers.analysis import cells
from proxprop.lab.peers.memory import peak
from proxprop.lab.peers.methods import METHODS, hidden_and_rest
from proxprop.lab.peers.muon import Muon
from proxprop.lab.peers.protocol import Job
from proxprop.lab.peers.record import Run, command
from proxprop.lab.peers.run import DIVERGED, FAILED, run
from proxprop.lab.peers.spaces import SPACES, setting
from proxprop.lab.peers.store import TIMES, Store
from proxprop.lab.peers.tasks import TASKS, digits
from proxprop.lab.refusal import Refused

CPU = torch.device("cpu")


def made(method="adamw", trial=0, seed=0, score=1.0, task="digits", scores=(4.0, 2.0, 1.0), **changes):
    """A record made by hand."""
    status = "finished" if math.isfinite(score) else "diverged"
    known = Run(
        task, method, trial, seed, setting(method, trial), status, score, 0.5, math.nan, math.nan,
        20, 10, scores, "", command(task, method, trial, seed), "abc", "2.13", "a CPU", 1, "now",
    )  # fmt: skip
    return replace(known, **changes)


def searched(method, scores, seeds, task="digits"):
    """A whole protocol: one score for each trial, one for each fresh seed of the best."""
    runs = [made(method, trial, 0, score, task) for trial, score in enumerate(scores)]
    best = min(range(len(scores)), key=lambda trial: scores[trial])
    return runs + [made(method, best, seed, score, task) for seed, score in enumerate(seeds, start=1)]


EIGHT = [3.0, 2.0, math.inf, 1.0, 4.0, 5.0, 6.0, 7.0]


class TestMuon:
    def test_it_is_torchs_for_matrices(self):
        torch.manual_seed(0)
        shapes = [(6, 4), (4, 6), (6, 4)]
        ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        theirs = [nn.Parameter(p.detach().clone()) for p in ours]
        both = (
            Muon(ours, 0.01, weight_decay=0.3),
            torch.optim.Muon(theirs, 0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"),
        )
        for _ in range(3):
            for a, b in zip(ours, theirs, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            for optimizer in both:
                optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)

    def test_a_filter_is_the_matrix_of_its_outputs(self):
        torch.manual_seed(0)
        filters = nn.Parameter(torch.randn(5, 2, 3, 3))
        matrix = nn.Parameter(filters.detach().flatten(1).clone())
        filters.grad = torch.randn_like(filters)
        matrix.grad = filters.grad.flatten(1).clone()
        for parameter in (filters, matrix):
            Muon([parameter], 0.1).step()
        assert torch.equal(filters.flatten(1), matrix)

    def test_it_gets_the_hidden_weights_only(self):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        hidden, rest = hidden_and_rest(model)
        assert [id(p) for p in hidden] == [id(model[1].weight)]
        assert len(rest) == 6


class TestSpaces:
    def test_every_method_has_one(self):
        assert set(SPACES) == set(METHODS)

    @pytest.mark.parametrize("method", METHODS)
    def test_eight_trials_lie_in_eight_parts_of_the_range(self, method):
        low, high = map(math.log, SPACES[method].lr)
        places = [(math.log(setting(method, k).lr) - low) / (high - low) for k in range(8)]
        assert sorted(int(8 * place) for place in places) == list(range(8))

    def test_what_a_method_does_not_have_is_not_searched(self):
        assert setting("adamw", 0).damping is None
        assert setting("running+adamw", 0).tau_theta is None
        assert setting("exact+sgd", 5).tau_theta is not None


class TestProtocol:
    def test_seeds_come_once_all_trials_are_there(self):
        runs = searched("adamw", EIGHT[:7], [])
        assert list(protocol.jobs(runs, "digits", "adamw", 8, 5)) == [Job("digits", "adamw", 7, 0)]
        runs = searched("adamw", EIGHT, [])
        expected = [Job("digits", "adamw", 3, seed) for seed in range(1, 6)]
        assert list(protocol.jobs(runs, "digits", "adamw", 8, 5)) == expected

    def test_more_trials_go_on_where_fewer_ended(self):
        runs = searched("adamw", EIGHT, [1.0] * 5)
        assert not list(protocol.jobs(runs, "digits", "adamw", 8, 5))
        assert [job.trial for job in protocol.jobs(runs, "digits", "adamw", 10, 5)] == [8, 9]

    def test_a_method_that_always_fails_has_no_choice_and_no_seeds(self):
        runs = searched("sgd", [math.inf] * 8, [])
        assert protocol.choice(runs, "digits", "sgd") is None
        assert not list(protocol.jobs(runs, "digits", "sgd", 8, 5))
        assert protocol.complete(runs, "digits", "sgd")

    def test_a_target_is_the_median_of_the_references_seeds(self):
        runs = searched("adamw", EIGHT, [1.0, 2.0, 1.5004, 9.0, math.inf])
        assert protocol.target(runs, "digits") == 2.0
        assert protocol.target(runs[:-1], "digits") is None

    def test_what_is_left_is_counted(self):
        pairs = [("digits", "adamw"), ("digits", "sgd")]
        assert protocol.total([], pairs, 8, 5) == 26
        assert protocol.total(searched("adamw", EIGHT, [1.0] * 2), pairs, 8, 5) == 3 + 13
        assert protocol.total(searched("sgd", [math.inf] * 8, []), pairs, 8, 5) == 13


class TestStore:
    def test_a_run_comes_back_as_it_was(self, tmp_path):
        store, kept = Store(tmp_path), made("running+muon", 2, score=math.inf, note='a "note", cut\nshort')
        store.add(kept)
        (found,) = store.runs("digits")
        assert repr(found) == repr(kept)

    def test_a_recorded_run_is_never_replaced(self, tmp_path):
        store = Store(tmp_path)
        for score in (1.0, 2.0):
            store.add(made(score=score))
        assert [run.score for run in store.runs("digits")] == [1.0]

    def test_a_target_is_fixed_once(self, tmp_path):
        store = Store(tmp_path)
        for value in (1.0, 2.0):
            store.fix_target("digits", value, "a rule", "abc")
        assert store.targets() == {"digits": 1.0}

    def test_a_damaged_row_is_refused_and_kept(self, tmp_path):
        store = Store(tmp_path)
        store.add(made())
        path = tmp_path / "digits.csv"
        damaged = path.read_text().replace("finished", "fin")
        path.write_text(damaged)
        with pytest.raises(Refused, match=r"digits.csv row 1: status should be .* but is 'fin'"):
            store.add(made(seed=1))
        assert path.read_text() == damaged

    def test_a_cut_row_is_refused(self, tmp_path):
        store = Store(tmp_path)
        store.add(made())
        path = tmp_path / "digits.csv"
        whole = path.read_text()
        for cut in (whole[:-60], whole[: whole.rindex(",")], whole.rstrip() + ",more"):
            path.write_text(cut)
            with pytest.raises(Refused, match=r"digits.csv row 1 should have as many cells"):
                store.runs("digits")
        path.write_text(whole.replace("finished", "unheard of"))
        with pytest.raises(Refused, match=r"digits.csv row 1: status should be"):
            store.runs("digits")

    @pytest.mark.parametrize(
        "content", [b"task,target\n\xff,1\n", b'task\n"\n', b"task,target\ndigits,soon\n", b"a\n1\n"]
    )
    def test_damaged_targets_and_times_are_refused_and_kept(self, tmp_path, content):
        store = Store(tmp_path)
        for name, act in (
            ("targets", store.targets),
            ("times", lambda: store.add_times([dict.fromkeys(TIMES, "1")])),
        ):
            if name == "times" and b"soon" in content:
                continue  # times are not numbers to the store
            path = tmp_path / f"{name}.csv"
            path.write_bytes(content)
            with pytest.raises(
                Refused, match=rf"{name}\.csv is not a (table of {name}|readable \.csv in UTF-8)"
            ):
                act()
            assert path.read_bytes() == content

    def test_two_processes_do_not_write_at_once(self, tmp_path):
        with (
            Store(tmp_path).locked(),
            pytest.raises(Refused, match="another process"),
            Store(tmp_path).locked(),
        ):
            pass


class TestOutcomes:
    TASK = digits.make("digits", (64, 8, 10), batch=5, steps=4)

    def test_divergence_is_an_outcome(self):
        outcome = run(self.TASK, METHODS["sgd"], replace(setting("sgd", 0), lr=1e30), 0, CPU)
        assert outcome.status == DIVERGED

    def test_an_error_of_a_method_is_one_too(self):
        def broken(model, setting, task):
            raise RuntimeError("no such thing\nat all")

        outcome = run(self.TASK, replace(METHODS["sgd"], optimizers=broken), setting("sgd", 0), 0, CPU)
        assert (outcome.status, outcome.note) == (FAILED, "RuntimeError: no such thing")


class TestAnalysis:
    def test_steps_to_a_target_count_from_the_first_measurement_below_it(self):
        assert [made().steps_to(target) for target in (5.0, 2.0, 1.5, 0.5)] == [0, 10, 20, math.inf]

    def test_a_failure_takes_forever(self):
        assert made(status="failed").steps_to(5.0) == math.inf

    def test_seconds_are_steps_times_the_time_of_a_step_in_the_fastest_way(self):
        runs = searched("adamw", EIGHT, [1.0] * 5)
        times = [
            {"task": "digits", "method": "adamw", "way": way, "ms": ms, "megabytes": "3"}
            for way, ms in (("eager", "4"), ("compile", "2"))
        ]
        cell = cells(runs, {"digits": 2.0}, times)["digits", "adamw"]
        assert (cell.seconds.middle, cell.way, cell.failures) == (0.02, "compile", 1)

    def test_what_is_not_complete_is_left_out(self):
        assert not cells(searched("adamw", EIGHT, [1.0] * 4), {"digits": 2.0})
        assert not cells(searched("adamw", EIGHT, [1.0] * 5), {})

    def test_the_interval_of_a_median_lies_within_its_values(self):
        found = analysis.spread([1.0, 2.0, 3.0, 4.0, math.inf])
        assert (found.middle, found.low, found.high) == (3.0, 1.0, math.inf)

    def test_a_profile_counts_tasks_within_a_factor_of_the_best(self):
        costs = {"a": {"x": 1.0, "y": 3.0}, "b": {"x": math.inf, "y": 2.0}}
        assert analysis.profile(costs, [1.0, 3.0]) == {"x": [0.5, 0.5], "y": [0.5, 1.0]}

    def test_one_setting_has_to_serve_every_task(self):
        first = searched("adamw", [1.0, 2.0, *[9.0] * 6], [1.0] * 5)
        second = searched("adamw", [math.inf, 2.0, *[9.0] * 6], [2.0] * 5, task="image")
        found = cells(first + second, {"digits": 1.0, "image": 1.0})
        trial, one, each = analysis.one_setting(found.values())
        assert (trial, one, each) == (1, pytest.approx(2.0), pytest.approx(math.sqrt(2)))

    def test_only_what_was_run_everywhere_is_compared_over_all_tasks(self):
        whole = [
            run for name in ("adamw", "sgd", "cg3+sgd", "muon") for run in searched(name, EIGHT, [1.0] * 5)
        ]
        most = [replace(run, task="image") for run in whole if run.method != "muon"]
        few = [replace(run, task="gpt") for run in whole if run.method in ("adamw", "sgd")]
        found = cells(whole + most + few, dict.fromkeys(("digits", "image", "gpt"), 1.0))
        assert analysis.tasks_of(found) == ["digits", "image"]
        assert analysis.across(found) == (["digits", "image"], ["adamw", "sgd", "cg3+sgd"])
        two = [run for run in most if run.method != "adamw"]
        found = cells(whole + two, dict.fromkeys(("digits", "image"), 1.0))
        assert analysis.across(found) == (["digits"], ["adamw", "sgd", "muon", "cg3+sgd"])

    def test_the_width_is_the_part_of_the_trials_close_to_the_best(self):
        runs = searched("adamw", [1.0, 1.04, *[9.0] * 6], [1.0] * 5)
        cell = cells(runs, {"digits": 1.0})["digits", "adamw"]
        low, high = SPACES["adamw"].lr
        assert analysis.width(cell) == pytest.approx(2 / 8 * math.log10(high / low))

    def test_memory_counts_what_is_held_at_once(self):
        def work():
            held = torch.zeros(1000)
            for _ in range(3):
                held = held + torch.ones(1000)

        assert peak(work, CPU) == (None, 12_000)


@pytest.fixture
def tiny(monkeypatch):
    """Every way to the tasks finds one that trains in a moment."""
    task = digits.make("digits", (64, 8, 10), batch=5, steps=4)
    monkeypatch.setitem(TASKS, "digits", task)
    for name in ("TRIALS", "SEEDS"):
        monkeypatch.setattr(protocol, name, 2)
    return task


COMMON = ["bench", "--task", "digits", "--trials", "2", "--seeds", "2", "--device", "cpu", "--out"]


class TestCommand:
    def test_it_runs_what_is_missing_and_nothing_twice(self, tiny, tmp_path, capsys):
        arguments = [*COMMON, str(tmp_path), "--method", "running+sgd", "--method", "adamw"]
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        told = capsys.readouterr().out.splitlines()
        assert len(told) == 8
        assert all("adamw" in line for line in told[:4]), "the reference comes first"
        assert told[-1].endswith("0 left, about 0 min")
        assert list(Store(tmp_path).targets()) == ["digits"]
        before = (tmp_path / "digits.csv").read_bytes()
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert capsys.readouterr().out == ""
        assert (tmp_path / "digits.csv").read_bytes() == before

    def test_it_goes_on_after_a_kill(self, tiny, tmp_path, monkeypatch):
        store, once = Store(tmp_path), go.once

        def killed(job, *rest):
            if job.trial == 1:
                raise KeyboardInterrupt
            return once(job, *rest)

        monkeypatch.setattr(go, "once", killed)
        with pytest.raises(KeyboardInterrupt):
            go.go(store, ["digits"], ["adamw"], 2, 2, CPU, lambda text, part: None)
        assert len(store.runs("digits")) == 1
        monkeypatch.setattr(go, "once", once)
        go.go(store, ["digits"], ["adamw"], 2, 2, CPU, lambda text, part: None)
        assert len({run.key for run in store.runs("digits")}) == len(store.runs("digits")) == 4

    def test_a_row_is_run_again_by_its_command(self, tiny, tmp_path, capsys):
        go.go(Store(tmp_path), ["digits"], ["adamw"], 2, 2, CPU, lambda text, part: None)
        last = Store(tmp_path).runs("digits")[-1]
        with pytest.raises(SystemExit, match="0"):
            main([*last.command.split()[1:], "--device", "cpu", "--out", str(tmp_path)])
        now, recorded = capsys.readouterr().out.splitlines()
        assert now.removeprefix("now:      ") == recorded.removeprefix("recorded: ").partition(" (")[0]

    def test_targets_come_first(self, tiny, tmp_path):
        with pytest.raises(Refused, match=r"digits has no target yet: run .* --method adamw"):
            go.go(Store(tmp_path), ["digits"], ["sgd"], 2, 2, CPU, lambda text, part: None)

    def test_missing_data_is_no_failure_of_a_method(self, here):
        with pytest.raises(Refused, match="cifar10"):
            go.once(Job("cifar10-mlp", "adamw", 0, 0), CPU)

    def test_a_way_that_there_is_not_is_refused(self, tmp_path, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "time", *COMMON[1:], str(tmp_path), "--way", "graphs"])
        assert "did you mean 'graph'?" in capsys.readouterr().err

    def test_one_row_takes_one_task_and_one_method(self, tmp_path, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([*COMMON, str(tmp_path), "--seed", "1"])
        assert "name one --task and one --method" in capsys.readouterr().err

    def test_an_unknown_method_is_refused(self, tmp_path, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([*COMMON, str(tmp_path), "--method", "moun"])
        assert "did you mean 'muon'?" in capsys.readouterr().err

    @pytest.mark.parametrize("what", ["time", "write"])
    def test_nothing_is_timed_or_drawn_from_nothing(self, tmp_path, capsys, what):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", what, "--task", "digits", "--out", str(tmp_path)])
        assert f"there is nothing to {'time' if what == 'time' else 'draw'}" in capsys.readouterr().err

    def test_times_are_not_added_beside_another_process(self, tiny, tmp_path):
        store = Store(tmp_path)
        store.add(made())
        store.add(made(trial=1))
        with Store(tmp_path).locked(), pytest.raises(Refused, match="another process"):
            timing.time_all(store, ["digits"], ["adamw"], CPU, ["eager"], lambda text: None)

    @pytest.mark.parametrize("option", ["--trial", "--seed", "--trials", "--seeds"])
    def test_numbers_beyond_any_patience_are_refused(self, tmp_path, capsys, option):
        with pytest.raises(SystemExit, match="2"):
            main([*COMMON, str(tmp_path), "--method", "adamw", option, str(10**30)])
        assert option in capsys.readouterr().err

    def test_steps_are_timed_and_figures_drawn(self, tiny, tmp_path, monkeypatch):
        store = Store(tmp_path)
        methods = ["adamw", "sgd", "running+adamw"]
        go.go(store, ["digits"], methods, 2, 2, CPU, lambda text, part: None)
        monkeypatch.setattr(timing, "ROUNDS", 2)
        for what in ("time", "write"):
            with pytest.raises(SystemExit, match="0"):
                main(["bench", what, *COMMON[1:], str(tmp_path)])
        times = {row["method"]: row for row in store.times()}
        assert list(times) == methods
        assert all(float(row["ms"]) > 0 for row in times.values())
        assert float(times["running+adamw"]["megabytes"]) > float(times["adamw"]["megabytes"])
        assert (tmp_path / "digits.png").stat().st_size > 10_000
        assert (tmp_path / "all.png").stat().st_size > 10_000


def test_methods_that_were_not_timed_are_drawn_without_times():
    runs = [run for name in ("adamw", "soap", "cg3+soap") for run in searched(name, EIGHT, [1.0] * 5)]
    times = [
        {"task": "digits", "method": m, "way": "eager", "ms": "1", "megabytes": "1"}
        for m in ("adamw", "soap")
    ]
    found = cells(runs, {"digits": 2.0}, times)
    overview, costs = figures.overview(found), figures.costs(found)
    panels = [ax for ax in overview.get_axes() if ax.get_title(loc="left") == "SOAP"]
    assert [[text.get_text() for text in ax.texts] for ax in panels] == [[], ["1 not timed yet"]]
    assert [len([line for line in ax.lines if line.get_label() == "SOAP"]) for ax in panels] == [1, 1]
    assert [text.get_text() for ax in costs.axes for text in ax.texts] == ["not timed yet"] * 2


def test_a_way_that_does_not_run_a_method_is_told(monkeypatch):
    def broken(model, setting, task):
        raise RuntimeError("it can't\nbe")

    monkeypatch.setitem(METHODS, "soap", replace(METHODS["soap"], optimizers=broken))
    task = digits.make("digits", (64, 8, 10), batch=5, steps=4)
    rows, failed = timing.time_task(task, {"soap": 0, "sgd": 0}, CPU, ["eager", "graph"], rounds=2)
    assert [(row["method"], row["way"]) for row in rows] == [("sgd", "eager")]
    assert failed == ["eager does not run soap: it can't"]
