"""Keeps S in step with the gradient it belongs to: started anew when the user zeroes it, and never mixed."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from proxprop.deferred.system import System, weakly
from proxprop.distributed import mesh_of


class Watch:
    """Watches the gradients of systems that share parameters, mostly of one alone.

    The first sign of a backward pass, before anything is added, is the moment to see what became of the gradient
    since the pass before: set to None, set to zero, or left. What a step that was skipped or given up has summed goes
    with its gradient. On a GPU nothing here waits for the device.

    Args:
        systems: the systems.
    """

    def __init__(self, systems: Sequence[System]) -> None:
        self.systems = systems
        self.parameters = list({p: None for system in systems for p in system.parameters})
        self._task = -1
        self._summed = self._warned = self._mixed = False
        self._versions: dict[nn.Parameter, int] = {}
        self._solved: dict[nn.Parameter, int] = {}
        # A compiled backward may add to the parameters' gradients before it adds to S.
        self._hooks = [
            p.register_hook(weakly(self._before_gradient)) for p in self.parameters if p.requires_grad
        ]
        for system in systems:
            system.watch = self

    def notice(self) -> None:
        """A gradient, or S, is about to be added to."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task, self._summed = task, False
        if any(system.holds for system in self.systems):
            self._forget_if_zeroed()
        before = self._current()
        mixed = self._holds_direction() or (self._mixed and before == self._versions)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._note_pass(before, mixed))

    def note_sum(self) -> None:
        """S was added to."""
        self._summed = True

    def refuse_mixed(self) -> None:
        """Raise if the gradients were added to a direction.

        Only when they are to be solved: a discriminator's often are, by the generator's loss, and then zeroed.
        """
        if self._mixed:
            raise RuntimeError(
                f"{self.systems[0].name}: .grad still held the direction of the last step when backward added to it, "
                "so that it can't be solved for. Call zero_grad() on the model between a step and the next backward"
            )

    def note_solved(self) -> None:
        """The gradients hold the direction now."""
        self._solved = self._current()
        for system in self.systems:
            system.calls = 0

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        for system in self.systems:
            system.watch = None

    def _before_gradient(self, _: Tensor) -> None:
        self.notice()

    def _forget_if_zeroed(self) -> None:
        """Drop S if a gradient that belongs to it was set to None or to zero; the latter is decided on the device."""
        spread = any(mesh_of(p) is not None for p in self.parameters)
        gradients = {p: p.grad for p in self._versions or self.parameters}
        # FSDP2 keeps gradients to itself until it averages them: there, None says nothing before the first was seen.
        none = not self._versions and not spread and all(g is None for g in gradients.values())
        empty = any(g is not None and g.is_sparse and g._nnz() == 0 for g in gradients.values())
        if none or empty or any(gradients[p] is None for p in self._versions):
            for system in self.systems:
                system.forget()
        if none or spread:
            return
        for parameter, gradient in gradients.items():
            if gradient is None or gradient.is_sparse or gradient._version == self._versions.get(parameter):
                continue
            self._clear(~gradient.any())

    def _clear(self, zeroed: Tensor) -> None:
        for system in self.systems:
            system.sum_rows()  # how many rows there are is known on the host
        for leaf in (leaf for system in self.systems for leaf in system.current):
            if leaf.grad is not None:
                leaf.grad.masked_fill_(zeroed.to(leaf.device), 0.0)

    def _holds_direction(self) -> bool:
        """Whether a gradient is surely still the direction of the last solve."""
        return any(p.grad is not None and p.grad._version == version for p, version in self._solved.items())

    def _note_pass(self, before: dict[nn.Parameter, int], mixed: bool) -> None:
        """A backward pass has ended: remember the gradients that S belongs to, and whether they hold a direction."""
        self._task = -1
        self._versions = self._current()
        self._mixed = mixed and self._summed
        if self._summed:
            self._solved = {}
        if not self._summed and self._versions != before and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.systems[0].name}: a backward pass added to the gradient but not to S: backward(inputs=...), "
                "a penalty on the parameters alone, or a forward pass from before attach. The step is solved without "
                "what it would have added. This layer will not warn again",
                RuntimeWarning,
                stacklevel=2,
            )

    def _current(self) -> dict[nn.Parameter, int]:
        """The gradients that are there, and how often each was written to."""
        return {p: p.grad._version for p in self.parameters if p.grad is not None}
