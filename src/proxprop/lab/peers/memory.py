"""The most memory that some work holds at once, on any device."""

import itertools
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's own log hides ours


def peak(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """What `work` returns, and the bytes that it holds at most at once, beyond what is held before it.

    On a CPU they are counted by torch's profiler, an operation's own memory as if it were taken when it begins.

    >>> peak(lambda: torch.zeros(1000).sum(), torch.device("cpu"))
    (tensor(0.), 4004)
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    events = sorted(seen.events() or [], key=lambda event: event.time_range.start)
    changes = (
        event.cpu_memory_usage if event.name == "[memory]" else event.self_cpu_memory_usage
        for event in events
    )
    return result, max(itertools.accumulate(changes), default=0)
