"""What the callbacks of all libraries share: a model that is wrapped while a trainer runs, and then given back."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from proxprop.conversion import revert
from proxprop.deferred import Attached
from proxprop.nn import ProximalLayer
from proxprop.recipe import Options, wrap


class Session:
    """One call of a trainer: `proxprop.wrap` at its start, the model as it was before at its end.

    Args:
        optimizer: as in `wrap`.
        model: as in `wrap`. Layers that were proximal before stay so.
        options: as in `wrap`.
        state: running averages to go on from; none to start anew.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module,
        options: Options,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model = model
        self._converts = not any(isinstance(module, ProximalLayer) for module in model.modules())
        self.attached: Attached = wrap(optimizer, model, **options)
        if not state:
            return
        try:
            self.attached.load_state_dict(state)
        except ValueError:
            self.end()
            raise

    def solve(self, optimizer: Optimizer) -> None:
        """Turn the gradients of what an optimizer holds into directions, ahead of clipping."""
        self.attached.solve(_parameters(optimizer))

    def end(self) -> None:
        """Detach, and revert what was converted at the start."""
        self.attached.detach()
        if self._converts:
            revert(self._model)


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
