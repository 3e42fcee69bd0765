"""One system in deferred mode: the parameters it is about, and S as summed since their gradient was zeroed."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from proxprop.backward import no_autocast, precision
from proxprop.deferred.equation import Equation
from proxprop.deferred.rows import rows_pay
from proxprop.distributed import mesh_of, several_ranks
from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL
from proxprop.transfer import Affine, LinearTransfer, Transfer

if TYPE_CHECKING:
    from proxprop.deferred.watch import Watch


def weakly(method: Any) -> Callable[[Tensor], None]:
    """A hook that does not keep its object alive: Python can't see cycles that lead through a tensor's graph."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(tensor: Tensor) -> None:
        found = owner()
        if found is not None:
            function(found, tensor)

    return hook


class System(Equation):
    """S and the number of samples of one part of a layer, summed by autograd as the gradients of leaves.

    The leaves have a shape but no memory; what backward passes add to them is in their `.grad`, exactly where and
    when the parameters' own `.grad` is added to. The number of samples has one only where it is needed and S does
    not hold it.

    As long as a step is cheaper from the rows of all calls than from S, the rows are kept instead, and the leaves are
    left alone. Rows are copied: a caller may write the next batch where this one was.

    Args:
        name: how messages call it.
        layer: whose settings apply.
        part: the parameters' blocks and their layout.
        counted: whether the number of samples is needed whatever the settings.

    Attributes:
        when_summed: called in every backward pass as soon as S holds all that the pass adds to it.
        watch: sees to it that S is started anew when the gradient is.
        calls: how many calls were counted since the last solve.
        alone: whether nothing but the step of this system needs its S.
    """

    def __init__(self, name: str, layer: ProximalLayer, part: Part, counted: bool = False) -> None:
        super().__init__(name, layer, Equation.of(name, layer, part).blocks, part.call.layout)
        self.counted, self.usual = counted, part.usual
        self.when_summed: Callable[[System], None] | None = None
        self._leaves: tuple[Tensor, ...] = ()
        self._key: tuple[object, ...] = ()
        self._ones = self.alone = False
        self._rows: list[Tensor] = []
        self.watch: Watch | None = None
        self.calls = 0
        if self.trained:  # ahead of the first call, which may be a compiled one
            parameter = self.trained[0].parameter
            self.leaves(parameter.device, precision(parameter))

    @property
    def S(self) -> Tensor | None:
        """S as summed so far, or its diagonal; None where nothing was. Formed here where rows were kept."""
        self.sum_rows()
        return self._leaves[0].grad if self._leaves else None

    @property
    def holds(self) -> bool:
        """Whether anything was summed or kept."""
        return bool(self._rows) or any(leaf.grad is not None for leaf in self._leaves)

    @property
    def _sums(self) -> list[Tensor]:
        """What was summed in each leaf; empty where nothing was."""
        return [leaf.grad for leaf in self._leaves if leaf.grad is not None]

    @property
    def samples(self) -> Tensor | None:
        """The number of samples S was summed over; None where nothing was or nobody counts."""
        return self.split(self._sums)[1] if self._sums else None

    @property
    def counts(self) -> bool:
        """Whether the number of samples is needed."""
        return self.counted or self.layer._settings.scaling == "gradient"

    def split(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """S and the number of samples from what was summed in the leaves; None where nobody counts.

        Under a bias S ends with the square of a column of ones, which is that number.
        """
        S, *count = sums
        if self._ones and self.counts:
            return S, S[0, -1, -1]
        return S, count[0] if count else None

    def count_call(self) -> int:
        """The number of this call since the last solve."""
        self.calls += 1
        return self.calls

    def leaves(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The leaves for S and perhaps for the number of samples."""
        trained = [block is not None and block.trained for block in self.blocks]
        key = (device, dtype, self.counts, *trained)
        if key != self._key:
            self._refuse_to_change()
            self._leaves, self._key, self._rows = tuple(self._new_leaves(device, dtype)), key, []
        return self._leaves

    @property
    def count(self) -> int:
        """How many leaves there are."""
        return len(self._leaves)

    def keep(self, transfer: Transfer, dtype: torch.dtype) -> bool:
        """Keep the rows of a call, if that pays for those of all calls together; else S of all is to be summed."""
        if not self.alone or several_ranks() or any(mesh_of(p) is not None for p in self.parameters):
            return False
        if not isinstance(transfer, LinearTransfer) or transfer.weight_shape is None:
            return False
        if self.watch is not None:
            self.watch.notice()
        (A,) = transfer.rows()
        samples = len(A) + sum(len(rows) for rows in self._rows)
        sizes = transfer.sizes._replace(samples=samples)
        if self._sums or not rows_pay(sizes, self.layer._settings):
            self.sum_rows()
            return False
        self._rows.append(A.to(dtype, copy=True))
        if self.watch is not None:
            self.watch.note_sum()
        return True

    def take_rows(self) -> LinearTransfer | None:
        """The calls whose rows were kept, as one, and forgotten here; None where S was summed or is cheaper now."""
        if not self._rows:
            return None
        call = self._call()
        if self._sums or not rows_pay(call.sizes, self.layer._settings):
            return None
        self.forget()
        return call

    def _call(self) -> LinearTransfer:
        layout = self.layout
        assert isinstance(layout, LinearTransfer)
        precise = [rows.to(self._leaves[0].dtype) for rows in self._rows]
        return layout.with_rows(precise[0] if len(precise) == 1 else torch.cat(precise))

    @torch.no_grad()
    def sum_rows(self) -> None:
        """Form S of the rows that were kept, and go on with that."""
        if not self._rows:
            return
        call, self._rows = self._call(), []
        with no_autocast(call.input.device.type):
            S = call.gram().contiguous()  # as autograd lays out what it adds to
        for leaf, more in zip(self._leaves, (S, S.new_full((), call.sizes.samples)), strict=False):
            leaf.grad = more if leaf.grad is None else leaf.grad + more

    @property
    def observed(self) -> bool:
        """Whether S is summed in this step."""
        return self.watch is None or self.watch.cluster.observed

    def note_average(self) -> None:
        """A backward pass begins whose gradients are averaged over ranks, also of a layer that this one did not use."""
        if self.watch is not None:
            self.watch.waiting = True

    def note_again(self) -> None:
        """A backward pass adds to the gradient what S was added for before."""
        if self.watch is not None:
            self.watch.notice()
            self.watch.note_sum()

    def _refuse_to_change(self) -> None:
        if self.holds and any(parameter.grad is not None for parameter in self.parameters):
            raise RuntimeError(
                f"{self.name}: device, precision, scaling or which parameters are trained changed between backward "
                "passes of one step, whose S can't be added up. Call zero_grad(), or step, before such a change"
            )

    def _new_leaves(self, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
        layout = self.layout
        groups, _, features, _ = layout.sizes
        diagonal = DIAGONAL in layout.spaces
        shapes = [(groups, features) if diagonal else (groups, features, features)]
        self._ones = isinstance(layout, Affine) and layout.bias
        for shape in [*shapes, ()] if self.counts and not self._ones else shapes:
            leaf = torch.zeros((), device=device, dtype=dtype).expand(shape).requires_grad_()
            leaf.register_hook(weakly(self._notice))
            leaf.register_post_accumulate_grad_hook(weakly(self._note_sum))
            yield leaf

    def forget(self) -> None:
        """Drop what was summed."""
        self._rows = []
        for leaf in self._leaves:
            leaf.grad = None

    def take(self) -> tuple[Tensor, Tensor | None]:
        """What was summed, which is forgotten here."""
        self.sum_rows()
        found = self.split(self._sums)
        self.forget()
        return found

    @property
    def current(self) -> tuple[Tensor, ...]:
        """The leaves of the last call, which have shape, precision and device of what is summed."""
        return self._leaves

    def shares(self) -> list[Tensor]:
        """What was summed on this rank, zeros in place of nothing; forgotten here."""
        self.sum_rows()
        found = [leaf.grad if leaf.grad is not None else leaf.new_zeros(leaf.shape) for leaf in self._leaves]
        self.forget()
        return found

    def _notice(self, _: Tensor) -> None:
        """S is about to be added to."""
        if self.watch is not None:
            self.watch.notice()

    def _note_sum(self, _: Tensor) -> None:
        """S was added to."""
        if self.watch is not None:
            self.watch.note_sum()
        if self.when_summed is not None:
            self.when_summed(self)
