"""ProxProp under the Trainer of `transformers`: one callback, whose state is in the Trainer's checkpoints."""

import warnings
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from proxprop.integrations.session import Session

KEY = "proxprop"
"""Where the optimizer's saved state has the running averages: an entry of its first parameter group."""


class ProxPropCallback(Session, TrainerCallback):
    """Train with proximal directions: pass it to the Trainer, and change nothing else.

    When training starts it converts the model and attaches the optimizer that the Trainer made (`proxprop.wrap`). Each
    step is solved once from all accumulated micro-batches. When training ends the model is plain again.

    - Clipping: the Trainer clips before any callback can solve. So from the start of a step until its solve the
      callback sets `max_grad_norm` of the arguments to 0, and then clips the direction to that norm itself. The
      `grad_norm` in the Trainer's logs is the gradient's, as without proxprop.
    - Checkpoints: running averages are saved with the optimizer's state, and restored with it, so that
      `trainer.train(resume_from_checkpoint=...)` goes on as if training had not stopped. A warning says so where a
      checkpoint has none.

    Args:
        options: what `proxprop.wrap` takes: `running`, `exclude`, `include_last`, ...

    Attributes:
        attached: the handle while training runs; None otherwise.

    Example:
        >>> callback = ProxPropCallback(exclude=["score"])  # Trainer(..., callbacks=[callback])
    """

    _hook: RemovableHandle | None = None
    _max_norm = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert, attach, and go on from the checkpoint's averages."""
        optimizer: Optimizer = kwargs["optimizer"]
        saved: dict[str, Tensor] | None = optimizer.param_groups[0].pop(KEY, None)
        attached = self._begin(optimizer, kwargs["model"], saved)
        if state.global_step and saved is None and attached.averages is not None:
            warnings.warn(
                f"training resumes at step {state.global_step} from a checkpoint without running averages, so they "
                "start anew",
                UserWarning,
                stacklevel=2,
            )
        self._hook = attached.optimizers[0].register_state_dict_post_hook(self._save)

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Put the running averages into what the optimizer saves."""
        if self.attached is not None and (averages := self.attached.state_dict()):
            state["param_groups"][0][KEY] = averages

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the Trainer from clipping the gradient."""
        if args.max_grad_norm:  # 0 where an error ended the step before
            self._max_norm, args.max_grad_norm = args.max_grad_norm, 0.0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Solve, then clip as the Trainer would have."""
        self._solve(kwargs["optimizer"])
        args.max_grad_norm, self._max_norm = self._max_norm, 0.0
        if args.max_grad_norm:
            nn.utils.clip_grad_norm_(kwargs["model"].parameters(), args.max_grad_norm)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the model back as it was."""
        self._end()

    def _end(self) -> None:
        """End the session, and save no running averages any more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        super()._end()
