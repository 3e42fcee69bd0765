"""docs/peers.md says what the records say."""

from pathlib import Path

from proxprop.lab.peers import analysis, answer, page, protocol, questions
from proxprop.lab.peers.analysis import Cell, Spread
from proxprop.lab.peers.methods import METHODS
from proxprop.lab.peers.store import Store
from proxprop.lab.peers.tasks import TASKS

ROOT = Path(__file__).parents[2]
RECORDS = Store(ROOT / "results" / "peers")


def test_the_page_is_made_from_the_records():
    assert (ROOT / "docs" / "peers.md").read_text() == page.page(RECORDS), "run `make docs`"


def test_the_page_names_every_task():
    text = page.page(RECORDS)
    assert all(name in text for name in TASKS)


def test_every_row_of_the_records_names_its_command_commit_and_machine():
    runs = list(RECORDS.all(TASKS))
    assert runs
    for run in runs:
        assert run.command.endswith(
            f"--task {run.task} --method {run.method} --trial {run.trial} --seed {run.seed}"
        )
        assert run.commit
        assert not run.commit.endswith("+"), "records come from committed code"
        assert run.device


def test_methods_that_were_added_later_were_run_after_the_others():
    for task in (name for name in RECORDS.targets() if not TASKS[name].held_out):
        runs = RECORDS.runs(task)
        when = {
            later: [run.time for run in runs if METHODS[run.method].later == later] for later in (False, True)
        }
        assert all(time > max(when[False]) for time in when[True])


class TestAnswer:
    """Cells of one task, made by hand: a method's name and its only score."""

    @staticmethod
    def found(task: str = "digits", **scores: float) -> dict[tuple[str, str], Cell]:
        names = {"sgd_exact": "exact+sgd", "muon_running": "running+muon", "soap_cg3": "cg3+soap"}

        class Known(Cell):
            score = property(lambda self: Spread(self.target, self.target, self.target))
            searched = property(lambda self: self.target)

        named = {names.get(name, name): score for name, score in scores.items()}
        return {(task, name): Known(task, name, [], 0, [], score) for name, score in named.items()}

    def test_the_verdict_leaves_out_what_was_added_later(self) -> None:
        found = self.found(adamw=3, soap=2, sgd_exact=2.5, soap_cg3=1)
        assert answer.outcome(found, "digits") == "loses"
        assert answer.outcome(found, "digits", later=True) == "wins"
        assert "wins 0, ties 0 and loses 1 of 1 small tasks.**" in "".join(answer.answer(found))
        assert "ended lowest in 1 of 1" in answer.free(found)
        assert "SOAP" in answer.free(found)

    def test_tasks_that_were_held_out_count_apart_and_for_every_method(self) -> None:
        found = self.found(adamw=3, soap=2, sgd_exact=2.5, soap_cg3=1)
        found |= self.found("convnet-small", adamw=3, soap=2, sgd_exact=2.5, soap_cg3=1)
        first = answer.answer(found)[0]
        assert "wins 0, ties 0 and loses 1 of 1 small tasks.**" in first
        assert "added after these results were seen it wins 1, ties 0 and loses 0 of 1." in first
        assert "**In tasks that were held out it wins 1, ties 0 and loses 0 of 1.**" in first
        assert "`CG(3)` 2 better, 0 worse (1, 0). Try `CG(3)`." in answer.under(found, "soap")
        table = "".join(answer.verdicts(found))
        assert table.index("digits") < table.index(answer.HELD) < table.index("convnet-small")

    def test_an_optimizer_that_s_harms_stays_without(self) -> None:
        found = self.found(adamw=3, muon=2, muon_running=2.5, sgd=3, sgd_exact=2.5)
        assert answer.under(found, "muon").endswith("a running S 0 better, 1 worse. Stay without S.")
        assert answer.under(found, "sgd").endswith("`Exact()` 1 better, 0 worse. Try `Exact()`.")
        assert answer.under(found, "soap") == ""


