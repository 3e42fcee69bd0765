"""Work spread over processes, none of which outlives the one that started it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from proxprop.lab.interruption import SIGNALS
from proxprop.lab.refusal import Interrupted, Refused

T = TypeVar("T")


@contextmanager
def spread(work: Callable[..., T], jobs: int, *arguments: Iterable[Any]) -> Iterator[Iterator[T]]:
    """Results of `map(work, *arguments)`, computed by so many processes; leaving ends them, finished or not.

    The first Ctrl-C (or SIGTERM) asks every process to stop after its step and raises KeyboardInterrupt; another one
    kills them. They end by themselves when this process does, even by `kill -9`.

    Args:
        work: a function of a module, as it has to be found by the other processes.
        jobs: how many processes.
        arguments: as for `map`; the shortest ends.

    Raises:
        Refused: one of the processes was killed.
    """
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin)
    others = set(multiprocessing.active_children())
    with _signals({signal.SIGINT: signal.SIG_IGN}):  # inherited: only a run under way hears Ctrl-C
        results = pool.map(partial(_work, work), *arguments)
    stop = _Stop([child for child in multiprocessing.active_children() if child not in others])
    with _signals(dict.fromkeys(SIGNALS, stop)):
        try:
            yield results
        except BrokenProcessPool as error:
            raise Refused(
                "one of the processes was killed, perhaps for want of memory; give the same command again to go on, "
                "with fewer --jobs"
            ) from error
        except BaseException:
            stop.ask()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


class _Stop:
    """Ends processes: asked once they stop after their step, asked by a signal after that they are killed."""

    def __init__(self, workers: list[BaseProcess]) -> None:
        self._workers = workers
        self._asked = False

    def ask(self) -> None:
        """Let every process stop after its step and take no more work; a second request would interrupt the step."""
        if not self._asked:
            self._asked = True
            for worker in self._workers:
                worker.terminate()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._asked:
            for worker in self._workers:
                worker.kill()
        else:
            self.ask()
            raise KeyboardInterrupt


@contextmanager
def _signals(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Within, these signals are handled so; outside the main thread, where Python allows no handlers, as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Asked:
    """What a worker remembers of being asked to stop, as more work may already be waiting for it.

    A run under way hears SIGTERM itself (see `interruption`); this handles what comes before, after and between runs.
    """

    def __init__(self) -> None:
        self.before = False
        self.working = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self.before = True
        if self.working:
            raise KeyboardInterrupt


_asked = _Asked()


def _begin() -> None:
    """Prepare a worker."""
    signal.signal(signal.SIGTERM, _asked)
    _end_with_parent()


def _work(work: Callable[..., T], *arguments: Any) -> T:
    """Work in a worker, unless it was asked to stop."""
    _asked.working = True
    try:
        if _asked.before:
            raise KeyboardInterrupt
        return work(*arguments)
    except (Interrupted, KeyboardInterrupt):
        _asked.before = True
        raise
    finally:
        _asked.working = False


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, whatever ended that."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker has a parent"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
