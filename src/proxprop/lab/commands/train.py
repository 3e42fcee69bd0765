"""`proxprop train`: one run."""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from proxprop.lab.commands import options
from proxprop.lab.commands.console import say
from proxprop.lab.config import MODELS, OPTIMIZERS, PRECISIONS, Config
from proxprop.lab.methods import method
from proxprop.lab.records import Record
from proxprop.lab.records.run import stored_config
from proxprop.lab.refusal import Interrupted, Refused, nearest
from proxprop.lab.train import train as run

DIVERGED = 3
SETTINGS = {setting.name for setting in fields(Config)}


def train(
    data: options.Data = None,
    data_dir: options.DataDir = None,
    model: Annotated[str | None, typer.Option(help=f"{', '.join(MODELS)} [mlp].")] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Hidden widths of the mlp [4000,1000,4000; digits: 256,128,256].")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help=f"{', '.join(OPTIMIZERS)} (sgd is Nesterov's) [sgd].")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate [one that fits optimizer and solver, and is printed].")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd and muon [0.95].")] = None,
    solver: Annotated[
        str | None,
        typer.Option(help="backprop, cg:K (K iterations), exact, running:K or published:K [backprop]."),
    ] = None,
    tau_theta: Annotated[float | None, typer.Option(help="Proximal step size τ_θ [1].")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step [500; digits: 100].")] = None,
    epochs: options.Epochs = None,
    seed: Annotated[int | None, typer.Option(help="Of initialisation and sample order [0].")] = None,
    device: options.Device = None,
    precision: Annotated[str | None, typer.Option(help=f"{', '.join(PRECISIONS)} [fp32].")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads [torch's own number].")] = None,
    validation: Annotated[
        int | None, typer.Option(help="Training samples held out [5000; digits: 200].")
    ] = None,
    measure_every: Annotated[
        int | None, typer.Option(help="Measure after every so many epochs, and at the end [1].")
    ] = None,
    log_steps: Annotated[
        int | None, typer.Option(help="Also write the loss every so many steps [0: never].")
    ] = None,
    observe: Annotated[
        bool | None, typer.Option(help="Measure the angle to the gradient each epoch.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="Least time between two checkpoints [30].")
    ] = None,
    save_weights: Annotated[bool | None, typer.Option(help="Keep the final weights.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="Also write TensorBoard events.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these settings.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder [runs/NAME-OF-THE-RUN].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    download: options.Download = False,
) -> None:
    """Train one run and record it.

    Kill it at any moment: --resume goes on from the last checkpoint. Ctrl-C stops after the current step.

    \b
    Examples:
        proxprop train --solver cg:3
        proxprop train --data cifar10 --download --model mlp --solver cg:3 --tau-theta 0.05 --lr 1 --epochs 50
        proxprop train --data cifar10 --model convnet --solver exact --device cuda --out runs/conv
        proxprop train --out runs/conv --resume
    """
    everything = dict(locals())
    given = {name: value for name, value in everything.items() if name in SETTINGS}
    given["hidden"] = options.widths(hidden)
    stored = None
    if resume and out is not None and (out / "config.json").exists():
        stored = stored_config(out).to_dict()
    chosen = options.config_from(config, given, stored)
    folder = out or Path("runs") / chosen.slug()
    if resume:
        _refuse_nothing(folder)
    method(chosen)
    if download:
        options.fetch(chosen)
    say(f"{_doing(folder)} {folder}: {_what(chosen)}")
    record = _run(chosen, folder, resume)
    _tell(record)
    if record.status == "diverged":
        raise typer.Exit(DIVERGED)


def _refuse_nothing(folder: Path) -> None:
    """Refuse to go on with a run that is not there, naming the one whose folder is most like it."""
    if (folder / "config.json").exists():
        return
    runs = [config.parent.name for config in folder.parent.glob("*/config.json")]
    near = nearest(folder.name, runs)
    hint = f"did you mean {folder.parent / near}?" if near else "leave out --resume to begin one"
    raise Refused(f"there is no run to go on with in {folder}; {hint}")


def _doing(folder: Path) -> str:
    return "Already done in" if (folder / "result.json").exists() else "Training into"


def _what(config: Config) -> str:
    """The settings that say most about a run, in a line."""
    full = config.settled()
    tau_theta = "unused" if full.solver == "backprop" else f"{full.tau_theta:g}"
    return (
        f"data {full.data}, model {full.model}, solver {full.solver}, optimizer {full.optimizer}, "
        f"lr {full.lr:g}, tau_theta {tau_theta}"
    )


def _run(config: Config, folder: Path, resume: bool) -> Record:
    again = f"Go on with: proxprop train --out {shlex.quote(str(folder))} --resume"
    try:
        return run(config, folder, resume)
    except Interrupted as stop:
        say(f"Stopped after step {stop.step}. {again}")
        raise typer.Exit(130) from stop
    except KeyboardInterrupt as stop:
        say(f"Stopped within a step, so from the checkpoint before. {again}")
        raise typer.Exit(130) from stop


def _tell(record: Record) -> None:
    last = record.last
    if record.status == "diverged":
        say(f"Diverged in epoch {last['epoch']}: the training loss is no longer a finite number.")
    else:
        held = (
            ""
            if (validation := last["validation_accuracy"]) is None
            else f", validation accuracy {validation:.1%}"
        )
        accuracy = f"test accuracy {last['test_accuracy']:.1%}{held}"
        say(f"Training loss {last['loss']:.4g}, {accuracy}, {last['seconds']:.1f} s of training.")
    say(f"Recorded in {record.folder}: {_what(record.config)}")