def test_the_verdict_is_that_of_the_methods_that_were_fixed_beforehand():
    runs = [run for run in RECORDS.all(TASKS) if not METHODS[run.method].later]
    before = analysis.cells(runs, RECORDS.targets())
    now = analysis.cells(RECORDS.all(TASKS), RECORDS.targets())
    first, _ = answer.parted(analysis.tasks_of(now))
    assert [answer.outcome(before, task) for task in first] == [answer.outcome(now, task) for task in first]


def test_targets_were_fixed_before_the_other_methods_were_run():
    targets = RECORDS.targets()
    assert targets
    for task, target in targets.items():
        runs = RECORDS.runs(task)
        reference = [run for run in runs if run.method == protocol.REFERENCE]
        assert [run.method for run in runs[: len(reference)]] == [protocol.REFERENCE] * len(reference)
        assert protocol.target(reference, task) == target


def test_a_page_without_records_says_so(tmp_path):
    assert "Nothing has been run yet." in page.page(Store(tmp_path))


def test_the_best_rate_and_what_it_costs_to_keep_another() -> None:
    def row(direction: str, lr: float, seed: int, score: float) -> dict[str, str]:
        return {
            "task": "t", "direction": direction, "lr": str(lr), "seed": str(seed), "score": str(score),
            "status": "finished",
        }  # fmt: skip

    scores = {("adamw", 0.1): (2, 4), ("adamw", 1.0): (3, 6), ("adamw", 10.0): (9, 9)}
    scores |= {
        ("running+adamw", 0.1): (3, 8),
        ("running+adamw", 1.0): (1, 1),
        ("running+adamw", 10.0): (5, 5),
    }
    rows = [row(d, lr, seed, s) for (d, lr), both in scores.items() for seed, s in enumerate(both)]
    said = "".join(questions.rates(rows))
    assert "| t | AdamW | a running S | 0.1 (end) | 1 | 1.75 (1.50–2.00) | 0.38 (0.25–0.50) | 2 |" in said
    assert "(tasks: 1, seeds: 2): the best rate stayed in 0, went down in 0 and up in 1." in said
    assert (
        "better with every seed in 0 and worse with every seed in 1; at its own best rate, better in 1"
        in said
    )
    assert "One task is too little to follow" in said
    unfinished = [row("adamw", 0.1, 2, 1), row("running+adamw", 0.1, 2, 1)]
    assert "".join(questions.rates(rows + unfinished)) == said, "a seed counts once it was run at every rate"


def test_what_follows_for_a_rate() -> None:
    def one(own: float, tuned: float, kept: list[float], best: list[float]) -> questions.Carried:
        return questions.Carried("t", "muon", "running", own, tuned, (0.1, 10.0), kept, best)

    stays = one(1.0, 1.0, [0.8, 0.9], [0.8, 0.9])
    lower = one(1.0, 0.1, [1.1, 1.2], [0.8, 0.9])
    harmed = one(1.0, 0.1, [1.1, 1.2], [1.0, 1.1])
    assert "That rate can stay" in questions.followed([stays, stays])[0]
    assert "a third of it is worth a trial" in questions.followed([stays, lower])[0]
    assert "Compare with the optimizer alone" in questions.followed([stays, lower, harmed])[0]


def test_validation_at_equal_training() -> None:
    row = {"task": "t", "direction": "gradient", "weight_decay": "0.1", "status": "finished"}
    row |= {"train_loss": "1", "score": "5", "train_losses": "4 2 1", "scores": "9 3 5", "seed": "0"}
    other = row | {
        "direction": "exact",
        "train_loss": "2",
        "score": "6",
        "train_losses": "4 2 2",
        "scores": "9 7 6",
    }
    found = "".join(questions.validation([row, other]))
    assert "first fell to 2" in found
    assert "| gradient | 0.1 | 1 (1–1) | 5 (5–5) | 3 (3–3) | 3 (3–3) |" in found
    assert "| exact | 0.1 | 2 (2–2) | 6 (6–6) | 6 (6–6) | 7 (7–7) |" in found
