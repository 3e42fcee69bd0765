"""Warn once for a layer whose factorisation failed, without making a GPU wait."""

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

    def note(self, layer: str, failed: Tensor | None) -> None:
        """Look at the outcome of one solve; `layer` is how the warning calls the layer."""
        if failed is None or self.warned or failed.is_meta or torch.compiler.is_compiling():
            return
        if failed.device.type != "cuda":
            self._warn_if(layer, any(failed.tolist()))
        elif not torch.cuda.is_current_stream_capturing():
            self._look_later(layer, failed.any())

    def _look_later(self, layer: str, flag: Tensor) -> None:
        if self.pending is not None:
            arrived, event = self.pending
            if not event.query():
                return
            self._warn_if(layer, bool(arrived))
        event = torch.cuda.Event()
        self.pending = flag.to("cpu", non_blocking=True), event
        event.record()

    def _warn_if(self, layer: str, failed: bool) -> None:
        if not failed:
            return
        self.warned = True
        warnings.warn(
            f"{layer}: I/τ_θ + AᵀA is not positive definite in this precision, so the step was replaced "
            "by a scaled gradient. Likely causes: tau_theta is too large for float32, inputs of very large or "
            "very different scale, or many repeated inputs. Try a smaller tau_theta, CG(iterations), "
            "normalised inputs or float64. This layer will not warn again.",
            RuntimeWarning,
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"warned": self.warned, "pending": None}
