"""What a run ran on: versions, device, commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch

import proxprop


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit, as plain values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "proxprop": proxprop.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": metadata.version("safetensors"),
        "platform": platform.platform(),
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor's and its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU (mps)"
    return f"{_processor()}, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit of the checkout this package runs from, with + if the package was changed; None outside of one.

    Records that a run adds to the checkout are no change of the package. A copy without its history can be
    told by the variable PROXPROP_COMMIT.
    """
    if told := os.environ.get("PROXPROP_COMMIT"):
        return told
    folder = Path(proxprop.__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    inside = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    if not head or inside is None:
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
