"""Records: written whole, read with suspicion."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import proxprop
from proxprop.lab import records
from proxprop.lab.config import Config
from proxprop.lab.records import Run, checkpoint, environment, lines, sealed
from proxprop.lab.records.checkpoint import Checkpoint
from proxprop.lab.records.sealed import Damaged, seal, unseal, write_bytes
from proxprop.lab.refusal import Refused
from proxprop.lab.report import write_report
from proxprop.lab.train import train

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
rows = st.dictionaries(st.text().filter(lambda key: key != sealed.SEAL), values, max_size=4)


@given(rows)
def test_a_sealed_line_is_read_back(row):
    assert unseal(seal(row)) == row


@given(row=rows, data=st.data())
def test_a_changed_byte_is_noticed(row, data):
    line = seal(row).encode()
    where = data.draw(st.integers(0, len(line) - 1))
    changed = (
        line[:where]
        + bytes([data.draw(st.integers(32, 126).filter(lambda b: b != line[where]))])
        + line[where + 1 :]
    )
    try:
        same = json.loads(changed) == json.loads(line)
    except ValueError:
        same = False
    if not same:
        with pytest.raises(Damaged):
            unseal(changed.decode())


@given(row=rows, data=st.data())
def test_a_cut_line_is_noticed(row, data):
    line = seal(row)
    with pytest.raises(Damaged):
        unseal(line[: data.draw(st.integers(0, len(line) - 1))])


def test_numbers_that_are_not_finite_cannot_be_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"loss": float("nan")})


def test_damaged_lines_are_left_out_and_noted(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines.rewrite(path, [{"a": 1}, {"a": 2}])
    lines.append(path, {"a": 3})
    path.write_text(path.read_text().replace('"a": 2', '"a": 7') + '{"a": 4, "cr')
    good, notes = lines.read(path)
    assert good == [{"a": 1}, {"a": 3}]
    assert [note[:21] for note in notes] == ["rows.jsonl line 2 is ", "rows.jsonl line 4 is "]


def some(step):
    return Checkpoint(
        {"x": torch.full((3,), float(step)), "n": torch.arange(2, dtype=torch.uint8)}, {"step": step}
    )


def test_the_last_two_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 10):
        checkpoint.write(tmp_path, step, some(step))
    assert [path.name for path in checkpoint.paths(tmp_path)] == [
        "checkpoint-000000002.ckpt",
        "checkpoint-000000010.ckpt",
    ]
    found, notes = checkpoint.latest(tmp_path)
    assert found.values == {"step": 10}
    assert torch.equal(found.tensors["x"], torch.full((3,), 10.0))
    assert notes == []


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b"", lambda content: content + b"x"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    for step in (1, 2):
        checkpoint.write(tmp_path, step, some(step))
    newest = checkpoint.paths(tmp_path)[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    found, notes = checkpoint.latest(tmp_path)
    assert found.values == {"step": 1}
    assert notes == [
        "checkpoint-000000002.ckpt is damaged: its SHA-256 does not fit; going back to the one before"
    ]
    newest = checkpoint.paths(tmp_path)[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    assert checkpoint.latest(tmp_path)[0] is None


@pytest.mark.parametrize("make", [
    lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)],
    lambda p: [torch.optim.Adam(p, lr=0.1)],
    lambda p: [torch.optim.AdamW(p[1:], lr=0.1), torch.optim.Muon(p[:1], lr=0.1)],
])  # fmt: skip
def test_optimizers_go_on_exactly_where_they_were(tmp_path, make):
    def step(model, optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    device = torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizers = make(list(model.parameters()))
    step(model, optimizers)
    checkpoint.write(tmp_path, 1, checkpoint.pack(checkpoint.Trained(model, optimizers), device))
    step(model, optimizers)
    torch.manual_seed(99)
    other = torch.nn.Linear(3, 2)
    others = make(list(other.parameters()))
    checkpoint.unpack(checkpoint.latest(tmp_path)[0], checkpoint.Trained(other, others), device)
    step(other, others)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_a_run_has_one_writer(tmp_path):
    """A lock belongs to an opened file, so that a second opening is refused here as in another process."""
    with Run(tmp_path / "run", Config(), resume=False):
        told = rf"is being written by another process \(id {os.getpid()}\)"
        with pytest.raises(Refused, match=told):
            Run(tmp_path / "run", Config(), resume=True)
    Run(tmp_path / "run", Config(), resume=True).close()


def test_a_folder_holds_one_run(tmp_path):
    with Run(tmp_path, Config(), resume=False) as run:
        run.add_metrics({"kind": "epoch", "epoch": 0})
    with pytest.raises(Refused, match="already holds a run; go on with it by --resume"):
        Run(tmp_path, Config(), resume=False)
    with pytest.raises(Refused, match=r"holds another run: lr is 0.05 there but 0.5 here"):
        Run(tmp_path, Config(lr=0.5), resume=True)
    Run(tmp_path, Config(checkpoint_seconds=0.0), resume=True).close()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match="holds no readable run"):
        Run(tmp_path, Config(), resume=True)


def test_a_start_that_failed_before_anything_was_measured_is_no_run(tmp_path, small):
    with pytest.raises(Refused, match="a convolutional model should get"):
        train(replace(small, model="convnet"), tmp_path / "run")
    record = train(small, tmp_path / "run")
    assert record.config.model == "mlp"
    assert len(record.starts) == 1


@contextmanager
def full_disk():
    """Within, no file grows beyond 16 bytes: a write stops half-way, as on a full disk."""
    resource = pytest.importorskip("resource")
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))


def test_a_full_disk_leaves_the_old_file_and_no_other_and_names_the_new_one(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(OSError, match=rf"File too large: '{path}'"), full_disk():
        write_bytes(path, b"new" * 20)
    assert [left.read_text() for left in tmp_path.iterdir()] == ["old"]


def test_a_place_that_cannot_be_written_is_named_and_not_its_temporary_file(tmp_path):
    (tmp_path / "a.json").mkdir()
    for place in (tmp_path / "none" / "a.json", tmp_path / "a.json"):
        with pytest.raises(OSError, match=f"'{place}'$"):
            write_bytes(place, b"new")


def test_a_full_disk_names_the_rows_that_could_not_be_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OSError, match=rf"File too large: '{path}'"), full_disk():
        lines.append(path, {"epoch": 0})


def test_two_processes_that_write_a_file_at_once_both_write_it_whole(tmp_path, monkeypatch):
    """The other one writes between this one's opening of its temporary file and its first byte."""
    first = sealed.created

    def both(path):
        file = first(path)
        monkeypatch.setattr(sealed, "created", first)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        write_bytes(tmp_path / "a", b"theirs")
        return file

    monkeypatch.setattr(sealed, "created", both)
    write_bytes(tmp_path / "a", b"ours")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"ours"]


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    Run(tmp_path, Config(), resume=False).close()
    (tmp_path / "checkpoint-000000007.ckpt.tmp").write_bytes(b"half")
    Run(tmp_path, Config(), resume=True).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "lock"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write into"):
        Run(tmp_path / "file" / "run", Config(), resume=False)


