"""An equation `(λI + S) D = B`: the rows of parameters that it is about, and how they lie in it.

Equations that share rows, as those of tied layers and packed projections do, become equations that share none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxprop.nn.layer import Part, ProximalLayer
from proxprop.solvers import DIAGONAL, FEATURE, Sizes
from proxprop.solvers.matmul import transposed_square
from proxprop.transfer import Affine, LinearTransfer, Shapes, Transfer
from proxprop.transfer.transfer import Layout, Parameters


@dataclass(frozen=True, eq=False)
class Block:
    """Rows `start` to `stop` of a parameter."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def trained(self) -> bool:
        """Whether the parameter is trained."""
        return self.parameter.requires_grad

    @cached_property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return self.start == 0 and self.stop == self.parameter.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the rows."""
        return torch.Size([self.stop - self.start, *self.parameter.shape[1:]])

    @property
    def gradient(self) -> Tensor | None:
        """The gradient's rows, a view; None where there is no gradient."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.whole else gradient[self.start : self.stop]

    def meets(self, other: "Block") -> bool:
        """Whether the two have rows in common."""
        same = self.parameter is other.parameter
        return same and self.start < other.stop and other.start < self.stop


@dataclass(eq=False)
class Equation:
    """The rows of parameters that an equation is about.

    Attributes:
        name: how messages call it.
        layer: the layer whose settings apply.
        blocks: the parameters' rows; None for a parameter that the layer does not have.
        layout_of: makes a layout from the blocks' shapes.
        ones: whether S ends with a column of ones, of a bias.
    """

    name: str
    layer: ProximalLayer
    blocks: tuple[Block | None, ...]
    layout_of: Callable[[Shapes], Layout]
    ones: bool = field(default=False, init=False)
    _layout: tuple[Shapes, Layout] | None = field(default=None, init=False, repr=False)

    @property
    def identity(self) -> tuple[object, ...]:
        """The name and what is trained: the same for equations that were joined at different times."""
        return self.name, *(id(block.parameter) for block in self.trained)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that have rows in this equation."""
        return [block.parameter for block in self.blocks if block is not None]

    @property
    def trained_blocks(self) -> list[Block | None]:
        """The blocks; None for one that is not trained."""
        return [block if block is not None and block.trained else None for block in self.blocks]

    @property
    def trained(self) -> list[Block]:
        """The blocks that are trained."""
        return [block for block in self.trained_blocks if block is not None]

    @property
    def shapes(self) -> Shapes:
        """The blocks' shapes; None for one that is not trained."""
        return [block.shape if block is not None else None for block in self.trained_blocks]

    @property
    def layout(self) -> Layout:
        """The equation's sizes and how parameters lie in it; kept until other blocks are trained."""
        shapes = self.shapes
        if self._layout is None or self._layout[0] != shapes:
            self._layout = shapes, self.layout_of(shapes)
        return self._layout[1]

    @property
    def is_diagonal(self) -> bool:
        """Whether S is a diagonal."""
        return DIAGONAL in self.layout.spaces

    @property
    def gram_shape(self) -> torch.Size:
        """The shape of S: `[groups, features, features]`, or `[groups, features]` of a diagonal."""
        groups, _, features, _ = self.layout.sizes
        return torch.Size([groups, features] if self.is_diagonal else [groups, features, features])

    def meets(self, other: "Equation", trained: bool = False) -> bool:
        """Whether the two have a row in common, or one that is trained."""
        mine, theirs = (e.trained if trained else [b for b in e.blocks if b] for e in (self, other))
        return any(block.meets(another) for block in mine for another in theirs)


def equation_of(name: str, layer: ProximalLayer, part: Part, width: int | None = None) -> Equation:
    """The equation of one of a layer's parts; that of an only part may have its features in blocks of a width."""
    blocks = tuple(b and _rows(layer.get_parameter(b[0]), b[1]) for b in part.blocks)
    layout_of: Callable[[Shapes], Layout] = part.call.layout
    if width is not None and len(layer._parts()) == 1:
        layout_of = partial(_in_blocks, part.call.layout, width)
    return Equation(name, layer, blocks, layout_of)


def _rows(parameter: nn.Parameter, rows: slice) -> Block:
    start, stop, _ = rows.indices(parameter.shape[0])
    return Block(parameter, start, stop)


