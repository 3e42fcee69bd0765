"""Puts directions where gradients are: alike layers in a few calls, shards by the rank that holds them.

With W `[outputs, inputs]` and b `[outputs]` the gradients of a weight and a bias, which are the features of one system,

    P = (P_ww  p_wb; p_bw  p_bb),    D_W = W P_wwᵀ + b p_wbᵀ,    D_b = W p_bwᵀ + b p_bb,

stacked over layers and groups. The inverses are moved beside each other once. On a GPU these products are rounded as
TF32's, also where the user asks for more: D then errs by about `2⁻¹¹·(1 + ρ)/ρ` of the gradient's norm.

`D = (λI + S)⁻¹B` acts on features, and columns of B are outputs. A parameter that FSDP2 shards by outputs therefore
needs nothing from other ranks but the inverse. Where shards cut through a system's features or groups, or one step
length is shared by all outputs, the gradient is solved as a whole, by the rank that owns S.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from proxprop.deferred.collectives import Group, Shards
from proxprop.deferred.equation import Block, Equation
from proxprop.deferred.observing import Cluster, Pair, by_group
from proxprop.deferred.preconditioner import (
    Inverse,
    Operator,
    Solve,
    aligned,
    borrowed,
    replayed,
)
from proxprop.device import float32_products, no_autocast
from proxprop.distributed import box, local, mesh_of
from proxprop.replay import are_small, replays
from proxprop.solvers import Solution
from proxprop.torch_internals import copy_all
from proxprop.transfer import (
    Affine,
    BilinearTransfer,
    ConvTransfer,
    LinearTransfer,
    NormTransfer,
)

TOGETHER_BYTES = 128 * 2**20
"""Most bytes of gradients that are stacked; a larger layer is turned alone."""

ROWS_ARE_OUTPUTS = (LinearTransfer, ConvTransfer, BilinearTransfer, NormTransfer)
"""Layouts whose weight is `[groups·outputs, inputs]` but for its shape, or its transpose."""

_numbers = count()
"""Numbers plans, so that a captured graph, which reads the inverses of one plan, is never replayed for another."""


Pairs = Mapping[Cluster, Sequence[Pair]]


class Directions:
    """Turns gradients into directions, on all ranks, and remembers which layers are turned together.

    Args:
        kept: whether operators are kept from step to step.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self._plans: dict[tuple[int, ...], Plan] = {}

    def write(self, pairs: Pairs, done: Collection[Cluster], lend: bool) -> None:
        """Turn the gradients of clusters into directions, in place and on all ranks.

        Args:
            pairs: each cluster's equations and operators, which have no memory where another rank holds them.
            done: clusters whose gradients hold the direction already.
            lend: whether an owner may have no gradients, so that its operators go to the ranks that have.
        """
        shared = {cluster: own for cluster, own in pairs.items() if cluster.group is not None}
        for cluster in shared:
            _lay_out(cluster.parameters)
        fresh = None if self._kept else "inverse"
        lent = _lent({c: own for c, own in shared.items() if lend or c.way == fresh})
        far = {c: own for c, own in shared.items() if c.way == "gradient" and c not in lent}
        near = {c: lent.get(c, own) for c, own in pairs.items() if c not in far and c not in done}
        self._write_here([pair for own in near.values() for pair in own])
        for group, clusters in by_group(far):
            mine = [pair for c in clusters if c.mine and c not in done for pair in far[c]]
            if mesh_of(clusters[0].parameters[0]) is None:
                self._write_here(mine)
                _bring_directions(group, clusters)
            else:
                _write_shards(group, clusters, mine)

    def _write_here(self, pairs: Sequence[Pair]) -> None:
        """Turn gradients on this rank alone, alike layers together."""
        if not self._kept:
            for pair in pairs:
                write_direction(*pair)
            return
        key = tuple([id(operator) for _, operator in pairs])  # not reused, as a plan holds its operators
        plan = self._plans.get(key)
        if plan is None:
            names = {equation.name for equation, _ in pairs}
            self._plans = {k: p for k, p in self._plans.items() if p.names.isdisjoint(names)}
            plan = self._plans[key] = Plan(pairs)
        plan.write()


def bring_operators(pairs: Pairs) -> None:
    """Bring operators from their owners to all ranks, which have memory for them."""
    for group, clusters in by_group(pairs):
        kept = [(operator.kept, c.owner) for c in clusters for _, operator in pairs[c]]
        if kept:
            group.bring([matrix for matrix, _ in kept], [owner for _, owner in kept], "inverses")


