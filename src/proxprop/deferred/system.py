"""One system in deferred mode: the parameters it is about, and S as summed since their gradient was zeroed."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from proxprop.backward import precision
from proxprop.deferred.equation import Equation
from proxprop.distributed import mesh_of
from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solve import DIAGONAL


class System(Equation):
    """S and the number of samples of one part of a layer, summed by autograd as the gradients of two leaves.

    The leaves have a shape but no memory; what backward passes add to them is in their `.grad`, exactly where and
    when the parameters' own `.grad` is added to. When the user starts a new gradient (`zero_grad`, to None or to
    zero), S is started anew by the next backward pass.

    Args:
        name: how messages call it.
        layer: whose settings apply.
        part: the parameters' blocks and their layout.
        counted: whether the number of samples is needed whatever the settings.
    """

    def __init__(self, name: str, layer: ProximalLayer, part: Part, counted: bool = False) -> None:
        super().__init__(name, layer, Equation.of(name, layer, part).blocks, part.layout)
        self.counted, self.usual = counted, part.usual
        self.when_summed: Callable[[System], None] | None = None
        """Is called in every backward pass as soon as this system's S holds all that the pass adds to it."""
        self._leaves: tuple[Tensor, ...] = ()
        self._key: tuple[object, ...] = ()
        self._task = -1
        self._summed = False
        self._calls = 0
        self._versions: dict[nn.Parameter, int] = {}
        self._solved: dict[nn.Parameter, int] = {}
        if self.trained:  # ahead of the first call, which may be a compiled one
            parameter = self.trained[0].parameter
            self.leaves(parameter.device, precision(parameter))
        self._hooks = [p.register_hook(self._notice) for p in self.parameters if p.requires_grad]

    @property
    def S(self) -> Tensor | None:
        """S as summed so far, or its diagonal; None where nothing was."""
        return self._leaves[0].grad if self._leaves else None

    @property
    def samples(self) -> Tensor | None:
        """The number of samples S was summed over; None where nothing was or nobody counts."""
        return self._leaves[1].grad if len(self._leaves) > 1 else None

    @property
    def counts(self) -> bool:
        """Whether the number of samples is needed."""
        return self.counted or self.layer._settings.scaling == "gradient"

    def count_call(self) -> int:
        """The number of this call since the last solve."""
        self._calls += 1
        return self._calls

    def leaves(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The leaves for S and the number of samples, or for S alone."""
        trained = [block is not None and block.trained for block in self.blocks]
        key = (device, dtype, self.counts, *trained)
        if key != self._key:
            self._leaves, self._key = tuple(self._new_leaves(device, dtype)), key
        return self._leaves

    def _new_leaves(self, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
        layout = self.layout
        groups, _, features, _ = layout.sizes
        diagonal = DIAGONAL in layout.spaces
        shapes = [(groups, features) if diagonal else (groups, features, features)]
        for shape in [*shapes, ()] if self.counts else shapes:
            leaf = torch.zeros((), device=device, dtype=dtype).expand(shape).requires_grad_()
            leaf.register_hook(self._notice)
            leaf.register_post_accumulate_grad_hook(self._note_sum)
            yield leaf

    def forget(self) -> None:
        """Drop what was summed."""
        for leaf in self._leaves:
            leaf.grad = None

    def take(self) -> tuple[Tensor, Tensor | None]:
        """What was summed, which is forgotten here."""
        S, samples = self.S, self.samples
        assert S is not None
        self.forget()
        return S, samples

    @property
    def current(self) -> tuple[Tensor, ...]:
        """The leaves of the last call, which have shape, precision and device of what is summed."""
        return self._leaves

    def shares(self) -> list[Tensor]:
        """What was summed on this rank, zeros in place of nothing; forgotten here."""
        found = [leaf.grad if leaf.grad is not None else leaf.new_zeros(leaf.shape) for leaf in self._leaves]
        self.forget()
        return found

    def note_solved(self) -> None:
        """Remember that the gradients hold the direction now."""
        self._solved, self._calls = self._current_versions(), 0

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _notice(self, _: Tensor) -> None:
        """A gradient, or S, is about to be added to: the moment to see whether the gradient was started anew."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task, self._summed = task, False
        if self.S is not None:
            self._forget_if_zeroed()
        else:
            self._refuse_to_mix()
        before = self._current_versions()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._note_pass(before))

    def _forget_if_zeroed(self) -> None:
        """Drop S if a gradient that belongs to it was set to None or to zero; the latter is decided on the device."""
        if any(mesh_of(p) is not None for p in self.parameters):
            self._forget_if_none()
            return
        gradients = {p: p.grad for p in self._versions} or {p: p.grad for p in self.parameters}
        if all(g is None for g in gradients.values()) or any(gradients[p] is None for p in self._versions):
            self.forget()
            return
        changed = [g for p, g in gradients.items() if g is not None and g._version != self._versions.get(p)]
        zeroed = [g._nnz() == 0 if g.is_sparse else ~g.any() for g in changed]
        for flag in zeroed:
            for leaf in self._leaves:
                if leaf.grad is not None:
                    leaf.grad.masked_fill_(torch.as_tensor(flag, device=leaf.device), 0.0)

    def _forget_if_none(self) -> None:
        """For gradients that are spread over ranks: FSDP2 keeps them to itself until it averages them."""
        if any(p.grad is None for p in self._versions):
            self.forget()

    def _refuse_to_mix(self) -> None:
        """Raise if a gradient is surely still the direction of the last solve."""
        for parameter, version in self._solved.items():
            if parameter.grad is not None and parameter.grad._version == version:
                raise RuntimeError(
                    f"{self.name}: .grad still holds the direction of the last step, and a gradient can't be added to "
                    "it. Call zero_grad() on the model between a step and the next backward"
                )
        self._solved = {}

    def _note_sum(self, _: Tensor) -> None:
        self._summed = True
        if self.when_summed is not None:
            self.when_summed(self)

    def _note_pass(self, before: dict[nn.Parameter, int]) -> None:
        """A backward pass has ended: remember the gradients that S belongs to."""
        self._task = -1
        self._versions = self._current_versions()
        if not self._summed and self._versions != before:
            raise RuntimeError(
                f"{self.name}: backward(inputs=...) added to the gradient but not to S, so that no step can be solved. "
                "Call backward() without inputs, or proxprop.detach(model) first"
            )

    def _current_versions(self) -> dict[nn.Parameter, int]:
        return {p: p.grad._version for p in self.parameters if p.grad is not None}
