"""The training loop, from top to bottom: prepare, go on from the last checkpoint, step, measure, record."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxprop.lab import devices, models
from proxprop.lab.config import Config
from proxprop.lab.data import Dataset, fingerprint, load
from proxprop.lab.interruption import Flag, interruptible
from proxprop.lab.measure import cosines, measure
from proxprop.lab.methods import Method, method
from proxprop.lab.plan import layer_rows
from proxprop.lab.records import Record, Run, read
from proxprop.lab.records.checkpoint import Checkpoint, Trained, pack, unpack
from proxprop.lab.refusal import Interrupted, Refused
from proxprop.lab.step import Steps
from proxprop.lab.watch import TensorBoard, Watch, default


def train(
    config: Config,
    out: str | Path,
    resume: bool = False,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
    at_once: int = 1,
) -> Record:
    """Train one run into a folder and return its record.

    Args:
        config: what to run.
        out: the run's folder.
        resume: go on from the last good checkpoint of an unfinished run; a finished one is only read.
        watch: who is told about progress; a bar in a terminal by default.
        dataset: what `config.data` names, when it is already at hand; read from its files by default.
        at_once: how many runs share this machine, for the record.

    Raises:
        Refused: the settings, the data or the folder do not allow it.
        Interrupted: Ctrl-C; a checkpoint was written after the current step, or the run came to its end.
        KeyboardInterrupt: Ctrl-C, twice or in a step that takes long; the last checkpoint is the one before.
    """
    chosen, device, folder = method(config), devices.device(config.device), Path(out)
    config = replace(config.settled(), device=str(device))
    if dataset is None and not (folder / "result.json").exists():
        dataset = load(config.data, config.data_dir, config.validation)
    if dataset is not None:
        _check_batches(config, dataset)
    data = fingerprint(config.data)
    forked = [device] if device.type == "cuda" else []
    with Run(folder, config, resume) as run:
        run.check_data(data)
        if dataset is not None and not run.done:
            with (
                torch.random.fork_rng(forked),
                devices.matmul_precision(config.precision),
                devices.cpu_threads(config.threads),
                _heard(run),
                interruptible() as flag,
            ):
                run.start(device, at_once, data)
                _train(run, chosen, dataset.to(device), device, watch or default(), flag)
            if flag.raised:  # too late for this run, but the next one of a list should not begin
                raise Interrupted(folder, read(folder).last["step"])
    return read(folder)


def _check_batches(config: Config, dataset: Dataset) -> None:
    """Refuse a batch size that leaves a last batch which the model can't normalise."""
    assert config.batch_size is not None
    samples, least = len(dataset.train), models.least_batch(config.model, dataset.shape)
    last = samples % config.batch_size or min(samples, config.batch_size)
    if last < least:
        raise Refused(
            f"model {config.model} should get batches of at least {least} samples of this data, but {samples} in "
            f"batches of {config.batch_size} leave a last one of {last}; choose another --batch-size or --validation"
        )


@contextmanager
def _heard(run: Run) -> Iterator[None]:
    """Within, a numerical warning of the library becomes a note of the run: divergence is recorded, not crashed on."""

    def keep(message: Warning | str, *_: object, **__: object) -> None:
        run.note(str(message))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=RuntimeWarning)
        warnings.showwarning = keep
        yield


@dataclass
class Place:
    """Where a run stands; together with model and optimizers, all there is to go on from."""

    epoch: int = 0
    step: int = 0
    total: int = 0
    seconds: float = 0.0
    batch_loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    order: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)


