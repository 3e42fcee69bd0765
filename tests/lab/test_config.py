"""Settings: what is accepted, what is refused and how, and that a command line says the same as a Config."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxprop.lab.cli import main
from proxprop.lab.commands import train as command_train
from proxprop.lab.config import Config, command, from_mapping, from_toml
from proxprop.lab.refusal import Refused

MISTAKES = [
    ({"epoch": 3}, "unknown key 'epoch'; did you mean 'epochs'?"),
    ({"tau-thetta": 1.0}, "unknown key 'tau-thetta'; did you mean 'tau_theta'?"),
    ({"zzz": 3}, "unknown key 'zzz'; accepted are data, data_dir"),
    ({"epochs": "3"}, "epochs should be of type int but is '3'"),
    ({"epochs": True}, "epochs should be of type int but is True"),
    ({"hidden": [3, "4"]}, "hidden should be a list of integers"),
    ({"hidden": [3, 0]}, r"hidden should be widths of 1 to 1000000 but is \[3, 0\]"),
    ({"hidden": [3, 10**19]}, "hidden should be widths of 1 to 1000000"),
    ({"lr": -1.0}, "lr should be > 0 and finite but is -1.0"),
    ({"lr": float("nan")}, "lr should be > 0 and finite but is nan"),
    ({"lr": float("inf")}, "lr should be > 0 and finite but is inf"),
    ({"tau_theta": 0}, "tau_theta should be > 0 and finite but is 0.0"),
    ({"momentum": 1.0}, r"momentum should be in \[0, 1\) but is 1.0"),
    ({"batch_size": 0}, "batch_size should be 1 to 2147483647 but is 0"),
    ({"batch_size": 10**20}, "batch_size should be 1 to 2147483647 but is 100000000000000000000"),
    ({"threads": 10**9}, "threads should be 1 to 1024 but is 1000000000"),
    ({"seed": -1}, "seed should be 0 to 18446744073709551615 but is -1"),
    ({"seed": 2**64}, "seed should be 0 to 18446744073709551615 but is 18446744073709551616"),
    ({"model": "mpl"}, "model should be one of mlp, .* but is 'mpl'; did you mean 'mlp'?"),
    ({"optimizer": "adma"}, "did you mean 'adam'?"),
    ({"precision": "fp16"}, "precision should be one of fp32, tf32, bf16"),
    ({"checkpoint_seconds": -1.0}, "checkpoint_seconds should be >= 0"),
    ({"checkpoint_seconds": float("inf")}, "checkpoint_seconds should be >= 0 and finite but is inf"),
    ({"lr": 10**400}, "lr should be > 0 and finite but is inf"),
    ({"lr": 1e300}, r"lr should be 1e-30 to 1e\+38 but is 1e\+300"),
    ({"tau_theta": 1e-320}, r"tau_theta should be 1e-30 to 1e\+38 but is 1e-320"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES)
def test_a_mistake_is_named(values, message):
    with pytest.raises(Refused, match=message):
        from_mapping(values)


def test_dashes_are_underscores_and_integers_are_numbers():
    assert from_mapping({"tau-theta": 2, "batch-size": 7}) == Config(tau_theta=2.0, batch_size=7)


@pytest.mark.parametrize(
    ("config", "lr", "hidden", "batch_size"),
    [
        (Config(), 0.05, (256, 128, 256), 100),
        (Config(solver="cg:3"), 0.4, (256, 128, 256), 100),
        (Config(data="cifar10", solver="exact", optimizer="adam"), 0.001, (4000, 1000, 4000), 500),
        (Config(data="cifar10", lr=3.0, hidden=(5,), batch_size=4), 3.0, (5,), 4),
    ],
)
def test_what_is_left_open_is_settled_as_documented(config, lr, hidden, batch_size):
    settled = config.settled()
    assert (settled.lr, settled.hidden, settled.batch_size) == (lr, hidden, batch_size)
    assert settled.settled() == settled


def test_a_folders_name_is_never_too_long_for_a_file_system():
    config = Config(data=249 * "日" + ".npz", model="convnet-2pool", optimizer="adamw", solver="published:1000", lr=1.23456e-30,
                    tau_theta=1.23456e-30, seed=2**64 - 1)  # fmt: skip
    assert len(os.fsencode(config.slug())) <= 255


def test_runs_share_a_name_exactly_when_they_are_the_same_run():
    base = Config(solver="cg:3")
    assert base.slug() == replace(base, lr=0.4, checkpoint_seconds=0.0, data_dir="elsewhere").slug()
    others = [
        replace(base, seed=1),
        replace(base, tau_theta=0.5),
        replace(base, lr=0.5),
        replace(base, threads=1),
    ]
    assert len({config.slug() for config in [base, *others]}) == 5


@pytest.mark.parametrize("content", [b"lr = \xff", b"lr = " + b"9" * 5000, b"lr = " + b"[" * 5000, b"lr 3"])
def test_what_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"run\.toml is not valid TOML: "):
        from_toml(path)


def test_a_mark_and_line_ends_of_windows_are_read_too(tmp_path):
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbfsolver = "cg:2"\r\nepochs = 1\r\n')
    assert from_toml(tmp_path / "run.toml") == {"solver": "cg:2", "epochs": 1}


def test_toml_is_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('solver = "cg:5"\nhidden = [4, 3]\nbatch-size = 9\n')
    assert from_mapping(from_toml(path)) == Config(solver="cg:5", hidden=(4, 3), batch_size=9)
    path.write_text("solver = cg")
    with pytest.raises(Refused, match="is not valid TOML"):
        from_toml(path)
    with pytest.raises(Refused, match="cannot read the settings file"):
        from_toml(tmp_path / "nowhere.toml")


configs = st.builds(
    Config,
    data=st.sampled_from(["digits", "cifar10", "my data.npz"]),
    model=st.sampled_from(["mlp", "convnet", "resnet18"]),
    hidden=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    optimizer=st.sampled_from(["sgd", "adam", "adamw", "muon"]),
    lr=st.none() | st.floats(1e-6, 100),
    solver=st.sampled_from(["backprop", "cg:7", "exact"]),
    tau_theta=st.floats(1e-3, 1e3),
    epochs=st.integers(1, 99),
    log_steps=st.integers(0, 9),
    observe=st.booleans(),
    save_weights=st.booleans(),
)


@given(config=configs)
def test_the_printed_command_runs_the_same_config(config):
    import shlex

    seen = []

    def keep(chosen, folder, resume):
        seen.append(chosen)
        raise Refused("seen enough")

    original, command_train.run = command_train.run, keep
    try:
        with pytest.raises(SystemExit):
            main(shlex.split(command(config, "some where"))[1:])
    finally:
        command_train.run = original
    assert seen == [config]
