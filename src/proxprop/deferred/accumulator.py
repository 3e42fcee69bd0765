"""Where S of a step is summed: a tap on a layer's output hands S to a leaf, beside the gradient.

The layer is torch's own and so is its gradient. The tap is the identity on the output. Its backward hands S, of the
layer's inputs alone, to a leaf as *its* gradient: autograd itself then sums S, over just the calls and backward passes
whose gradients it sums.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from proxprop import device
from proxprop.backward import as_transfer, no_autocast, precision
from proxprop.deferred.equation import Equation, equation_of
from proxprop.deferred.layouts import BlockLayout
from proxprop.deferred.preconditioner import rows_pay
from proxprop.distributed import mesh_of, several_ranks
from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import backward_pass, is_due, writes
from proxprop.transfer import Affine, LinearTransfer, Shapes, Transfer

if TYPE_CHECKING:
    from proxprop.deferred.average import Running
    from proxprop.deferred.observing import Cluster


def weakly(method: Any) -> Callable[[Tensor], None]:
    """A hook that does not keep its object alive: Python can't see cycles that lead through a tensor's graph."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def hook(tensor: Tensor) -> None:
        found = owner()
        if found is not None:
            function(found, tensor)

    return hook


class Sampling(NamedTuple):
    """How many rows S of a call is estimated from, and what seeds the draw."""

    rows: int
    step: int
    call: int

    def draw(self, samples: int, device: torch.device) -> Tensor:
        """Indices of rows, without replacement; torch's random state is left alone.

        Example:
            >>> Sampling(rows=3, step=0, call=1).draw(100, torch.device("cpu")).shape
            torch.Size([3])
        """
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return _drawn(self, samples, device, stream)


