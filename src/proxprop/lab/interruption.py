"""Ctrl-C stops after the current step: the signal only raises a flag, and the training loop looks at it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

GRACE = 10.0
"""Seconds that a step may go on for once it was asked to stop; a longer one is interrupted."""


class Flag:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.raised = False

    def look(self) -> bool:
        """Whether to stop now; if so, what is written from here on is no longer interrupted."""
        if self.raised:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.raised


@contextmanager
def interruptible() -> Iterator[Flag]:
    """Within, the first Ctrl-C (or SIGTERM) raises the flag; a second one interrupts at once, as `GRACE` seconds do.

    Outside the main thread, where Python allows no signal handlers, the flag is never raised.
    """
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {int(number): signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}

    def handle(number: int, frame: FrameType | None) -> None:
        flag.raised = True
        signal.signal(number, before[number])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield flag
    finally:
        if flag.raised:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for changed, handler in before.items():
            signal.signal(changed, handler)
