"""Which device, with what precision it multiplies, and what its clock says."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from proxprop.lab.refusal import Refused


def device(name: str) -> torch.device:
    """The device a name stands for; auto takes a GPU where there is one.

    >>> device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise Refused(f"device should be auto, cpu, cuda, cuda:N or mps but is '{name}'") from error
    if found.type not in ("cpu", "cuda", "mps"):
        raise Refused(f"device should be auto, cpu, cuda, cuda:N or mps but is '{name}'")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise Refused(f"device {name} was asked for but torch sees {torch.cuda.device_count()} CUDA devices")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise Refused("device mps was asked for but torch sees no Apple GPU")
    return found


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within, float32 matrix products and convolutions run in full float32, or in TF32 if asked for."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Within, torch computes with so many CPU threads; None leaves their number alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(where: torch.device, precision: str) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where it was asked for."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(where.type, dtype=torch.bfloat16)


def now() -> float:
    """The clock, without waiting for the device."""
    return time.perf_counter()


def wait(where: torch.device) -> float:
    """The clock once the device has finished what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    elif where.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