def _lent(pairs: Pairs) -> Pairs:
    """The same operators with memory on all ranks, for one step."""
    lent = {
        cluster: [
            (equation, operator) if cluster.mine else (equation, borrowed(operator, cluster.device))
            for equation, operator in own
        ]
        for cluster, own in pairs.items()
    }
    bring_operators(lent)
    return lent


def _bring_directions(group: Group, clusters: Sequence[Cluster]) -> None:
    """Bring directions from their owners to ranks that hold whole parameters."""
    found = [(p.grad, c.owner) for c in clusters for p in c.parameters if p.grad is not None]
    group.bring([plain(g) for g, _ in found], [owner for _, owner in found], "directions")


def _write_shards(group: Group, clusters: Sequence[Cluster], mine: Sequence[Pair]) -> None:
    """Gather the gradients of what this rank owns, turn them, and put directions into every rank's shards."""
    alike: dict[tuple[torch.dtype, torch.device], list[list[Any]]] = {}
    for cluster in clusters:
        for p in cluster.parameters:
            if p.requires_grad:
                owned = alike.setdefault((p.dtype, cluster.device), [[] for _ in range(group.ranks)])
                owned[cluster.owner].append(p)
    shards = [Shards(group, torch.empty(0, dtype=t, device=d), owned) for (t, d), owned in alike.items()]
    whole = {p: gradient for each in shards for p, gradient in each.gathered().items()}
    for pair in mine:
        write_direction(*pair, whole)
    for each in shards:
        each.scatter(whole)


def _lay_out(parameters: Iterable[Any]) -> None:
    """Lay sharded gradients out as their parameters; those of tensor parallel layers may be partial sums."""
    for p in parameters:
        if mesh_of(p) is not None and p.grad is not None and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def plain(tensor: Tensor) -> Tensor:
    """A tensor in a shape that is not taken for symmetric matrices."""
    return tensor[None] if tensor.dim() == 3 else tensor


