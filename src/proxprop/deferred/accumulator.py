"""Where S of a step is summed: a tap on a layer's output hands S to a leaf, beside the gradient.

The layer is torch's own and so is its gradient. The tap is the identity on the output. Its backward hands S, of the
layer's inputs alone, to a leaf as *its* gradient: autograd itself then sums S, over just the calls and backward passes
whose gradients it sums.
"""

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from proxprop import device
from proxprop.deferred.equation import BlockLayout, Equation, equation_of
from proxprop.deferred.preconditioner import rows_pay
from proxprop.device import no_autocast, precision
from proxprop.distributed import local, mesh_of, several_ranks
from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL
from proxprop.torch_internals import apply_untransformed, backward_pass, entries, is_due, writes
from proxprop.transfer import Affine, LayerCall, LinearTransfer, Shapes, Transfer
from proxprop.transfer.transfer import Layout

if TYPE_CHECKING:
    from proxprop.deferred.average import Running
    from proxprop.deferred.observing import Cluster


def weakly(owner: Any, method: Callable[[Any, Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep its object alive: Python can't see cycles that lead through a tensor's graph."""
    find = weakref.ref(owner)

    def hook(tensor: Tensor) -> None:
        found = find()
        if found is not None:
            method(found, tensor)

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


@dataclass(frozen=True)
class Summing:
    """All that decides how S of a call is formed, beside the call's inputs.

    Attributes:
        name: how messages call the system.
        call: how the layer is called.
        shapes, layout: of what is trained.
        like: of S's shape, precision and device, and without memory.
    """

    name: str
    call: LayerCall
    shapes: Shapes
    layout: Layout
    like: Tensor

    @property
    def key(self) -> str:
        """The same for alike layers, so that they share a compiled graph."""
        return f"{self.call} {self.shapes} {self.like.shape} {self.like.dtype} {self.like.device}"

    def formed(self, inputs: Sequence[Tensor], shape: Sequence[int], sampling: Sampling | None) -> Tensor:
        """S of a call, or the diagonal of an S that is diagonal.

        Args:
            inputs: of the layer.
            shape: of its output.
            sampling: which rows S is estimated from; None for all.
        """
        layout, like = self.layout, self.like
        if type(layout) is LinearTransfer and sampling is None:
            rows = self.rows(inputs)
            return (
                layout.gram_of_rows(rows, dense=True)[None] if rows.shape[0] else like.new_zeros(like.shape)
            )
        transfer = self.transfer(inputs, shape)
        samples, blocks = transfer.sizes.samples, layout if isinstance(layout, BlockLayout) else None
        if DIAGONAL in transfer.spaces:
            return transfer.diagonal()
        if (
            sampling is not None
            and samples > sampling.rows
            and isinstance(transfer, Affine)
            and not like.is_meta
        ):
            if device.is_captured(like):
                _refuse_draws(self.name)
            S = transfer.sampled_gram(sampling.draw(samples, like.device))
            return S if blocks is None else blocks.blocks_of(S)
        if not samples:
            return like.new_zeros(like.shape)
        return transfer.gram() if blocks is None else blocks.gram_of(transfer)

    def rows(self, inputs: Sequence[Tensor]) -> Tensor:
        """The rows of a linear layer `[samples, features]`, without the column of ones."""
        (input,), dtype = inputs, self.like.dtype
        if input.dtype != dtype:
            (input,) = self.call.in_precision(inputs, dtype)
        return input if input.dim() == 2 else input.reshape(-1, input.shape[-1])

    def transfer(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Transfer:
        """The call as a linear map."""
        return self.call.transfer_for_sums(inputs, torch.Size(shape), self.shapes, self.like.dtype)


class Call:
    """One call of a layer. Its rows are added to S once, by the first backward pass that reaches it and S.

    Calls of several layers that see the same tensor one after the other, such as query, key and value, share one S: it
    is formed by the first of them that backward reaches, and kept for the last.

    Args:
        system: whose leaves S is handed to.
        inputs: number of tensors that the layer was called with.
        sampling: which rows S is estimated from; None for all.

    Attributes:
        summing: how S is formed.
        leaves: what S is handed to, and the number of samples where it has a leaf of its own.
        summed: whether its rows were added.
    """

    def __init__(self, system: "System", inputs: int, sampling: Sampling | None = None) -> None:
        self.system, self.inputs, self.sampling = system, inputs, sampling
        self.summing, self.leaves = system.summing, system.leaves
        self.summed = False
        self._first: Call | None = None
        self._S: Tensor | None = None
        self._left, self._pass = 1, -1

    def share(self, first: "Call") -> bool:
        """Share S with a call that saw the same input, if S depends on nothing else."""
        if first._question() != self._question():
            return False
        self._first = first
        first._left += 1
        return True

    def _question(self) -> tuple[object, ...]:
        """All that S depends on beside the input."""
        summing = self.summing
        return summing.call, self.sampling, summing.shapes, summing.like.shape, summing.like.dtype

    def sums(self, inputs: Sequence[Tensor], shape: Sequence[int], compiles: bool) -> Sequence[Tensor | None]:
        """What the call adds to its leaves; nothing where its rows are kept."""
        if compiles:
            S: Tensor = compiled_summand(inputs, shape, self.system.key)
        else:
            self.summed = True
            if self.system.keeps_rows and self.system.keep(self, inputs):
                return (None,) * len(self.leaves)
            S = self.summand(inputs, shape)
        if len(self.leaves) == 1:
            return (S,)
        linear = type(self.summing.layout) is LinearTransfer
        samples = prod(shape[:-1]) if linear else self.summing.transfer(inputs, shape).sizes.samples
        return S, S.new_full((), samples)

    def summand(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """What the call adds to S, or to the diagonal of an S that is diagonal; `shape` is the output's.

        Calls share it within a backward pass. The next pass makes it anew: calls without a backward pass are still
        waited for then, and what NumPy writes into a tensor between two passes counts as no write.
        """
        first, running = self._first or self, backward_pass()
        S = first._S
        if S is None or first._pass != running:
            S = self.summing.formed(inputs, shape, self.sampling)
        first._left -= 1
        first._S, first._pass = S if first._left else None, running
        return S


class Inputs:
    """The input that a layer of a model saw last, and the first call that saw it."""

    def __init__(self) -> None:
        self._seen: tuple[weakref.ref[Tensor], tuple[int, torch.dtype], Call] | None = None

    def see(self, input: Tensor, dtype: torch.dtype, call: Call) -> None:
        """A call sees an input, in this precision. If the call before saw the same, the two share S."""
        now = writes(input), dtype
        if self._seen is not None:
            seen, then, first = self._seen
            if seen() is input and then == now and call.share(first):
                return
        self._seen = weakref.ref(input), now, call


@torch.library.custom_op("proxprop::summand", mutates_args=())
def compiled_summand(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    """What a call adds to S, as one operation of a compiled graph; there it runs as in an eager pass."""
    return _summings[key].formed(inputs, shape, None).contiguous()


@compiled_summand.register_fake
def _(inputs: Sequence[Tensor], shape: Sequence[int], key: str) -> Tensor:
    like = _summings[key].like
    return inputs[0].new_empty(like.shape, dtype=like.dtype)


_summings: dict[str, Summing] = {}
"""By their keys, which compiled graphs hold: one for each kind and size of layer, none of which holds a layer."""


class Tap(torch.autograd.Function):
    """The identity on a layer's output, whose backward hands leaves what they sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, call: Call, *tensors: Tensor) -> Tensor:
        """Save the inputs, as the layer itself does; the leaves come behind them.

        Returns:
            The output, detached so that an in-place activation may follow.
        """
        ctx.save_for_backward(*tensors[: call.inputs])
        ctx.call = call
        return output.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Any, ...]:
        """Return G as it is, and what the leaves sum.

        A graph made of this backward pass (`create_graph=True`) has a tap of the same call, because a penalty on
        derivatives may reach the parameters through them alone.
        """
        call: Call = ctx.call
        saved, differentiable = ctx.saved_tensors, torch.is_grad_enabled()
        compiles = torch.compiler.is_compiling()
        sums: Sequence[Tensor | None] = (None,) * len(call.leaves)
        with torch.no_grad() if differentiable else nullcontext(), no_autocast(G.device.type):
            if compiles or _is_due(ctx.next_functions[-1][0], call, G):
                sums = call.sums(saved, G.shape, compiles)
        if differentiable and not compiles and not call.summed:
            G = Tap.apply(G, call, *saved, *call.leaves)
        return G, None, *[None] * call.inputs, *sums


def _is_due(leaf: Any, call: Call, G: Tensor) -> bool:
    """Whether this pass adds a call's rows to its leaves; `torch.autograd.grad` does not.

    S belongs to the forward pass, so a retained graph adds it once.
    """
    if call.summed:
        call.system.cluster.watch.notice(summed=True)
        return False
    if leaf is not None and is_due(leaf):
        return True
    if device.is_captured(G):
        _refuse_gradients_alone(call.system)
    return False


def _refuse_gradients_alone(system: "System") -> None:
    """Raise RuntimeError if a CUDA graph is being made of gradients that no S will ever be summed for."""
    own = [torch.autograd.graph.get_gradient_edge(p).node for p in system.parameters if p.requires_grad]
    if any(_is_asked_for(node) for node in own):
        raise RuntimeError(
            f"{system.name}: in deferred mode a step needs S beside the gradient, but a CUDA graph is "
            "captured of torch.autograd.grad, as torch.cuda.make_graphed_callables does, which asks for gradients "
            "alone. Capture the whole step with torch.cuda.graph, or use it in immediate mode, without proxprop.attach"
        )


def _refuse_draws(name: str) -> NoReturn:
    """Raise RuntimeError: a CUDA graph would replay the rows of one draw, and torch does not let it draw at all."""
    raise RuntimeError(
        f"{name}: Running(rows=...) draws other rows in each step that sums S, which a CUDA graph can't. "
        "Capture the steps between these alone, or attach with rows=None"
    )


def _is_asked_for(leaf: Any) -> bool:
    """Whether the pass that is running will come to a leaf's node; torch can't say so of one that it only returns."""
    try:
        return is_due(leaf)
    except RuntimeError:
        return True


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
        when_summed: called in every backward pass as soon as S holds all that the pass adds to it, under several ranks.

    Attributes:
        usual: whether calls are expected to set this system up.
        keeps_rows: whether rows may stand for S, for all that is known without a call.
        leaves: the leaves of the last call. They have shape, precision and device of what is summed.
        summing: how S is formed of what was trained when the leaves were made.
        key: that of `summing`.
        common: whether all ranks that share the layer have the same inputs, and so the same S.
        cluster: the systems that share parameters with this one.
    """

    cluster: "Cluster"
    summing: Summing
    key: str

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
        self.common = self._repeated = False
        self._spread = any(mesh_of(parameter) is not None for parameter in layer.parameters())
        self._rows: list[Tensor] = []
        self._arriving: list[tuple[int, Tensor]] = []  # rows by their pass, which has yet to come to the leaf
        self.keeps_rows = running is None and not self._spread
        self._draws = running.rows or 0 if running is not None else 0
        self._drawn = 0, 0
        if self.trained:  # ahead of the first call, which may be a compiled one
            self.make_leaves()

    def join(self, cluster: "Cluster") -> None:
        """Become one of a cluster."""
        self.cluster = cluster

    def tap(self, output: Tensor, inputs: Sequence[Tensor], of: Tensor) -> Tensor:
        """The output such that its backward adds to S; the output itself where nothing is trained.

        Args:
            output: of the layer.
            inputs: as the layer's products saw them.
            of: what the first input was made of; other layers may see it too.
        """
        trained = self._fit_leaves(output.device, precision(output, *inputs))
        if not trained:
            return output
        if self._spread:
            self._note_tensor_parallel()
        seen: Sequence[Tensor] = [tensor.detach() for tensor in inputs]
        if self.summing.shapes[0] is None:
            seen = self.call.without_weight(seen)
        if torch.compiler.is_compiling():
            result: Tensor = Tap.apply(output, Call(self, len(seen)), *seen, *self.leaves)
            return result
        call = Call(self, len(seen), self._sampling() if self._draws else None)
        if call.inputs == 1:
            self._inputs.see(of, seen[0].dtype, call)
        result = apply_untransformed(Tap, output, call, *seen, *self.leaves)
        return result

    def _sampling(self) -> Sampling:
        step, calls = self._drawn
        self._drawn = self.cluster.steps, calls + 1 if step == self.cluster.steps else 1
        return Sampling(self._draws, *self._drawn)

    def _note_tensor_parallel(self) -> None:
        """See whether other ranks have the same inputs, as those of a layer that is spread in its forward do."""
        mesh = mesh_of(next(self.layer.parameters()))
        self.common = mesh is not None and mesh == mesh_of(self.parameters[0])
        self._repeated = mesh is not None and not self.common and any(mesh.get_coordinate())

    @property
    def S(self) -> Tensor | None:
        """S as summed so far, or its diagonal; None where nothing was. Formed here where rows were kept."""
        self._sum_rows()
        return self.leaves[0].grad if self.leaves else None

    @property
    def holds(self) -> bool:
        """Whether anything was summed or kept."""
        return bool(self._rows) or (bool(self.leaves) and self.leaves[0].grad is not None)

    @property
    def _sums(self) -> list[Tensor]:
        """What was summed in each leaf; empty where nothing was."""
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def _counts(self) -> bool:
        """Whether the number of samples is needed."""
        return self._running is not None or self.layer._settings.scaling == "gradient"

    def make_leaves(self) -> None:
        """Make leaves for what is trained now, ahead of a call, unless there are such."""
        if not self.leaves or self.summing.shapes != self.shapes:
            parameter = self.trained[0].parameter
            self._fit_leaves(parameter.device, precision(parameter))

    def _fit_leaves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Make leaves anew where S is another one than before; returns whether anything is trained."""
        trained = [block is not None and block.parameter.requires_grad for block in self.blocks]
        made_for = (device, dtype, self._counts(), *trained)
        if made_for == self._made_for:
            return True
        if True not in trained:
            return False
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.holds and any(bool(entries(local(gradient)).any()) for gradient in gradients):
            raise RuntimeError(
                f"{self.name}: device, precision, scaling or which parameters are trained changed between backward "
                "passes of one step, whose S can't be added up. Call zero_grad(), or step, before such a change"
            )
        self._rows, self.leaves, self._made_for = [], tuple(self._new_leaves(device, dtype)), made_for
        like = self.leaves[0].detach()  # a leaf holds S
        self.summing = Summing(self.name, self.call, self.shapes, self.layout, like)
        self.key = self.summing.key
        _summings.setdefault(self.key, self.summing)
        return True

    def _new_leaves(self, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
        layout = self.layout
        self.ones = isinstance(layout, Affine) and layout.bias
        shapes = [self.gram_shape]
        if self._counts() and not self.ones:
            shapes.append(torch.Size())
        for shape in shapes:
            leaf = torch.zeros((), device=device, dtype=dtype).expand(shape).requires_grad_()
            leaf.register_hook(weakly(self, System._note_sum))
            if several_ranks():
                leaf.register_post_accumulate_grad_hook(weakly(self, System._note_complete))
            yield leaf

    def _note_sum(self, summand: Tensor | None) -> None:
        """The pass has come to a leaf: S is about to be added to, or rows have come instead."""
        if summand is not None or self._arriving:
            self.cluster.watch.notice(summed=True)
        if self._arriving:
            self._rows += [rows for own, rows in self._arriving if own == backward_pass()]
            self._arriving = [kept for kept in self._arriving if kept[0] != backward_pass()]

    def _note_complete(self, _: Tensor) -> None:
        """A pass has added to S all that it will."""
        self._when_summed(self)

    @property
    def may_keep_rows(self) -> bool:
        """Whether rows may stand for S: of a linear layer in one process, where nothing but its step needs S."""
        alone = self.keeps_rows and len(self.cluster.systems) == 1 and not several_ranks()
        return alone and isinstance(self.layout, LinearTransfer)

    def keep(self, call: Call, inputs: Sequence[Tensor]) -> bool:
        """Keep the rows of a call, if that pays for those of all calls together; else S of all is to be summed."""
        if not self.may_keep_rows:
            return False
        self.cluster.watch.notice()
        A = call.summing.rows(inputs)
        samples = sum(len(rows) for rows in (A, *self._rows, *(rows for _, rows in self._arriving)))
        if self._sums or not rows_pay(self.layout.sizes._replace(samples=samples), self.layer._settings):
            self._sum_rows()
            return False
        self._arriving.append((backward_pass(), A.to(inputs[0].dtype, copy=True)))
        return True

    def take_rows(self) -> LinearTransfer | None:
        """The calls whose rows were kept, as one, and forgotten here; None where S was summed or is cheaper now."""
        self._arriving = []  # of passes that failed
        if not self._rows:
            return None
        self.refuse_changed()
        call = self._kept_call()
        if self._sums or not rows_pay(call.sizes, self.layer._settings):
            return None
        self.forget()
        return call

    def _kept_call(self) -> LinearTransfer:
        layout = self.summing.layout
        assert isinstance(layout, LinearTransfer)
        precise = [rows.to(self.leaves[0].dtype) for rows in self._rows]
        return layout.with_rows(precise[0] if len(precise) == 1 else torch.cat(precise))

    def _sum_rows(self) -> None:
        """Form S of the rows that were kept, if any were, and go on with that."""
        if not self._rows:
            return
        call, self._rows = self._kept_call(), []
        with torch.no_grad(), no_autocast(call.input.device.type):
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

    def refuse_changed(self) -> None:
        """Raise RuntimeError if other parameters are trained than those that S was summed for."""
        for block, shape in zip(self.blocks, self.summing.shapes, strict=True):
            if block is not None and block.parameter.requires_grad != (shape is not None):
                raise RuntimeError(
                    f"{self.name}: which parameters are trained changed between backward and the step, so that S is "
                    "not theirs. Freeze and unfreeze after the step, or call zero_grad() first"
                )

    def take(self) -> list[Tensor]:
        """What was summed in each leaf, which is forgotten here; empty where nothing was."""
        self._sum_rows()
        found = []
        for leaf in self.leaves:
            if leaf.grad is not None:
                found.append(leaf.grad)
                leaf.grad = None
        if found:
            self.refuse_changed()
        return found

    def take_share(self) -> list[Tensor]:
        """What this rank adds to each leaf's sum over ranks, forgotten here: zeros where others bring it."""
        self._sum_rows()
        sums = [None if self._repeated else leaf.grad for leaf in self.leaves]
        pairs = zip(self.leaves, sums, strict=True)
        found = [leaf.new_zeros(leaf.shape) if own is None else own for leaf, own in pairs]
        self.forget()
        return found
