"""The most memory that some work holds at once, on any device."""

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that `work` holds at most at once, beyond what is held before it.

    On a CPU they are counted by torch's profiler, an operation's own memory as if it were taken when it begins.

    >>> peak(lambda: torch.zeros(1000), torch.device("cpu"))
    4000
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = sorted(seen.events() or [], key=lambda event: event.time_range.start)
    changes = (
        event.cpu_memory_usage if event.name == "[memory]" else event.self_cpu_memory_usage
        for event in events
    )
    return max(itertools.accumulate(changes), default=0)