@lru_cache(maxsize=8)
def _drawn(
    sampling: Sampling, samples: int, device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """A draw that is ready on a stream. Layers with as many samples share it: it takes longer than their products."""
    number = zlib.crc32(repr((sampling.step, sampling.call)).encode())
    generator = torch.Generator(device).manual_seed(number)
    return torch.randperm(samples, generator=generator, device=device)[: sampling.rows]


@dataclass(eq=False)
class Call:
    """One call of a layer. Its rows are added to S once, by the first backward pass that reaches it and S.

    Attributes:
        system: whose leaves S is handed to.
        shapes: the parameters' shapes, None for one that is not trained.
        sampling: which rows S is estimated from; None for all.
        input: the only input, which other layers may see too; their calls share S.
        summed: whether its rows were added.
    """

    system: "System"
    shapes: Shapes
    sampling: Sampling | None
    input: "SharedInput | None" = None
    summed: bool = False

    def transfer(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Transfer:
        """The call as a linear map; `shape` is the output's."""
        dtype = self.system.leaves[0].dtype
        return as_transfer(self.system.call, inputs, torch.Size(shape), self.shapes, dtype)

    def summand(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """What the call adds to S."""
        if torch.compiler.is_compiling():
            S: Tensor = compiled_summand(inputs, shape, self.system.key)
            return S
        if self.input is not None:
            return self.input.summand(lambda: self._summand(inputs, shape))
        return self._summand(inputs, shape)

    def _summand(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return self.system.summand(self.transfer(inputs, shape), self.sampling)


@dataclass(eq=False)
class SharedInput:
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
    _pass: int = field(default=-1, init=False, repr=False)

    def matches(self, input: Tensor, question: tuple[object, ...]) -> bool:
        """Whether S of this input is the same."""
        return self.tensor() is input and (self.version, self.question) == (writes(input), question)

    def summand(self, make: Callable[[], Tensor]) -> Tensor:
        """S, made for the first call that asks in a backward pass and kept for the last.

        The next pass makes it anew: calls without a backward pass are still waited for then, and what NumPy writes into
        a tensor between two passes counts as no write.
        """
        running = backward_pass()
        S = make() if self._S is None or self._pass != running else self._S
        self.left -= 1
        self._S, self._pass = S if self.left else None, running
        return S


class Inputs:
    """The input that a layer of a model saw last."""

    def __init__(self) -> None:
        self._last: SharedInput | None = None

    def seen(self, input: Tensor, question: tuple[object, ...]) -> SharedInput:
        """An input that a layer sees; the last one, where that was the same and S depends on nothing else."""
        if self._last is not None and self._last.matches(input, question):
            self._last.left += 1
        else:
            self._last = SharedInput(weakref.ref(input), writes(input), question)
        return self._last


@torch.library.custom_op("proxprop::summand", mutates_args=())
def compiled_summand(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    """What a call adds to S, as one operation of a compiled graph; there it runs as in an eager pass."""
    system = _systems[key]
    return Call(system, system.shapes, None).summand(inputs, shape).contiguous()


@compiled_summand.register_fake
def _(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    leaf = _systems[key].leaves[0]
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
        """Return G as it is, and what the leaves sum.

        A graph made of this backward pass (`create_graph=True`) has a tap of the same call, because a penalty on
        derivatives may reach the parameters through them alone.
        """
        call: Call = ctx.call
        saved = ctx.saved_tensors
        with torch.no_grad(), no_autocast(G.device.type):
            sums = _summed_once(ctx, saved, G)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not call.summed:
            G = Tap.apply(G, call, ctx.inputs, *saved, *call.system.leaves)
        return (G, None, None, *[None] * ctx.inputs, *sums)


def _summed_once(ctx: Any, saved: Sequence[Tensor], G: Tensor) -> Sequence[Tensor | None]:
    """What a call adds to its leaves. S belongs to the forward pass, so a retained graph adds it once."""
    call: Call = ctx.call
    system, count = call.system, len(call.system.leaves)
    if call.summed:
        system.cluster.watch.notice()
        system.cluster.watch.note_sum()
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
    when the parameters' own `.grad` is added to. The number of samples has a leaf only where it is needed and S does
    not hold it.

    As long as a step is cheaper from the rows of all calls than from S, the rows are kept instead, and the leaves are
    left alone. Rows are copied: a caller may write the next batch where this one was.

    Args:
        name: how messages call it.
        layer: the layer whose settings apply.
        part: the parameters' blocks, and how the layer is called.
        running: the user's choice of running averages; None without them.
        inputs: what the model's layers saw last.
        when_summed: called in every backward pass as soon as S holds all that the pass adds to it.

    Attributes:
        usual: whether calls are expected to set this system up.
        leaves: the leaves of the last call. They have shape, precision and device of what is summed.
        common: whether all ranks that share the layer have the same inputs, and so the same S.
        cluster: the systems that share parameters with this one.
    """

    cluster: "Cluster"

    def __init__(
        self,
        name: str,
        layer: ProximalLayer,
        part: Part,
        running: "Running | None",
        inputs: Inputs,
        when_summed: Callable[["System"], None],
    ) -> None:
        equation = equation_of(name, layer, part, running.block if running is not None else None)
        super().__init__(name, layer, equation.blocks, equation.layout_of)
        self.call, self.usual, self._running, self._inputs = part.call, part.usual, running, inputs
        self._when_summed = when_summed
        self.leaves: tuple[Tensor, ...] = ()
        self._made_for: tuple[object, ...] = ()
        self._ones = self.common = self._repeated = False
        self._rows: list[Tensor] = []
        self._calls = 0
        self.key = f"{layer._turn} {name}"  # the same if it is attached again: a compiled graph may hold it
        _systems[self.key] = self
        if self.trained:  # ahead of the first call, which may be a compiled one
            parameter = self.trained[0].parameter
            self._fit_leaves(parameter.device, precision(parameter))

    def join(self, cluster: "Cluster") -> None:
        """Become one of a cluster."""
        self.cluster = cluster

    def begin_step(self) -> None:
        """Count calls anew."""
        self._calls = 0

    def tap(self, output: Tensor, inputs: Sequence[Tensor], of: Tensor) -> Tensor:
        """The output such that its backward adds to S.

        Args:
            output: of the layer.
            inputs: as the layer's products saw them.
            of: what the first input was made of; other layers may see it too.
        """
        self._fit_leaves(output.device, precision(output, *inputs))
        self._note_tensor_parallel()
        sampling = self._sampling()
        call = Call(self, self.shapes, sampling)
        if len(inputs) == 1 and not torch.compiler.is_compiling():
            question = self.call, self.leaves[0].shape, self._made_for, sampling, inputs[0].dtype
            call.input = self._inputs.seen(of, question)
        tensors = [*(t.detach() for t in inputs), *self.leaves]
        result: Tensor = Tap.apply(output, call, len(inputs), *tensors)
        return result

    def _sampling(self) -> Sampling | None:
        if self._running is None or self._running.rows is None or torch.compiler.is_compiling():
            return None
        self._calls += 1
        return Sampling(self._running.rows, self.cluster.steps, self._calls)

    def _note_tensor_parallel(self) -> None:
        """See whether other ranks have the same inputs, as those of a layer that is spread in its forward do."""
        mesh = mesh_of(next(self.layer.parameters()))
        self.common = mesh is not None and mesh == mesh_of(self.parameters[0])
        self._repeated = mesh is not None and not self.common and any(mesh.get_coordinate())

    def summand(self, transfer: Transfer, sampling: Sampling | None) -> Tensor:
        """What a call adds to S, or to the diagonal of an S that is diagonal."""
        samples, leaf = transfer.sizes.samples, self.leaves[0]
        blocks = self.layout if isinstance(self.layout, BlockLayout) else None
        if DIAGONAL in transfer.spaces:
            return transfer.diagonal()
        if (
            sampling is not None
            and samples > sampling.rows
            and isinstance(transfer, Affine)
            and not leaf.is_meta
        ):
            S = transfer.sampled_gram(sampling.draw(samples, leaf.device))
            return S if blocks is None else blocks.blocks_of(S)
        if not samples:
            return torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        return transfer.gram() if blocks is None else blocks.gram_of(transfer)

    @property
    def S(self) -> Tensor | None:
        """S as summed so far, or its diagonal; None where nothing was. Formed here where rows were kept."""
        self._sum_rows()
        return self.leaves[0].grad if self.leaves else None

    @property
    def holds(self) -> bool:
        """Whether anything was summed or kept."""
        return bool(self._rows or self._sums)

    @property
    def _sums(self) -> list[Tensor]:
        """What was summed in each leaf; empty where nothing was."""
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def split(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """S and the number of samples from what was summed in the leaves; None where nobody counts.

        Under a bias S ends with the square of a column of ones, which is that number.
        """
        S, *count = sums
        if self._ones and self._counts():
            return S, S[0, -1, -1]
        return S, count[0] if count else None

    def _counts(self) -> bool:
        """Whether the number of samples is needed."""
        return self._running is not None or self.layer._settings.scaling == "gradient"

    def _fit_leaves(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make leaves anew where S is another one than before."""
        trained = [block is not None for block in self.trained_blocks]
        made_for = (device, dtype, self._counts(), *trained)
        if made_for == self._made_for:
            return
        if self.holds and any(parameter.grad is not None for parameter in self.parameters):
            raise RuntimeError(
                f"{self.name}: device, precision, scaling or which parameters are trained changed between backward "
                "passes of one step, whose S can't be added up. Call zero_grad(), or step, before such a change"
            )
        self.leaves, self._made_for, self._rows = tuple(self._new_leaves(device, dtype)), made_for, []

    def _new_leaves(self, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
        layout = self.layout
        groups, _, features, _ = layout.sizes
        diagonal = DIAGONAL in layout.spaces
        shapes = [(groups, features) if diagonal else (groups, features, features)]
        self._ones = isinstance(layout, Affine) and layout.bias
        for shape in [*shapes, ()] if self._counts() and not self._ones else shapes:
            leaf = torch.zeros((), device=device, dtype=dtype).expand(shape).requires_grad_()
            leaf.register_hook(weakly(self._notice))
            leaf.register_post_accumulate_grad_hook(weakly(self._note_sum))
            yield leaf

    def _notice(self, _: Tensor) -> None:
        """S is about to be added to."""
        self.cluster.watch.notice()

    def _note_sum(self, _: Tensor) -> None:
        """S was added to."""
        self.cluster.watch.note_sum()
        self._when_summed(self)

    @property
    def may_keep_rows(self) -> bool:
        """Whether rows may stand for S: of a linear layer in one process, where nothing but its step needs S."""
        alone = self._running is None and len(self.cluster.systems) == 1
        spread = several_ranks() or any(mesh_of(p) is not None for p in self.parameters)
        return alone and not spread and isinstance(self.layout, LinearTransfer)

    def keep(self, transfer: Transfer, dtype: torch.dtype) -> bool:
        """Keep the rows of a call, if that pays for those of all calls together; else S of all is to be summed."""
        assert isinstance(transfer, LinearTransfer)
        self.cluster.watch.notice()
        (A,) = transfer.rows()
        samples = len(A) + sum(len(rows) for rows in self._rows)
        if self._sums or not rows_pay(transfer.sizes._replace(samples=samples), self.layer._settings):
            self._sum_rows()
            return False
        self._rows.append(A.to(dtype, copy=True))
        self.cluster.watch.note_sum()
        return True

    def take_rows(self) -> LinearTransfer | None:
        """The calls whose rows were kept, as one, and forgotten here; None where S was summed or is cheaper now."""
        if not self._rows:
            return None
        call = self._kept_call()
        if self._sums or not rows_pay(call.sizes, self.layer._settings):
            return None
        self.forget()
        return call

    def _kept_call(self) -> LinearTransfer:
        layout = self.layout
        assert isinstance(layout, LinearTransfer)
        precise = [rows.to(self.leaves[0].dtype) for rows in self._rows]
        return layout.with_rows(precise[0] if len(precise) == 1 else torch.cat(precise))

    @torch.no_grad()
    def _sum_rows(self) -> None:
        """Form S of the rows that were kept, and go on with that."""
        if not self._rows:
            return
        call, self._rows = self._kept_call(), []
        with no_autocast(call.input.device.type):
            S = call.gram().contiguous()  # as autograd lays out what it adds to
        for leaf, more in zip(self.leaves, (S, S.new_full((), call.sizes.samples)), strict=False):
            leaf.grad = more if leaf.grad is None else leaf.grad + more

    def forget(self) -> None:
        """Drop what was summed."""
        self._rows = []
        for leaf in self.leaves:
            leaf.grad = None

    def clear_where(self, zeroed: Tensor) -> None:
        """Set what was summed to zero, if a truth value on the device says so."""
        self._sum_rows()  # how many rows there are is known on the host
        for total in self._sums:
            total.masked_fill_(zeroed.to(total.device), 0.0)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """S and the number of samples, which are forgotten here."""
        self._sum_rows()
        found = self.split(self._sums)
        self.forget()
        return found

    def take_share(self) -> list[Tensor]:
        """What this rank adds to each leaf's sum over ranks, forgotten here: zeros where others bring it."""
        self._sum_rows()
        sums = [None if self._repeated else leaf.grad for leaf in self.leaves]
        pairs = zip(self.leaves, sums, strict=True)
        found = [leaf.new_zeros(leaf.shape) if own is None else own for leaf, own in pairs]
        self.forget()
        return found
