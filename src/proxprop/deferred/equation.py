"""An equation `(λI + S) D = B`: the rows of parameters that it is about, and how they lie in it.

Equations that share parameters, as those of tied layers and packed projections do, become equations that share none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL
from proxprop.transfer import Affine, Shapes, Transfer
from proxprop.transfer.layouts import BlockLayout, JointLayout


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of a parameter."""

    parameter: nn.Parameter
    rows: slice

    @property
    def trained(self) -> bool:
        """Whether the parameter is trained."""
        return self.parameter.requires_grad

    @property
    def whole(self) -> bool:
        """Whether all rows were meant."""
        return self.rows == slice(None)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first row and the one behind the last."""
        start, stop, _ = self.rows.indices(self.parameter.shape[0])
        return start, stop

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows."""
        if self.whole:
            return self.parameter.shape
        start, stop = self.bounds
        return torch.Size([stop - start, *self.parameter.shape[1:]])

    @property
    def gradient(self) -> Tensor | None:
        """The gradient's rows, a view; None where there is none."""
        gradient = self.parameter.grad
        if gradient is None or self.whole or gradient.is_sparse:
            return gradient
        return gradient[self.rows]

    def meets(self, other: "Block") -> bool:
        """Whether the two have rows in common."""
        (start, stop), (first, behind) = self.bounds, other.bounds
        return self.parameter is other.parameter and start < behind and first < stop

    def within(self, start: int, stop: int) -> "Block":
        """Rows `start` to `stop`, counted from this block's first."""
        first, _ = self.bounds
        return Block(self.parameter, slice(first + start, first + stop))


@dataclass(eq=False)
class Equation:
    """What an equation is about.

    Attributes:
        name: how messages call it.
        layer: whose settings apply.
        blocks: the parameters' rows; None for a parameter that the layer does not have.
        layout_of: makes a transfer without samples from the blocks' shapes.
    """

    name: str
    layer: ProximalLayer
    blocks: tuple[Block | None, ...]
    layout_of: Callable[[Shapes], Transfer]
    _layout: tuple[Shapes, Transfer] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, name: str, layer: ProximalLayer, part: Part, width: int | None = None) -> "Equation":
        """The equation of one of a layer's parts; the only one may have its features in blocks of a width."""
        blocks = (b and Block(layer.get_parameter(b[0]), b[1]) for b in part.blocks)
        layout_of = part.call.layout
        if width is not None and len(layer._parts()) == 1:
            layout_of = partial(in_blocks, part.call.layout, width)
        return Equation(name, layer, tuple(blocks), layout_of)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that rows of are in this equation."""
        return [block.parameter for block in self.blocks if block is not None]

    @property
    def trained(self) -> list[Block]:
        """The blocks that are trained."""
        return [block for block in self.blocks if block is not None and block.trained]

    @property
    def shapes(self) -> Shapes:
        """The blocks' shapes, None for one that is not trained."""
        return [block.shape if block is not None and block.trained else None for block in self.blocks]

    @property
    def layout(self) -> Transfer:
        """The equation's sizes and how parameters lie in it; kept until others of its blocks are trained."""
        shapes = self.shapes
        if self._layout is None or self._layout[0] != shapes:
            self._layout = shapes, self.layout_of(shapes)
        return self._layout[1]

    def meets(self, other: "Equation", trained: bool = False) -> bool:
        """Whether the two are about a row in common, or about one that is trained."""
        mine, theirs = (e.trained if trained else [b for b in e.blocks if b] for e in (self, other))
        return any(block.meets(another) for block in mine for another in theirs)


AnyEquation = TypeVar("AnyEquation", bound=Equation)


def components(equations: Iterable[AnyEquation], trained: bool = False) -> list[list[AnyEquation]]:
    """Equations in as many lists as possible such that those in different lists have no row in common."""
    found: list[list[AnyEquation]] = []
    for equation in equations:
        met = [part for part in found if any(equation.meets(other, trained) for other in part)]
        found = [part for part in found if part not in met] + [[e for part in met for e in part] + [equation]]
    return found


def in_blocks(layout_of: Callable[[Shapes], Transfer], width: int, shapes: Shapes) -> Transfer:
    """A layout with its features in blocks, where they are more than one block has."""
    layout = layout_of(shapes)
    coupled = isinstance(layout, Affine) and layout.sizes.features > width
    return BlockLayout(layout, width) if coupled else layout