class Plan:
    """Which layers are turned together.

    Args:
        pairs: equations and their operators.

    Attributes:
        names: the equations' names.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.names = {equation.name for equation, _ in pairs}
        self.pairs, self.number = pairs, next(_numbers)
        alike: dict[tuple[object, ...], list[tuple[Equation, Inverse]]] = {}
        self.alone: list[Pair] = []
        for equation, operator in pairs:
            if isinstance(operator, Inverse) and _stackable(equation):
                P, shapes = operator.kept, tuple(equation.shapes)
                key = type(equation.layout), _transposed(equation), shapes, P.shape, P.dtype, P.device
                alike.setdefault(key, []).append((equation, operator))
            else:
                self.alone.append((equation, operator))
        self.stacks = [Stack(chunk) for members in alike.values() for chunk in _chunks(members)]

    def write(self) -> None:
        """Turn all gradients."""
        ready: list[tuple[Stack, list[Tensor]]] = []
        for stack in self.stacks:
            gradients = stack.gradients()
            if gradients is not None:
                ready.append((stack, gradients))
                continue
            for equation, operator in stack.pairs:
                write_direction(equation, operator)
        if len(ready) == len(self.stacks) and self._is_replayed(ready):
            self._replay(ready)
        else:
            _write(ready)
        for pair in self.alone:
            write_direction(*pair)

    def _is_replayed(self, ready: Sequence[tuple["Stack", list[Tensor]]]) -> bool:
        """Whether the host would take longer to launch the products than to copy all gradients."""
        if len(ready) < 2 or len({stack.P.device for stack, _ in ready}) > 1:
            return False
        given = [gradient for _, gradients in ready for gradient in gradients]
        return are_small(given) and replays(given[0]) is not None

    def _replay(self, ready: Sequence[tuple["Stack", list[Tensor]]]) -> None:
        """Turn all gradients by one CUDA graph, once that is captured; directions come in one piece."""
        given = [gradient for _, gradients in ready for gradient in gradients]

        def solve(given: Sequence[Tensor]) -> Solution:
            left = iter(given)
            found = [d for stack, own in ready for d in stack.directions([next(left) for _ in own])]
            return Solution(torch.cat([d.reshape(-1) for d in found]))

        flat = replayed(("directions", self.number), solve, given).value
        pieces = flat.split([gradient.numel() for gradient in given])
        copy_all(given, [piece.view(g.shape) for piece, g in zip(pieces, given, strict=True)])


def _write(ready: Sequence[tuple["Stack", list[Tensor]]]) -> None:
    """Turn the gradients of stacks, and copy some directions at a time."""
    gradients: list[Tensor] = []
    directions: list[Tensor] = []
    for stack, own in ready:
        gradients += own
        directions += stack.directions(own)
        if sum([d.nbytes for d in directions]) >= TOGETHER_BYTES:
            copy_all(gradients, directions)
            gradients, directions = [], []
    if gradients:
        copy_all(gradients, directions)


class Stack:
    """Alike layers and their inverses, beside each other.

    Args:
        pairs: equations with layouts, shapes and inverses alike; their operators keep views of the stacked inverses.
    """

    def __init__(self, pairs: Sequence[tuple[Equation, Inverse]]) -> None:
        self.pairs = pairs
        self.weights, *biases = zip(*(equation.trained for equation, _ in pairs), strict=True)
        self.biases: Sequence[Block] = biases[0] if biases else ()
        self.transposed = _transposed(pairs[0][0])
        self.outputs = pairs[0][0].layout.sizes.outputs
        self.P = _moved_together([operator for _, operator in pairs])
        inputs = self.P.shape[-1] - len(biases)
        self.ww, self.wb = self.P[:, :inputs, :inputs].mT, self.P[:, :inputs, inputs:].mT
        self.bw, self.bb = self.P[:, inputs:, :inputs].mT, self.P[:, inputs:, inputs:]

    def gradients(self) -> list[Tensor] | None:
        """The weights' gradients, then the biases'; None where one is missing, sparse or on another device."""
        weights, biases = self._gradients(self.weights), self._gradients(self.biases)
        if weights is None or biases is None:
            return None
        return [*(gradient.mT for gradient in weights), *biases] if self.transposed else [*weights, *biases]

    def directions(self, gradients: list[Tensor]) -> list[Tensor]:
        """The directions that gradients are turned into, in the same order."""
        weights, biases = gradients[: len(self.weights)], gradients[len(self.weights) :]
        with no_autocast(self.P.device.type), float32_products("tf32", self.P):
            W = self._stacked(weights)
            if biases:
                b = self._stacked(biases)
                found = [
                    _product(W, self.ww, torch.bmm(b, self.wb.to(b.dtype))),
                    torch.addcmul(_product(W, self.bw), b, self.bb),
                ]
            else:
                found = [_product(W, self.ww)]
        shapes = [(len(g), *g[0].shape) for g in (weights, biases) if g]
        return [d for each, shape in zip(found, shapes, strict=True) for d in each.reshape(shape).unbind()]

    def _gradients(self, blocks: Iterable[Block]) -> list[Tensor] | None:
        """The blocks' gradients; None where one is missing, sparse or elsewhere."""
        found = []
        for block in blocks:
            gradient = block.parameter.grad if block.whole else block.gradient
            if gradient is None or gradient.is_sparse or gradient.device != self.P.device:
                return None
            found.append(gradient)
        return found

    def _stacked(self, gradients: list[Tensor]) -> Tensor:
        """Gradients of all layers and groups as `[layers·groups, outputs, features]`, in the precision of sums."""
        stacked = torch.stack(gradients) if len(gradients) > 1 else gradients[0]
        stacked = stacked.to(torch.promote_types(self.P.dtype, torch.float32))
        return stacked.reshape(len(self.P), self.outputs, -1)


def _product(W: Tensor, P: Tensor, total: Tensor | None = None) -> Tensor:
    """`WP` for each layer, added to a total if there is one; a GPU multiplies bfloat16 inverses with float32 sums."""
    if P.dtype == W.dtype or not P.is_cuda:
        P = P.to(W.dtype)
        return torch.bmm(W, P) if total is None else total.baddbmm_(W, P)
    W = W.to(P.dtype)
    if total is None:
        return torch.bmm(W, P, out_dtype=torch.float32)
    return torch.baddbmm(total, W, P, out_dtype=torch.float32, out=total)


def _stackable(equation: Equation) -> bool:
    """Whether the equation is about whole outputs of a weight, and perhaps a bias, that are here in whole."""
    layout = equation.layout
    return (
        isinstance(layout, Affine)
        and type(layout) in ROWS_ARE_OUTPUTS
        and all(mesh_of(parameter) is None for parameter in equation.parameters)
    )