def test_a_record_tells_everything(finished):
    record = records.read(finished)
    assert record.status == "finished"
    assert [row["epoch"] for row in record.epochs] == [0, 1, 2, 3]
    assert [row["step"] for row in record.steps] == [2, 4, 6, 8, 10, 12, 14]
    assert set(record.last) >= {
        "loss",
        "batch_loss",
        "train_accuracy",
        "validation_accuracy",
        "test_accuracy",
        "seconds",
    }
    assert set(record.last["cosine"]) == {"1", "3"}
    assert all(0 < value <= 1 for value in record.last["cosine"].values())
    assert {"torch", "python", "numpy", "device", "commit", "threads", "proxprop"} <= set(record.environment)
    assert [layer["status"] for layer in record.layers] == ["converted", "converted", "explicit"]
    assert record.series("seconds") == sorted(record.series("seconds"))


def test_damage_in_a_finished_record_is_told(finished_copy):
    path = finished_copy / "metrics.jsonl"
    path.write_text(path.read_text().replace('"epoch": 2', '"epoch": 8'))
    (finished_copy / "plan.json").write_text("{")
    record = records.read(finished_copy)
    assert [row["epoch"] for row in record.epochs] == [0, 1, 3]
    text = " ".join(record.notes)
    assert re.search(r"metrics.jsonl line \d+ is damaged", text)
    assert "lacks epoch 2" in text
    assert "plan.json cannot be read" in text


