"""Checkpoints: safetensors behind a SHA-256, written atomically, the last two kept, no pickle anywhere.

A file is 64 hexadecimal digits, a newline, and a safetensors whose metadata holds the rest as JSON.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from proxprop import Attached
from proxprop.lab.records.sealed import Damaged, write_bytes

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def write(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write one checkpoint, then remove all but the last two."""
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()
    }
    content = save(tensors, metadata={"values": json.dumps(checkpoint.values)})
    digest = hashlib.sha256(content).hexdigest().encode()
    write_bytes(folder / f"checkpoint-{step:09d}.ckpt", digest + b"\n" + content)
    for old in paths(folder)[:-KEPT]:
        old.unlink()


def paths(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("checkpoint-*.ckpt"))


def read(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        Damaged: it is cut off or changed.
    """
    content = path.read_bytes()
    digest, body = content[:65], content[65:]
    if digest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise Damaged(f"{path.name} is damaged: its SHA-256 does not fit")
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        return Checkpoint(load(body), json.loads(header["__metadata__"]["values"]))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Damaged(
            f"{path.name} is damaged: it does not hold what a checkpoint holds ({error})"
        ) from error


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The last good checkpoint, or None, and a note for every damaged one that was passed over."""
    notes: list[str] = []
    for path in reversed(paths(folder)):
        try:
            return read(path), notes
        except Damaged as damage:
            notes.append(f"{damage}; going back to the one before")
            path.unlink()
    return None, notes


def remove(folder: Path) -> None:
    """Remove all checkpoints of a run that is done."""
    for path in paths(folder):
        path.unlink()


@dataclass(frozen=True)
class Trained:
    """What training changes, beside random number generators."""

    model: nn.Module
    optimizers: list[Optimizer]
    attached: Attached | None = None


def pack(trained: Trained, device: torch.device) -> Checkpoint:
    """Parameters, buffers, optimizer state, running averages, random number generators."""
    tensors = {f"model/{name}": tensor for name, tensor in trained.model.state_dict().items()}
    if trained.attached is not None:
        tensors |= {f"running/{name}": tensor for name, tensor in trained.attached.state_dict().items()}
    values: dict[str, Any] = {"optimizers": []}
    for number, optimizer in enumerate(trained.optimizers):
        state = optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{number}/{index}/{key}"] = value
                else:
                    plain.setdefault(str(index), {})[key] = value
        values["optimizers"].append({"groups": state["param_groups"], "plain": plain})
    tensors["random/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return Checkpoint(tensors, values)


def unpack(checkpoint: Checkpoint, trained: Trained, device: torch.device) -> None:
    """Put everything `pack` took back in place."""
    named = checkpoint.tensors
    trained.model.load_state_dict(_under("model/", named))
    if trained.attached is not None:
        trained.attached.load_state_dict(_under("running/", named))
    for number, (optimizer, saved) in enumerate(
        zip(trained.optimizers, checkpoint.values["optimizers"], strict=True)
    ):
        state: dict[int, dict[str, Any]] = {
            int(index): dict(plain) for index, plain in saved["plain"].items()
        }
        prefix = f"optimizer/{number}/"
        for name, tensor in named.items():
            if name.startswith(prefix):
                index, key = name.removeprefix(prefix).split("/", 1)
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": saved["groups"]})
    torch.set_rng_state(named["random/cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(named["random/cuda"], device)


def _under(prefix: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with a prefix, by the rest of their name."""
    return {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
