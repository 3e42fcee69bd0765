"""What one run is: every setting that decides its result, checked, and read from or written to files."""

import hashlib
import json
import math
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from proxprop.lab.rates import rate
from proxprop.lab.refusal import Refused, nearest, one_of

MODELS = ("mlp", "mlp-bn", "convnet", "convnet-2pool", "resnet18")
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
PRECISIONS = ("fp32", "tf32", "bf16")
PAPER_WIDTHS = (4000, 1000, 4000)
DIGITS_WIDTHS = (256, 128, 256)

# The least and the most a whole number may be. Beyond 2³¹ - 1 torch and OpenMP count no further; a seed has 64 bits.
MOST = 2**31 - 1
RANGES = {
    "batch_size": (1, MOST),
    "epochs": (1, MOST),
    "threads": (1, 1024),
    "measure_every": (1, MOST),
    "seed": (0, 2**64 - 1),
    "log_steps": (0, MOST),
    "validation": (0, MOST),
}
WIDEST = 1_000_000
FLOATS = (1e-30, 1e38)
"""The least and the most a learning rate or τ_θ may be, so that float32 holds it, and N/τ_θ too."""

# Settings that change where and how often a run writes, never what it computes.
INCIDENTAL = ("data_dir", "checkpoint_seconds", "save_weights", "tensorboard")