@pytest.mark.parametrize(
    ("order", "epochs", "note"),
    [
        ([0, 2, 1, 3], [0, 1, 2, 3], None),
        ([0, 1, 2, 2, 3, 1], [0, 1, 2, 3], None),
        ([0, 1], [0, 1], "metrics.jsonl lacks epoch 2 and 1 more"),
        ([0, 1, 2], [0, 1, 2], "metrics.jsonl lacks epoch 3"),
    ],
)
def test_rows_are_read_by_their_epoch_wherever_they_stand(finished_copy, order, epochs, note):
    path = finished_copy / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines(keepends=True) if '"kind": "epoch"' in line]
    path.write_text("".join(rows[epoch] for epoch in order))
    record = records.read(finished_copy)
    assert [row["epoch"] for row in record.epochs] == epochs
    assert record.notes == ([note] if note else [])


def test_a_row_of_the_two_billionth_epoch_is_no_reason_to_list_them_all(finished_copy):
    reseal(finished_copy / "config.json", lambda config: config | {"epochs": 2**31 - 1})
    reseal(finished_copy / "metrics.jsonl", lambda row: row | {"epoch": 2**31 - 1})
    assert records.read(finished_copy).notes == [f"metrics.jsonl lacks epoch 0 and {2**31 - 2} more"]


def reseal(path, change):
    """Write every row of a file anew, changed, under a checksum that fits."""
    path.write_text("".join(seal(change(unseal(line))) + "\n" for line in path.read_text().splitlines()))


SENSELESS = [
    ("metrics.jsonl", {"loss": "low"}, "loss should be int or float or null but is 'low'"),
    ("metrics.jsonl", {"loss": 10**400}, "loss should have 64 bits but has 1329"),
    ("metrics.jsonl", {"kind": "era"}, "kind should be epoch or step but is 'era'"),
    ("metrics.jsonl", {"cosine": 0.5}, "cosine should be dict but is 0.5"),
    ("metrics.jsonl", {"cosine": {"1": "x"}}, "1 should be int or float or null but is 'x'"),
    ("timing.jsonl", {"seconds": None}, "seconds should be int or float but is None"),
    (
        "result.json",
        {"status": 7},
        "result.json cannot be read: status should be one of finished, diverged but is 7",
    ),
    ("plan.json", {"layers": 3}, "plan.json cannot be read: layers should be list but is 3"),
    ("plan.json", {"layers": [{"name": "1"}]}, "plan.json cannot be read: kind is missing"),
    (
        "environment.json",
        {"starts": ["a"]},
        "environment.json cannot be read: a row should have fields but is 'a'",
    ),
]


def senseless(finished, folder, name, wrong):
    """A record with wrong fields in one of its files, in the last row if there are several."""
    shutil.copytree(finished, folder)
    reseal(folder / name, lambda row: row | wrong if row.get("epoch") in (None, 3) else row)
    return records.read(folder)


@pytest.mark.parametrize(("name", "wrong", "message"), SENSELESS)
def test_a_checksum_that_fits_does_not_make_sense_of_wrong_fields(tmp_path, finished, name, wrong, message):
    record = senseless(finished, tmp_path / "run", name, wrong)
    assert any(re.search(message, note) for note in record.notes)


