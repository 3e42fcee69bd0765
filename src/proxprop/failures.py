"""Warn once for a layer whose solve failed, without making a GPU wait."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proxprop.device import is_transformed
from proxprop.tuning import FAILURES_CHECKED_EVERY


@dataclass
class FailureWarner:
    """Warns of a layer's first failure.

    On a GPU the flag is copied to the host in the background and read in a later call. That takes the host longer than
    a launch, so only some solves are checked.
    """

    warned: bool = False
    solves: int = 0
    pending: tuple[Tensor, torch.cuda.Event] | None = field(default=None, compare=False, repr=False)

    def note(self, layer: str, failed: Tensor | None, reason: str) -> None:
        """Look at the outcome of one solve.

        Args:
            layer: name of the layer in the warning.
            failed: true where the solve failed.
            reason: text of the warning, `Solver.failure`.
        """
        if failed is None or self.warned:
            return
        if failed.is_cuda:
            self.solves += 1
            if self.pending is None and self.solves % FAILURES_CHECKED_EVERY != 1:
                return
        if failed.is_meta or is_transformed(failed):  # a stand-in has no value
            return
        if not failed.is_cuda:
            self._warn_if(any(failed.tolist()), layer, reason)
        elif not torch.cuda.is_current_stream_capturing():
            self._look_later(failed, layer, reason)

    def _look_later(self, failed: Tensor, layer: str, reason: str) -> None:
        if self.pending is not None and self.pending[1].query():
            arrived, self.pending = bool(self.pending[0]), None
            self._warn_if(arrived, layer, reason)
        if self.pending is None and self.solves % FAILURES_CHECKED_EVERY == 1:
            event = torch.cuda.Event()
            self.pending = failed.any().to("cpu", non_blocking=True), event
            event.record()

    def _warn_if(self, failed: bool, layer: str, reason: str) -> None:
        if not failed:
            return
        self.warned = True
        message = f"{layer}: {reason}. This layer will not warn again."
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {"warned": self.warned, "solves": self.solves, "pending": None}
