"""ProxProp under Lightning's Trainer: one callback, whose state is in Lightning's checkpoints."""

from typing import Any, Unpack

from torch import Tensor
from torch.optim import Optimizer

from proxprop.integrations.session import Session
from proxprop.recipe import Options

try:
    from pytorch_lightning import Callback, LightningModule, Trainer
except ImportError:  # the same library under its newer name
    from lightning.pytorch import Callback, LightningModule, Trainer  # type: ignore[import-not-found, no-redef]


class ProxPropCallback(Session, Callback):
    """Train with proximal directions: pass it to the Trainer, and change nothing else.

    When training starts it converts the module and attaches its optimizers (`proxprop.wrap`). Each step is solved once
    from all accumulated micro-batches, before Lightning clips. Running averages are saved in checkpoints and restored
    from them, so that a resumed run goes on as if it had not stopped. When training ends the module is plain again.

    Args:
        options: what `proxprop.wrap` takes: `running`, `exclude`, `include_last`, ...

    Attributes:
        attached: the handle while training runs; None otherwise.

    Example:
        >>> callback = ProxPropCallback(exclude=["net.head"])
        >>> trainer = Trainer(callbacks=[callback], gradient_clip_val=1.0, logger=False)
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        self._given: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Convert, attach, and go on from the checkpoint's averages."""
        self._begin(trainer.optimizers, pl_module, self._given)
        self._given = {}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Solve; Lightning clips after this."""
        self._solve(optimizer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module back as it was."""
        self._end()

    def _end(self) -> None:
        """End the session, whose averages can still be saved."""
        if self.attached is not None:
            self._last = self.attached.state_dict()
        super()._end()

    def state_dict(self) -> dict[str, Any]:
        """The running averages, for Lightning's checkpoint."""
        return self.attached.state_dict() if self.attached is not None else self._last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint has until training starts."""
        self._given = state_dict