class Term(NamedTuple):
    """An equation with its S `[groups, features, features]` (or diagonal `[groups, features]`) and samples."""

    equation: Equation
    S: Tensor
    samples: Tensor | None


def join(terms: Sequence[Term]) -> Iterator[Term]:
    """Equations that share rows as equations that share none: S of what is shared is added up.

    Cuts rows of the weight where a term starts or ends (attention's packed projections), and gives layers that share
    a weight a feature each for their biases.

    Args:
        terms: of layers that `why_not_joint` has nothing against.
    """
    by_equation = {term.equation: term for term in terms}
    for equations in components(by_equation, trained=True):
        sharing = [by_equation[equation] for equation in equations]
        yield from sharing if len(sharing) == 1 else _added(sharing)


def _added(terms: Sequence[Term]) -> Iterator[Term]:
    if terms[0].S.dim() == 2:  # tables, whose S is diagonal
        yield Term(terms[0].equation, torch.stack([t.S for t in terms]).sum(0), total(terms))
        return
    bounds = [_weight(term.equation).bounds for term in terms]
    cuts = sorted({edge for pair in bounds for edge in pair})
    for start, stop in pairwise(cuts):
        covering = [
            term
            for term, (first, behind) in zip(terms, bounds, strict=True)
            if first <= start and stop <= behind
        ]
        if covering:
            yield _joint(covering, start, stop)


def _weight(equation: Equation) -> Block:
    """The block that terms share: the first one that is trained."""
    return equation.trained[0]


def total(terms: Sequence[Term]) -> Tensor | None:
    """The number of samples of all of them; None where nobody counts."""
    counts = [term.samples for term in terms if term.samples is not None]
    return torch.stack(counts).sum(0) if counts else None


def _joint(terms: Sequence[Term], start: int, stop: int) -> Term:
    """The sum of terms that all cover these rows of the weight."""
    first = terms[0].equation
    weight = Block(_weight(first).parameter, slice(start, stop))
    biases: list[Block] = []
    places: list[int | None] = []  # of each term's bias among all of them
    for term in terms:
        own = [_cut(block, _weight(term.equation), start, stop) for block in term.equation.trained[1:]]
        biases += [bias for bias in own if not any(bias.meets(other) for other in biases)]
        places.append(next((i for bias in own for i, other in enumerate(biases) if bias.meets(other)), None))
    features = terms[0].S.shape[-1] - (places[0] is not None)
    size = features + len(biases)
    S = terms[0].S.new_zeros(terms[0].S.shape[0], size, size)
    for term, place in zip(terms, places, strict=True):
        _add(S, term.S, features, place)
    layout_of = first.layout_of

    def joint_layout(shapes: Shapes) -> Transfer:
        return JointLayout(layout_of([shapes[0], None]), len(biases))

    equation = Equation(f"{first.name}[{start}:{stop}]", first.layer, (weight, *biases), joint_layout)
    return Term(equation, S, total(terms))


def _add(S: Tensor, summand: Tensor, features: int, place: int | None) -> None:
    """Add S of one term, whose bias, if there is one, is its last feature and feature `features + place` here."""
    S[:, :features, :features] += summand[:, :features, :features]
    if place is not None:
        at = features + place
        S[:, :features, at] += summand[:, :features, -1]
        S[:, at, :features] += summand[:, -1, :features]
        S[:, at, at] += summand[:, -1, -1]


def _cut(bias: Block, weight: Block, start: int, stop: int) -> Block:
    """The rows of a bias that go with rows `start` to `stop` of the weight's parameter."""
    first, _ = weight.bounds
    return bias.within(start - first, stop - first)


def why_not_joint(one: Equation, other: Equation) -> str:
    """Why two equations that share a parameter can't be joined; empty if they can."""
    mine, theirs = one.layout, other.layout
    if isinstance(mine, BlockLayout):
        return "their features are in blocks (Running(block=...))"
    same = type(mine) is type(theirs) and mine.sizes.groups == theirs.sizes.groups
    same = same and getattr(mine, "transposed", None) == getattr(theirs, "transposed", None)
    if not same or _weight(one).parameter is not _weight(other).parameter:
        return "their parameters lie differently in the two systems"
    if len(one.blocks) == 1 and DIAGONAL not in mine.spaces:
        return "their systems are not about a weight and a bias"
    left, right = one.layer._settings, other.layer._settings
    if (left.solver, left.tau_theta, left.scaling) != (right.solver, right.tau_theta, right.scaling):
        return "the two have different settings"
    return ""
