"""Ctrl-C stops after the current step: the signal only raises a flag, and the training loop looks at it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Flag:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.raised = False


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Within, the first Ctrl-C (or SIGTERM) raises the flag; a second one interrupts at once.

    Outside the main thread, where Python allows no signal handlers, the flag is never raised.
    """
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {int(number): signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        flag.raised = True
        signal.signal(number, before[number])

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield flag
    finally:
        for number in SIGNALS:
            signal.signal(number, before[number])
