"""Where S of a step is summed: a tap on a layer's output hands it to a leaf, beside the gradient.

The layer is torch's own and so is its gradient. The tap is the identity on the output. Its backward hands S, of the
layer's inputs alone, to a leaf as *its* gradient: autograd itself then sums S, over just the calls and backward passes
whose gradients it sums.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from proxprop import device
from proxprop.backward import as_transfer, no_autocast, precision
from proxprop.deferred.equation import Equation
from proxprop.deferred.preconditioner import rows_pay
from proxprop.distributed import mesh_of, several_ranks
from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import is_due
from proxprop.transfer import Affine, LinearTransfer, Shapes, Transfer
from proxprop.transfer.layouts import BlockLayout

if TYPE_CHECKING:
    from proxprop.deferred.gradients import Watch


def weakly(method: Any) -> Callable[[Tensor], None]:
    """A hook that does not keep its object alive: Python can't see cycles that lead through a tensor's graph."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(tensor: Tensor) -> None:
        found = owner()
        if found is not None:
            function(found, tensor)

    return hook


@dataclass(frozen=True)
class Sampling:
    """Draws rows without replacement, the same ones for the same seed, and leaves torch's random state alone.

    Layers with as many samples share a draw: it takes longer than the product of the rows.

    Example:
        >>> Sampling(3, (0, 1)).draw(100, torch.device("cpu")).shape
        torch.Size([3])
    """

    rows: int
    seed: tuple[int, ...]

    def draw(self, samples: int, device: torch.device) -> Tensor:
        """Indices of rows."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return _drawn(self, samples, device, stream)


@lru_cache(maxsize=8)
def _drawn(
    sampling: Sampling, samples: int, device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """A draw that is ready on a stream."""
    number = zlib.crc32(repr(sampling.seed).encode())
    generator = torch.Generator(device).manual_seed(number)
    return torch.randperm(samples, generator=generator, device=device)[: sampling.rows]


def summand(transfer: Transfer, sampling: Sampling | None, layout: Transfer, leaf: Tensor) -> Tensor:
    """What a call adds to S, or to its diagonal where it is diagonal; the leaf has its shape, the layout its blocks."""
    samples, blocks = transfer.sizes.samples, layout if isinstance(layout, BlockLayout) else None
    if DIAGONAL in transfer.spaces:
        return transfer.diagonal()
    if sampling is not None and isinstance(transfer, Affine) and samples > sampling.rows and not leaf.is_meta:
        S = transfer.sampled_gram(sampling.draw(samples, leaf.device))
        return S if blocks is None else blocks.blocks_of(S)
    if not samples:
        return torch.zeros_like(leaf, memory_format=torch.contiguous_format)
    return transfer.gram() if blocks is None else blocks.gram_of(transfer)


@dataclass(eq=False)
class Call:
    """One call of a layer. Its rows are added to S once, by the first backward pass that reaches it and S.

    Attributes:
        system: whose leaves S is handed to.
        shapes: the parameters' shapes, None for one that is not trained.
        sampling: which rows S is estimated from; None for all.
        input: what other layers may see too; their calls share S.
        summed: whether its rows were added.
    """

    system: "System"
    shapes: Shapes
    sampling: Sampling | None
    input: "SeenInput | None" = None
    summed: bool = False

    def transfer(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Transfer:
        """The call as a linear map; `shape` is the output's."""
        return as_transfer(self.system.call, inputs, torch.Size(shape), self.shapes, self.system.dtype)

    def summand(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """What the call adds to S."""
        if torch.compiler.is_compiling():
            S: Tensor = compiled_summand(inputs, shape, self.system.key)
            return S
        if self.input is not None:
            return self.input.summand(lambda: self._summand(inputs, shape))
        return self._summand(inputs, shape)

    def _summand(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        transfer = self.transfer(inputs, shape)
        return summand(transfer, self.sampling, self.system.layout, self.system.current[0])


@dataclass(eq=False)
class SeenInput:
    """An input that several layers see one after the other, such as that of query, key and value: one S for all.

    Attributes:
        tensor: the input.
        version: how often it was written to.
        question: all else that S depends on.
        left: how many calls have yet to ask for S.
    """

    tensor: "weakref.ref[Tensor]"
    version: int
    question: tuple[object, ...]
    left: int = 1
    _S: Tensor | None = field(default=None, init=False, repr=False)

    def matches(self, other: "SeenInput") -> bool:
        """Whether the other is about the same numbers."""
        same = self.tensor() is other.tensor() is not None
        return same and (self.version, self.question) == (other.version, other.question)

    def summand(self, make: Callable[[], Tensor]) -> Tensor:
        """S, made for the first call that asks and kept for the last."""
        S = make() if self._S is None else self._S
        self.left -= 1
        self._S = S if self.left else None
        return S


@torch.library.custom_op("proxprop::summand", mutates_args=())
def compiled_summand(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    """`summand` as one operation of a compiled graph, in which it runs as in an eager pass."""
    system = _systems[key]
    return Call(system, system.shapes, None).summand(inputs, shape).contiguous()


@compiled_summand.register_fake
def _(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    (leaf, *_) = _systems[key].current
    return inputs[0].new_empty(leaf.shape, dtype=leaf.dtype)


class Tap(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands leaves what they sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: Call, inputs: int, *tensors: Tensor) -> Tensor:
        """Save the inputs, as the layer itself does; the leaves come behind them.

        Returns:
            The output, detached so that an in-place activation may follow.
        """
        ctx.save_for_backward(*tensors[:inputs])
        ctx.call, ctx.inputs = call, inputs
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """G as it is, and what is summed.

        A graph made of this backward pass (`create_graph=True`) has a tap of the same call, because a penalty on
        derivatives may reach the parameters through them alone.
        """
        call: Call = ctx.call
        saved = ctx.saved_tensors
        with torch.no_grad(), no_autocast(G.device.type):
            sums = _summed_once(ctx, saved, G)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not call.summed:
            G = Tap.apply(G, call, ctx.inputs, *saved, *call.system.current)
        return (G, None, None, *[None] * ctx.inputs, *sums)


def _summed_once(ctx: Any, saved: Sequence[Tensor], G: Tensor) -> Sequence[Tensor | None]:
    """What a call adds to its leaves: S belongs to the forward pass, so that of a retained graph is added once."""
    call: Call = ctx.call
    system, count = call.system, call.system.count
    if call.summed:
        system.note_again()
        return [None] * count
    if not torch.compiler.is_compiling():
        # Whether this pass adds to the leaves; `torch.autograd.grad` does not.
        (leaf, _), *_ = ctx.next_functions[-count:]
        if leaf is None or not is_due(leaf):
            if device.is_captured(G):
                _refuse_gradients_alone(system)
            return [None] * count
        call.summed = True
        if system.may_keep_rows and system.keep(call.transfer(saved, G.shape), saved[0].dtype):
            return [None] * count
    S = call.summand(saved, G.shape)
    samples = call.transfer(saved, G.shape).sizes.samples if count > 1 else 0
    return (S,) if count == 1 else (S, S.new_full((), samples))


def _refuse_gradients_alone(system: "System") -> None:
    """Raise RuntimeError if a CUDA graph is being made of gradients that no S will ever be summed for."""
    own = [torch.autograd.graph.get_gradient_edge(p).node for p in system.parameters if p.requires_grad]
    if any(_is_asked_for(node) for node in own):
        raise RuntimeError(
            f"{system.name}: in deferred mode a step needs S beside the gradient, but a CUDA graph is "
            "captured of torch.autograd.grad, as torch.cuda.make_graphed_callables does, which asks for gradients "
            "alone. Capture the whole step with torch.cuda.graph, or use it in immediate mode, without proxprop.attach"
        )


def _is_asked_for(leaf: Any) -> bool:
    """Whether the pass that is running will come to a leaf's node; torch can't say so of one that it only returns."""
    try:
        return is_due(leaf)
    except RuntimeError:
        return True


_systems: WeakValueDictionary[str, "System"] = WeakValueDictionary()
"""Systems by their key, which a compiled graph holds."""


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
        part: the parameters' blocks, and how the layer is called.
        counted: whether the number of samples is needed whatever the settings.
        width: of the blocks that features are in; None for one block.

    Attributes:
        when_summed: called in every backward pass as soon as S holds all that the pass adds to it.
        watch: sees to it that S is started anew when the gradient is.
        calls: how many calls were counted since the last solve.
        alone: whether nothing but the step of this system needs its S.
        common: whether all ranks that share the layer have the same inputs, and so the same S.
    """

    def __init__(
        self, name: str, layer: ProximalLayer, part: Part, counted: bool = False, width: int | None = None
    ) -> None:
        equation = Equation.of(name, layer, part, width)
        super().__init__(name, layer, equation.blocks, equation.layout_of)
        self.call, self.counted, self.usual = part.call, counted, part.usual
        self.when_summed: Callable[[System], None] | None = None
        self._leaves: tuple[Tensor, ...] = ()
        self._made_for: tuple[object, ...] = ()
        self._ones = self.alone = self.common = self._repeated = False
        self._rows: list[Tensor] = []
        self.watch: Watch | None = None
        self.calls = 0
        self.key = f"{layer._turn} {name}"  # the same if it is attached again: a compiled graph may hold it
        _systems[self.key] = self
        if self.trained:  # ahead of the first call, which may be a compiled one
            parameter = self.trained[0].parameter
            self.leaves(parameter.device, precision(parameter))

    def tap(self, output: Tensor, inputs: Sequence[Tensor], sampling: Sampling | None, seen: Any) -> Tensor:
        """The output such that its backward adds to S.

        Args:
            output: of the layer.
            inputs: as the layer's products saw them.
            sampling: which rows S is estimated from; None for all.
            seen: finds calls that share their input: from this call's to the one that it shares, or its own.
        """
        leaves = self.leaves(output.device, precision(output, *inputs))
        self._note_tensor_parallel()
        call = Call(self, self.shapes, sampling)
        if not torch.compiler.is_compiling():
            call.input = seen((self.call, tuple(s is not None for s in call.shapes), sampling))
        result: Tensor = Tap.apply(output, call, len(inputs), *(t.detach() for t in inputs), *leaves)
        return result

    def _note_tensor_parallel(self) -> None:
        """See whether other ranks have the same inputs, as those of a layer that is spread in its forward do."""
        mesh = mesh_of(next(self.layer.parameters()))
        self.common = mesh is not None and mesh == mesh_of(self.parameters[0])
        self._repeated = mesh is not None and not self.common and any(mesh.get_coordinate())

    @property
    def dtype(self) -> torch.dtype:
        """The precision of S."""
        return self._leaves[0].dtype

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
        made_for = (device, dtype, self.counts, *trained)
        if made_for != self._made_for:
            self._refuse_to_change()
            self._leaves, self._made_for, self._rows = tuple(self._new_leaves(device, dtype)), made_for, []
        return self._leaves

    @property
    def count(self) -> int:
        """How many leaves there are."""
        return len(self._leaves)

    @property
    def may_keep_rows(self) -> bool:
        """Whether rows may stand for S: those of a linear layer, of one process."""
        spread = several_ranks() or any(mesh_of(p) is not None for p in self.parameters)
        return self.alone and not spread and isinstance(self.layout, LinearTransfer)

    def keep(self, transfer: Transfer, dtype: torch.dtype) -> bool:
        """Keep the rows of a call, if that pays for those of all calls together; else S of all is to be summed."""
        assert isinstance(transfer, LinearTransfer)
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
        precise = [rows.to(self.dtype) for rows in self._rows]
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

    @property
    def waits(self) -> bool:
        """Whether a backward pass has brought something to solve for, here or on another rank."""
        return self.watch is not None and self.watch.waiting

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
        """What was summed on this rank, zeros in place of nothing or of what another rank brings; forgotten here."""
        self.sum_rows()
        sums = [None if self._repeated else leaf.grad for leaf in self._leaves]
        pairs = zip(self._leaves, sums, strict=True)
        found = [leaf.new_zeros(leaf.shape) if own is None else own for leaf, own in pairs]
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
