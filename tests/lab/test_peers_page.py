"""docs/peers.md says what the records say."""

from pathlib import Path

from proxprop.lab.peers import page, protocol, questions
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
    assert "| t | AdamW | a running S | 0.1 (end) | 1 | 1.75 (1.50–2.00) | 0.38 (0.25–0.50) | 2 |" in "".join(
        questions.rates(rows)
    )


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