def _train(
    run: Run, chosen: Method, dataset: Dataset, device: torch.device, watch: Watch, flag: Flag
) -> None:
    config = run.config
    assert config.batch_size is not None
    torch.manual_seed(config.seed)
    model = chosen.prepare(models.build(config, dataset.shape, dataset.classes).to(device))
    optimizers = chosen.optimizers(model)
    attached = chosen.attach(optimizers, model)
    trained = Trained(model, optimizers, attached)
    generator = torch.Generator(device).manual_seed(config.seed)
    samples = dataset.train
    steps_per_epoch = -(-len(samples) // config.batch_size)

    run.write_plan(layer_rows(model, samples.inputs[: config.batch_size]))
    place, notes = _resumed(run, trained, device)
    if place is None:
        place = Place(batch_loss=torch.zeros((), device=device), order=generator.get_state())
    capture = attached is None  # running averages are inverted in some steps only
    take_step = Steps(model, optimizers, samples, config.batch_size, config.precision, capture)
    run.begin_rows(place.metrics, place.timing)
    watchers: list[Watch] = [watch, *([TensorBoard(run.folder)] if config.tensorboard else [])]
    for watcher in watchers:
        watcher.begin(config, steps_per_epoch, place.total)
    for note in notes:
        run.note(note)
        watch.note(note)

    try:
        if not place.metrics:
            _measured(run, place, model, dataset, watchers)
        saved = clock = devices.wait(device)
        while place.epoch < config.epochs and not _diverged(place):
            generator.set_state(place.order)
            order = torch.randperm(len(samples), generator=generator, device=device)
            clock = devices.wait(device)
            for batch in order.split(config.batch_size)[place.step :]:
                loss = take_step(batch)
                place.batch_loss += loss
                place.step += 1
                place.total += 1
                if config.log_steps and place.total % config.log_steps == 0:
                    _logged(run, place, loss)
                for watcher in watchers:
                    watcher.step(place.total, loss)
                stopping = flag.look()
                if stopping or devices.now() - saved >= config.checkpoint_seconds:
                    place.seconds += devices.wait(device) - clock
                    _saved(run, place, trained, device)
                    saved = clock = devices.wait(device)
                if stopping:
                    raise Interrupted(run.folder, place.total)
            place.seconds += devices.wait(device) - clock
            place.epoch, place.step, place.order = place.epoch + 1, 0, generator.get_state()
            if _to_be_measured(place, config):
                _measured(run, place, model, dataset, watchers)
                place.batch_loss.zero_()
        summary = {"final": place.metrics[-1], "seconds": place.seconds}
        run.finish("diverged" if _diverged(place) else "finished", model.state_dict(), summary)
    finally:
        for watcher in watchers:
            watcher.end()


def _to_be_measured(place: Place, config: Config) -> bool:
    """Every so many epochs, at the end, and where a mini-batch loss says that the run has diverged."""
    due = place.epoch % config.measure_every == 0 or place.epoch == config.epochs
    return due or _finite(place.batch_loss) is None


def _measured(run: Run, place: Place, model: nn.Module, dataset: Dataset, watchers: list[Watch]) -> None:
    """Measure at the end of an epoch and write it down, what the clock says apart from what it does not."""
    config, size = run.config, run.config.batch_size
    before = place.timing[-1] if place.timing else {"seconds": 0.0, "step": 0}
    taken = place.total - before["step"]
    row: dict[str, Any] = {"kind": "epoch", "epoch": place.epoch, "step": place.total}
    row["batch_loss"] = _finite(place.batch_loss / taken) if taken else None
    row |= measure(model, dataset, config.precision)
    immediate = config.solver != "backprop" and not config.solver.startswith("running:")
    if config.observe and immediate and row["loss"] is not None:
        probe = dataset.train.inputs[:size], dataset.train.labels[:size]
        row["cosine"] = cosines(model, *probe, precision=config.precision)
    pace = 1000 * (place.seconds - before["seconds"]) / taken if taken else None
    tick = {"epoch": place.epoch, "step": place.total, "seconds": place.seconds, "ms_per_step": pace}
    place.metrics.append(row)
    place.timing.append(tick)
    run.add_metrics(row)
    run.add_timing(tick)
    for watcher in watchers:
        watcher.epoch(row)


def _logged(run: Run, place: Place, loss: Tensor) -> None:
    row = {"kind": "step", "step": place.total, "batch_loss": _finite(loss)}
    place.metrics.append(row)
    run.add_metrics(row)


def _diverged(place: Place) -> bool:
    """Whether the last full-batch loss is not a finite number."""
    return any(row["kind"] == "epoch" and row["loss"] is None for row in place.metrics[-1:])


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def _saved(run: Run, place: Place, trained: Trained, device: torch.device) -> None:
    packed = pack(trained, device)
    tensors = packed.tensors | {"place/batch_loss": place.batch_loss, "place/order": place.order}
    plain = {name: value for name, value in vars(place).items() if name not in ("batch_loss", "order")}
    values = packed.values | {"place": plain, "run": run.config.slug()}
    run.checkpoint(place.total, Checkpoint(tensors, values))


def _resumed(run: Run, trained: Trained, device: torch.device) -> tuple[Place | None, list[str]]:
    found, notes = run.last_checkpoint()
    if found is None:
        return None, notes
    try:
        if (other := found.values.get("run", run.config.slug())) != run.config.slug():
            raise ValueError(f"it is of {other}")
        unpack(found, trained, device)
        loss, order = found.tensors["place/batch_loss"].to(device), found.tensors["place/order"]
        return Place(**found.values["place"], batch_loss=loss, order=order), notes
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise Refused(
            f"the last checkpoint in {run.folder} is not one of this run and version ({str(error).splitlines()[0]}); "
            "move it away to go on from the one before"
        ) from error
