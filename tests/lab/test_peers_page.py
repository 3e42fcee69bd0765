"""docs/peers.md says what the records say."""

from pathlib import Path

from proxprop.lab.peers import page, protocol
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
    for run in RECORDS.all(TASKS):
        assert run.command.endswith(
            f"--task {run.task} --method {run.method} --trial {run.trial} --seed {run.seed}"
        )
        assert run.commit
        assert not run.commit.endswith("+"), "records come from committed code"
        assert run.device


def test_targets_were_fixed_before_the_other_methods_were_run():
    for task, target in RECORDS.targets().items():
        runs = RECORDS.runs(task)
        reference = [run for run in runs if run.method == protocol.REFERENCE]
        assert [run.method for run in runs[: len(reference)]] == [protocol.REFERENCE] * len(reference)
        assert protocol.target(reference, task) == target


def test_a_page_without_records_says_so(tmp_path):
    assert "Nothing has been run yet." in page.page(Store(tmp_path))