@dataclass(frozen=True)
class Config:
    """One run. `lr`, `hidden` and `batch_size` left at None take the value `settled` documents.

    Args:
        data: digits, cifar10, mnist, fashion-mnist, or a path to your own .npz/.safetensors.
        data_dir: folder that holds the dataset; None searches (see `proxprop doctor`).
        model: mlp, mlp-bn (with batch normalisation), convnet (the paper's text: three poolings), convnet-2pool (as
            released), resnet18.
        hidden: widths of the mlp's hidden layers.
        optimizer: sgd (Nesterov), adam, adamw, muon.
        lr: the optimizer's learning rate, the paper's τ.
        momentum: of sgd and muon.
        solver: backprop, cg:K, exact, running:K (S averaged over steps and inverted every K of them, damping 1/τ_θ
            relative to its mean diagonal), or published:K (the paper's released iteration, see `lab.published`).
        tau_theta: the proximal step size τ_θ; unused by backprop.
        batch_size: samples per step.
        epochs: passes over the training set.
        seed: of initialisation and of the order of the samples.
        device: cpu, cuda, cuda:N, mps, or auto.
        precision: fp32, tf32 (matrix products), bf16 (autocast, fp32 weights).
        threads: CPU threads; None takes torch's own number. On CPU the last bits of a run depend on it.
        validation: training samples held out; None takes the dataset's own number.
        measure_every: measure after every so many epochs, and at the end; measuring takes no training time, but time.
        log_steps: write the mini-batch loss every so many steps; 0 writes epochs only.
        observe: measure, once per epoch, the cosine between direction and gradient of every converted layer.
        checkpoint_seconds: at least so long between two checkpoints; 0 writes one after every step.
        save_weights: keep the final weights.
        tensorboard: also write TensorBoard events into the run's folder.
    """

    data: str = "digits"
    data_dir: str | None = None
    model: str = "mlp"
    hidden: tuple[int, ...] | None = None
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.95
    solver: str = "backprop"
    tau_theta: float = 1.0
    batch_size: int | None = None
    epochs: int = 10
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    threads: int | None = None
    validation: int | None = None
    measure_every: int = 1
    log_steps: int = 0
    observe: bool = True
    checkpoint_seconds: float = 30.0
    save_weights: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.hidden is not None:
            object.__setattr__(self, "hidden", tuple(self.hidden))
        _check(self)

    def settled(self) -> "Config":
        """The same run with nothing left open.

        `lr`: by network, optimizer and solver, as in `lab.rates`.
        `hidden`: the paper's 4000-1000-4000, or 256-128-256 for digits.
        `batch_size`: the paper's 500, or 100 for digits.
        """
        digits = self.data == "digits"
        return replace(
            self,
            lr=self.lr if self.lr is not None else rate(self.optimizer, self.solver, self.model),
            hidden=self.hidden if self.hidden is not None else (DIGITS_WIDTHS if digits else PAPER_WIDTHS),
            batch_size=self.batch_size if self.batch_size is not None else (100 if digits else 500),
        )

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result; two runs with the same identity are the same run."""
        return {key: value for key, value in asdict(self.settled()).items() if key not in INCIDENTAL}

    def slug(self) -> str:
        """A folder name: the settings one looks for, and a digest of all of them.

        No folder's name may be longer than 255 bytes, so only the start of a long file's name is taken.
        """
        full = self.settled()
        text = json.dumps(full.identity(), sort_keys=True, default=list)
        tau = "" if full.solver == "backprop" else f"-tau{full.tau_theta:g}"
        solver = full.solver.replace(":", "")
        name = f"{Path(full.data).stem[:40]}-{full.model}-{full.optimizer}-{solver}{tau}-lr{full.lr:g}"
        return f"{name}-seed{full.seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        return values | {"hidden": list(self.hidden) if self.hidden is not None else None}


def command(config: Config, out: str) -> str:
    """The command line that runs a Config.

    >>> command(Config(solver="cg:3", seed=2), "runs/a")
    'proxprop train --solver cg:3 --seed 2 --out runs/a'
    """
    parts = ["proxprop train"]
    for setting in fields(Config):
        value = getattr(config, setting.name)
        if value == setting.default:
            continue
        name = "--" + setting.name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(name if value else f"--no-{name[2:]}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else format(value, "")
            parts.append(f"{name} {shlex.quote(text)}")
    return " ".join([*parts, f"--out {shlex.quote(out)}"])


def from_mapping(values: Mapping[str, Any], source: str = "settings") -> Config:
    """Build a Config from keys and values; an unknown key or a wrong type is refused.

    >>> from_mapping({"epoch": 3})
    Traceback (most recent call last):
    ...
    proxprop.lab.refusal.Refused: settings: unknown key 'epoch'; did you mean 'epochs'?
    """
    known = {field.name: _annotation(field.type) for field in fields(Config)}
    plain: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise Refused(f"{source}: {_unknown(key, list(known))}")
        plain[name] = _typed(source, name, known[name], value)
    return Config(**plain)


def from_toml(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML file, for `from_mapping`."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # some editors begin UTF-8 with a mark
    except OSError as error:
        raise Refused(f"cannot read the settings file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number too long or brackets too deep
        raise Refused(f"{path} is not valid TOML: {error}") from error


def _unknown(key: str, known: list[str]) -> str:
    near = nearest(key.replace("-", "_"), known)
    return f"unknown key '{key}'; " + (
        f"did you mean '{near}'?" if near else f"accepted are {', '.join(known)}"
    )


def _annotation(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _typed(source: str, name: str, annotation: str, value: Any) -> Any:
    """Check one value against the field's annotation; an integer will do where a float is expected."""
    if value is None and "None" in annotation:
        return None
    if annotation.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
            return tuple(value)
        raise Refused(f"{source}: {name} should be a list of integers but is {value!r}")
    expected = {"str": str, "int": int, "float": float, "bool": bool}[annotation.removesuffix(" | None")]
    if expected is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf * (1 if value > 0 else -1)
    if type(value) is not expected:
        raise Refused(f"{source}: {name} should be of type {expected.__name__} but is {value!r}")
    return value


def _check(config: Config) -> None:
    one_of("model", config.model, MODELS)
    one_of("optimizer", config.optimizer, OPTIMIZERS)
    one_of("precision", config.precision, PRECISIONS)
    for name, value in (("lr", config.lr), ("tau_theta", config.tau_theta)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise Refused(f"{name} should be > 0 and finite but is {value}")
        if value is not None and not FLOATS[0] <= value <= FLOATS[1]:
            raise Refused(f"{name} should be {FLOATS[0]:g} to {FLOATS[1]:g} but is {value}")
    if not 0 <= config.momentum < 1:
        raise Refused(f"momentum should be in [0, 1) but is {config.momentum}")
    for name, (least, most) in RANGES.items():
        whole = getattr(config, name)
        if whole is not None and not least <= whole <= most:
            raise Refused(f"{name} should be {least} to {most} but is {whole}")
    if config.hidden is not None and not all(1 <= width <= WIDEST for width in config.hidden):
        raise Refused(f"hidden should be widths of 1 to {WIDEST} but is {list(config.hidden)}")
    if not (config.checkpoint_seconds >= 0 and math.isfinite(config.checkpoint_seconds)):
        raise Refused(f"checkpoint_seconds should be >= 0 and finite but is {config.checkpoint_seconds}")
