"""An equation `(λI + S) D = B`: the rows of parameters that it is about, and how they lie in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from proxprop.nn.layer import Part, ProximalLayer
from proxprop.transfer import Shapes, Transfer


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
    def of(cls, name: str, layer: ProximalLayer, part: Part) -> "Equation":
        """The equation of one of a layer's parts."""
        blocks = (b and Block(layer.get_parameter(b[0]), b[1]) for b in part.blocks)
        return Equation(name, layer, tuple(blocks), part.call.layout)

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
