"""The base of all callbacks: a model is wrapped while a trainer runs, and then given back."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from proxprop.conversion import revert
from proxprop.deferred import Attached
from proxprop.nn import ProximalLayer
from proxprop.recipe import Options, wrap


class Session:
    """Mixed into a callback: `proxprop.wrap` when training starts, the model as it was before when training ends.

    Args:
        options: what `proxprop.wrap` takes.
    """

    attached: Attached | None = None
    """The handle that `proxprop.wrap` returned, while training runs; None otherwise."""

    def __init__(self, **options: Unpack[Options]) -> None:
        self._options = options
        self._converted: nn.Module | None = None

    def _begin(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module,
        state: Mapping[str, Tensor] | None = None,
    ) -> Attached:
        """Wrap the model, and go on from these running averages. Layers that were proximal before stay so."""
        self._end()
        plain = not any(isinstance(module, ProximalLayer) for module in model.modules())
        self.attached = attached = wrap(optimizer, model, **self._options)
        self._converted = model if plain else None
        try:
            if state:
                attached.load_state_dict(state)
        except ValueError:
            self._end()
            raise
        return attached

    def _solve(self, optimizer: Optimizer) -> None:
        """Turn the gradients of what an optimizer holds into directions, ahead of clipping."""
        if self.attached is not None:
            self.attached.solve(held for group in optimizer.param_groups for held in group["params"])

    def _end(self) -> None:
        """Detach, and revert what was converted at the start; also after an error."""
        if self.attached is not None:
            self.attached.detach()
        if self._converted is not None:
            revert(self._converted)
        self.attached = self._converted = None
