"""Warn once for a layer whose solve failed, without making a GPU wait."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class FailureWarner:
    """Warns of the first failure that it is told of.

    On a GPU the flag is copied to the host in the background and looked at in a later call.
    """

    warned: bool = False
    pending: tuple[Tensor, torch.cuda.Event] | None = field(default=None, compare=False, repr=False)

    def note(self, layer: str, failed: Tensor | None, reason: str) -> None:
        """Look at the outcome of one solve.

        Args:
            layer: how the warning calls the layer.
            failed: true where the solve failed.
            reason: what the warning says, `Solver.failure`.
        """
        if failed is None or self.warned or torch.compiler.is_compiling():
            return
        if failed.is_meta or type(failed) is not Tensor:  # a stand-in, such as a fake tensor, has no value
            return
        if failed.device.type != "cuda":
            self._warn_if(any(failed.tolist()), layer, reason)
        elif not torch.cuda.is_current_stream_capturing():
            self._look_later(failed.any(), layer, reason)

    def _look_later(self, flag: Tensor, layer: str, reason: str) -> None:
        if self.pending is not None:
            arrived, event = self.pending
            if not event.query():
                return
            self._warn_if(bool(arrived), layer, reason)
        event = torch.cuda.Event()
        self.pending = flag.to("cpu", non_blocking=True), event
        event.record()

    def _warn_if(self, failed: bool, layer: str, reason: str) -> None:
        if not failed:
            return
        self.warned = True
        message = f"{layer}: {reason}. This layer will not warn again."
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {"warned": self.warned, "pending": None}