def _transposed(equation: Equation) -> bool:
    """Whether the weight is stored as `[inputs, outputs]`."""
    return bool(getattr(equation.layout, "transposed", False))


def _chunks(members: Sequence[tuple[Equation, Inverse]]) -> Iterable[Sequence[tuple[Equation, Inverse]]]:
    equation, operator = members[0]
    one = equation.trained[0].shape.numel() * max(operator.kept.element_size(), torch.float32.itemsize)
    size = max(TOGETHER_BYTES // max(one, 1), 1)
    return (members[i : i + size] for i in range(0, len(members), size))


def _moved_together(operators: Sequence[Inverse]) -> Tensor:
    """All inverses in one tensor, which the operators then keep parts of."""
    first = operators[0].kept
    if len(operators) == 1:
        return first
    P = aligned(first, len(operators) * len(first), first.dtype)
    for operator, part in zip(operators, P.split(len(first)), strict=True):
        operator.kept = part.copy_(operator.kept)
    return P


Whole = Mapping[Tensor, Tensor]
"""Gradients of sharded parameters in whole."""


def write_direction(equation: Equation, operator: Operator, whole: Whole | None = None) -> None:
    """Turn the gradients of an equation's parameters into its direction, in place.

    Args:
        equation: whose parameters hold B in `.grad`.
        operator: what to apply to B.
        whole: tensors that hold B instead, where parameters are sharded.
    """
    if equation.is_diagonal:
        assert isinstance(operator, Solve)
        _rescale(equation.trained[0].parameter, operator, whole)
        return
    blocks, like = equation.trained_blocks, operator.kept
    gradients = [_gradient(block, whole) if block is not None else None for block in blocks]
    shapes = [g.shape if g is not None else None for g in gradients]
    # shards are systems of their own, with fewer outputs
    layout = equation.layout if shapes == equation.shapes else equation.layout_of(shapes)
    if layout.sizes.groups < equation.layout.sizes.groups:  # of a bias alone, each output is a group
        operator = _of_shard(operator, equation.trained[0].parameter)
    wide = torch.promote_types(like.dtype, torch.float32)
    B = layout.to_features(tuple([g.to(like.device, wide) if g is not None else None for g in gradients]))
    with no_autocast(B.device.type):
        solution = operator.apply(B)
    equation.layer._note_failure(solution.failed)
    pairs = zip(gradients, layout.from_features(solution.value), strict=True)
    written = [(g, d) for g, d in pairs if g is not None and d is not None]
    copy_all([gradient for gradient, _ in written], [direction for _, direction in written])


def _gradient(block: Block, whole: Whole | None) -> Tensor:
    """What this rank solves of a block: the gradient in whole, or its shard; zeros where none came."""
    parameter = block.parameter
    gradient = whole[parameter] if whole is not None else parameter.grad
    gradient = local(gradient if gradient is not None else torch.zeros_like(parameter))
    return gradient if block.whole else gradient[block.start : block.stop]


def _of_shard(operator: Operator, parameter: Any) -> Operator:
    """The operator for the groups that this rank holds a shard of."""
    groups, *_ = box(parameter, parameter.device_mesh.get_coordinate())
    if isinstance(operator, Inverse):
        return Inverse(operator.kept[groups])
    assert isinstance(operator, Solve)
    return replace(operator, form=operator.form._replace(M=operator.kept[groups]))


def _rescale(table: nn.Parameter, operator: Solve, whole: Whole | None) -> None:
    """Multiply every row of a table's gradient by its scale."""
    gradient, scale = whole[table] if whole is not None else table.grad, operator.scale()[0]
    if gradient is None:
        return
    if (mesh := mesh_of(gradient)) is not None:
        rows, *_ = box(table, mesh.get_coordinate())
        gradient, scale = local(gradient), scale[rows]
    if not gradient.is_sparse:
        gradient.mul_(scale[:, None].to(gradient.device))
        return
    coalesced = gradient.coalesce()
    index, values = coalesced.indices(), coalesced.values()
    values = (values * scale[index[0]][:, None]).to(values.dtype)
    table.grad = torch.sparse_coo_tensor(
        index, values, gradient.shape, is_coalesced=True, check_invariants=False
    )