class BlockLayout(Layout):
    """A layer's features in blocks of neighbours, between which S is taken to be zero; the bias is in the last.

    Blocks are groups of the system. They are equally wide: the last one is padded with features that are always zero.

    Args:
        whole: the layer's own layout.
        width: most features of a block.
    """

    spaces = (FEATURE,)

    def __init__(self, whole: Layout, width: int) -> None:
        groups, samples, features, outputs = whole.sizes
        self.whole, self.count = whole, -(-features // width)
        self.width = -(-features // self.count)
        self.sizes = Sizes(groups * self.count, samples, self.width, outputs)

    @property
    def behind(self) -> int:
        """Number of features that pad the last block."""
        return self.count * self.width - self.whole.sizes.features

    def to_features(self, parameters: Parameters) -> Tensor:
        """The layer's features, block by block."""
        return functional.pad(self.whole.to_features(parameters), (0, 0, 0, self.behind)).reshape(
            self.sizes.groups, self.width, -1
        )

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        groups, _, features, outputs = self.whole.sizes
        return self.whole.from_features(V.reshape(groups, -1, outputs)[:, :features])

    def blocks_of(self, S: Tensor) -> Tensor:
        """The blocks on the diagonal of `S [groups, features, features]`."""
        padded = functional.pad(S, (0, self.behind, 0, self.behind))
        blocks: Tensor = padded.view(-1, self.count, self.width, self.count, self.width).diagonal(0, 1, 3)
        return blocks.movedim(-1, 1).flatten(0, 1)

    def gram_of(self, transfer: Transfer) -> Tensor:
        """The blocks of a call's S; those of a linear layer are all that is formed."""
        if not isinstance(transfer, LinearTransfer):
            return self.blocks_of(transfer.gram())
        (A,) = transfer.rows()
        ones = [A.new_ones(len(A), 1)] if transfer.bias else []
        A = functional.pad(torch.cat([A, *ones], 1), (0, self.behind))
        return transposed_square(A.view(len(A), self.count, self.width).transpose(0, 1))


def _in_blocks(layout_of: Callable[[Shapes], Layout], width: int, shapes: Shapes) -> Layout:
    """A layout with its features in blocks, where they are more than one block has."""
    layout = layout_of(shapes)
    coupled = isinstance(layout, Affine) and layout.sizes.features > width
    return BlockLayout(layout, width) if coupled else layout


AnyEquation = TypeVar("AnyEquation", bound=Equation)


def components(equations: Iterable[AnyEquation], trained: bool = False) -> list[list[AnyEquation]]:
    """Equations in as many lists as possible such that those in different lists have no row in common."""
    found: list[list[AnyEquation]] = []
    for equation in equations:
        met = [part for part in found if any(equation.meets(other, trained) for other in part)]
        found = [part for part in found if part not in met] + [[e for part in met for e in part] + [equation]]
    return found


class Term(NamedTuple):
    """What was summed or averaged for an equation.

    Attributes:
        equation: the equation.
        S: `[groups, features, features]`, or a diagonal `[groups, features]`.
        counted: the number of samples; None where S holds it, or nobody counts.
    """

    equation: Equation
    S: Tensor
    counted: Tensor | None = None

    @property
    def samples(self) -> Tensor | None:
        """The number of samples; under a bias, the square of S's column of ones."""
        return self.S[0, -1, -1] if self.equation.ones else self.counted

    def to(self, *like: Any) -> "Term":
        """The same elsewhere, or in another precision."""
        return Term(self.equation, *(tensor.to(*like) for tensor in self[1:] if tensor is not None))


def total(terms: Sequence[Term]) -> Tensor | None:
    """The number of samples of all terms together; None where nobody counts."""
    counts = [samples for term in terms if (samples := term.samples) is not None]
    return torch.stack(counts).sum(0) if counts else None


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
        if len(sharing) == 1:
            yield sharing[0]
        elif sharing[0].S.dim() == 2:  # tables, whose S is diagonal
            yield sharing[0]._replace(S=torch.stack([t.S for t in sharing]).sum(0), counted=total(sharing))
        else:
            yield from _cut_and_added(sharing)


def _cut_and_added(terms: Sequence[Term]) -> Iterator[Term]:
    weights = [_weight(term.equation) for term in terms]
    cuts = sorted({edge for weight in weights for edge in (weight.start, weight.stop)})
    for start, stop in pairwise(cuts):
        pairs = zip(terms, weights, strict=True)
        covering = [term for term, weight in pairs if weight.start <= start and stop <= weight.stop]
        yield _added(covering, start, stop)


def _weight(equation: Equation) -> Block:
    """The block that terms share: the first one that is trained."""
    return equation.trained[0]


def _added(terms: Sequence[Term], start: int, stop: int) -> Term:
    """The sum of terms that all cover these rows of the weight."""
    first = terms[0].equation
    weight = Block(_weight(first).parameter, start, stop)
    biases: list[Block] = []
    places: list[int | None] = []  # of each term's bias among all of them
    for term in terms:
        own = [_beside(block, _weight(term.equation), weight) for block in term.equation.trained[1:]]
        biases += [bias for bias in own if not any(bias.meets(other) for other in biases)]
        places.append(next((i for bias in own for i, other in enumerate(biases) if bias.meets(other)), None))
    features = terms[0].S.shape[-1] - (places[0] is not None)
    size = features + len(biases)
    S = terms[0].S.new_zeros(terms[0].S.shape[0], size, size)
    for term, place in zip(terms, places, strict=True):
        _add(S, term.S, features, place)
    _fill_unseen(S, features)

    def layout_of(shapes: Shapes) -> Layout:
        return JointLayout(first.layout_of([shapes[0], None]), len(biases))

    equation = Equation(f"{first.name}[{start}:{stop}]", first.layer, (weight, *biases), layout_of)
    return Term(equation, S, total(terms))


class JointLayout(Layout):
    """A weight shared by layers that have biases of their own: features are the weight's, then a bias each.

    Args:
        weight: the layout of the weight alone.
        biases: how many biases there are.
    """

    spaces = (FEATURE,)

    def __init__(self, weight: Layout, biases: int) -> None:
        groups, samples, features, outputs = weight.sizes
        self.weight, self.biases = weight, biases
        self.sizes = Sizes(groups, samples, features + biases, outputs)

    def to_features(self, parameters: Parameters) -> Tensor:
        """The weight's features, then one for each bias."""
        weight, *biases = parameters
        groups, _, _, outputs = self.sizes
        rows = [bias.reshape(groups, 1, outputs) for bias in biases if bias is not None]
        return torch.cat([self.weight.to_features((weight, None)), *rows], dim=-2)

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        features = V.shape[-2] - self.biases
        weight, _ = self.weight.from_features(V[:, :features])
        return weight, *(V[:, features + i].reshape(-1).clone() for i in range(self.biases))


def _beside(bias: Block, weight: Block, cut: Block) -> Block:
    """The rows of a bias that go with some of the weight's rows."""
    offset = bias.start - weight.start
    return Block(bias.parameter, offset + cut.start, offset + cut.stop)


def _add(S: Tensor, summand: Tensor, features: int, place: int | None) -> None:
    """Add S of one term. Its last feature, if it has a bias, is feature `features + place` here."""
    S[:, :features, :features] += summand[:, :features, :features]
    if place is not None:
        at = features + place
        S[:, :features, at] += summand[:, :features, -1]
        S[:, at, :features] += summand[:, -1, :features]
        S[:, at, at] += summand[:, -1, -1]


def _fill_unseen(S: Tensor, features: int) -> None:
    """Give biases that no sample came to yet the mean of the rest of the diagonal; it stays the mean of all."""
    diagonal = S.diagonal(dim1=1, dim2=2)
    unseen = diagonal == 0
    unseen[:, :features] = False
    diagonal += unseen * (diagonal.sum(-1, keepdim=True) / (~unseen).sum(-1, keepdim=True))


def why_not_joint(one: Equation, other: Equation) -> str:
    """Why two equations that share a parameter can't be joined; empty if they can."""
    mine, theirs = one.layout, other.layout
    if isinstance(mine, BlockLayout):
        return "their features are in blocks (Running(block=...))"
    same = type(mine) is type(theirs) and mine.sizes.groups == theirs.sizes.groups
    same = same and getattr(mine, "transposed", None) == getattr(theirs, "transposed", None)
    if not same or _weight(one).parameter is not _weight(other).parameter:
        return "their parameters lie differently in the two systems"
    left, right = one.layer._settings, other.layer._settings
    if (left.solver, left.tau_theta, left.scaling) != (right.solver, right.tau_theta, right.scaling):
        return "the two have different settings"
    return ""