def test_senseless_records_are_reported_too(tmp_path, finished):
    found = [senseless(finished, tmp_path / str(seed), *case[:2]) for seed, case in enumerate(SENSELESS)]
    apart = [replace(r, config=replace(r.config, seed=seed)) for seed, r in enumerate(found)]
    text = write_report(apart, tmp_path / "out", "Senseless").read_text()
    assert f"{len(SENSELESS)} seeds each" in text


def test_a_run_without_a_sensible_measurement_is_refused(finished_copy):
    reseal(finished_copy / "metrics.jsonl", lambda row: {"kind": "epoch"})
    with pytest.raises(Refused, match="holds no measurements yet"):
        records.read(finished_copy)


def test_a_checkpoint_that_holds_something_else_is_passed_over(tmp_path):
    checkpoint.write(tmp_path, 1, some(1))
    body = save({"x": torch.zeros(1)})
    (tmp_path / "checkpoint-000000002.ckpt").write_bytes(
        hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    )
    found, notes = checkpoint.latest(tmp_path)
    assert found.values == {"step": 1}
    assert notes[0].startswith(
        "checkpoint-000000002.ckpt is damaged: it does not hold what a checkpoint holds"
    )


@pytest.fixture
def mine(tmp_path):
    """A file that nothing may write into."""
    path = tmp_path / "mine"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.mark.parametrize("linked", ["a.json", "a.json.{}.tmp"])
def test_a_link_in_place_of_a_file_is_replaced(tmp_path, mine, linked):
    (tmp_path / linked.format(os.getpid())).symlink_to(mine)
    sealed.write(tmp_path / "a.json", {"a": 1})
    assert sealed.read(tmp_path / "a.json") == {"a": 1}
    assert not (tmp_path / "a.json").is_symlink()


def test_rows_and_locks_do_not_follow_links_either(tmp_path, mine):
    for name in ("rows.jsonl", "lock"):
        (tmp_path / name).symlink_to(mine)
    lines.append(tmp_path / "rows.jsonl", {"a": 1})
    assert lines.read(tmp_path / "rows.jsonl") == ([{"a": 1}], [])
    Run(tmp_path, Config(), resume=False).close()


def test_figures_do_not_follow_links(tmp_path, mine, made):
    (tmp_path / "curves-sgd.png").symlink_to(mine)
    write_report([made()], tmp_path, "Runs", formats=["png"])
    assert (tmp_path / "curves-sgd.png").read_bytes().startswith(b"\x89PNG")


def test_settings_that_no_run_has_are_told_with_their_folder(finished_copy):
    reseal(finished_copy / "config.json", lambda config: config | {"optimizer": "adma"})
    with pytest.raises(
        Refused, match=f"{finished_copy} holds no readable run: optimizer should be one of sgd,"
    ):
        records.read(finished_copy)


def test_find_looks_below_and_says_why_not(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "a" / "b" / "run")
    assert len(records.find([tmp_path])) == 1
    with pytest.raises(Refused, match="there is no folder"):
        records.find([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"no readable run in .*a run is a folder with a config.json"):
        records.find([tmp_path / "empty"])


def test_a_number_that_damage_made_infinite_is_noticed():
    line = seal({"step": 15309})
    with pytest.raises(Damaged, match="not what was written"):
        unseal(line.replace("15309", "1E309"))


def test_a_commit_is_marked_if_the_package_was_changed_but_not_if_a_record_was(tmp_path, monkeypatch):
    module, record = tmp_path / "package" / "__init__.py", tmp_path / "results.csv"
    module.parent.mkdir()
    module.write_text("")
    record.write_text("a run\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.delenv("PROXPROP_COMMIT", raising=False)
    monkeypatch.setattr(proxprop, "__file__", str(module))
    clean = environment.commit()
    record.write_text("a run\nanother run\n")
    assert environment.commit() == clean
    module.write_text("changed = True\n")
    assert environment.commit() == f"{clean}+"
