"""Uneven inputs: `torch.distributed.algorithms.join.Join([model, attached])`."""

from abc import abstractmethod
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from proxprop.deferred.reduction import Reduction


class Joins(Joinable):
    """What torch's join context asks of a participant beside the model itself.

    A rank that has run out of inputs brings zeros to the sums of those that have not, and keeps its running averages
    in step with theirs. As DDP divides gradients by all ranks (or by those that still have inputs, with
    `divide_by_initial_world_size=False`), D is that of one process whose loss is the sum of the remaining ranks'
    losses over that number.
    """

    reduction: Reduction

    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def solve(self) -> None:
        """Take a step's sums in."""

    def shadow(self) -> None:
        """Take part, with nothing to add, in a step of ranks that still have inputs."""
        if self.reduction.ranks.wrapper.require_forward_param_sync:  # set by DDP's own shadow
            self.reduction.shadow()
            self.solve()

    def refuse_uneven_inputs(self) -> None:
        """Raise inside a join context that does not know of this attachment: ranks would wait for each other."""
        wrapper = self.reduction.ranks.wrapper
        if wrapper is not None and wrapper._join_config.enable and not self._join_config.enable:
            raise RuntimeError(
                "the model is in a join context for uneven inputs that does not know of proxprop. Instead of "
                "`with model.join():` write `with Join([model, attached]):`, with "
                "`attached = proxprop.attach(optimizer, model)` and Join from torch.distributed.algorithms.join"
            )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in every iteration of the others."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The wrapper's."""
        device: torch.device = self.reduction.ranks.wrapper.join_device
        return device

    @property
    def join_process_group(self) -> Any:
        """The wrapper's."""
        return self.reduction.ranks.wrapper.join_process_group


class _Shadow(JoinHook):
    def __init__(self, joins: Joins) -> None:
        self.joins = joins

    def main_hook(self) -> None:
        self.joins.shadow()
