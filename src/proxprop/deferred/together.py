"""Alike layers whose inverses are kept are turned together: a few calls for all of them, not a dozen for each.

With W `[outputs, inputs]` and b `[outputs]` the gradients of a weight and a bias, which are the features of one system,

    P = (P_ww  p_wb; p_bw  p_bb),    D_W = W P_wwᵀ + b p_wbᵀ,    D_b = W p_bwᵀ + b p_bb,

stacked over layers and groups. The inverses are moved beside each other when they were made anew, not in every step.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from proxprop import tuning
from proxprop.backward import no_autocast
from proxprop.deferred.equation import Block, Equation
from proxprop.deferred.operator import Inverse, Operator
from proxprop.deferred.step import direct
from proxprop.device import round_up
from proxprop.distributed import mesh_of
from proxprop.torch_internals import copy_all
from proxprop.transfer import Affine, BilinearTransfer, ConvTransfer, LinearTransfer, NormTransfer

TOGETHER_BYTES = 64 * 2**20
"""Most bytes of gradients, and of inverses, that are stacked; a larger layer is turned alone."""

ROWS_ARE_OUTPUTS = (LinearTransfer, ConvTransfer, BilinearTransfer, NormTransfer)
"""Layouts whose weight is `[groups·outputs, inputs]` but for its shape."""

Pair = tuple[Equation, Operator]


class Directions:
    """Turns gradients into directions, and remembers which layers are turned together."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], Plan] = {}

    def turn(self, pairs: Sequence[Pair]) -> None:
        """Turn the gradients of equations into directions, in place, each with its operator."""
        key = tuple(id(operator) for _, operator in pairs)  # not reused, as a plan holds its operators
        plan = self._plans.get(key)
        if plan is None:
            equations = {equation for equation, _ in pairs}
            self._plans = {k: p for k, p in self._plans.items() if p.equations.isdisjoint(equations)}
            plan = self._plans[key] = Plan(pairs)
        plan.turn()


class Plan:
    """Which of some layers are turned together.

    Args:
        pairs: an equation and its operator each.

    Attributes:
        equations: the equations.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.equations = {equation for equation, _ in pairs}
        alike: dict[tuple[object, ...], list[tuple[Equation, Inverse]]] = {}
        self.alone: list[Pair] = []
        for equation, operator in pairs:
            if isinstance(operator, Inverse) and _stackable(equation):
                P, shapes = operator.kept, tuple(equation.shapes)
                key = type(equation.layout), shapes, P.shape, P.dtype, P.device
                alike.setdefault(key, []).append((equation, operator))
            else:
                self.alone.append((equation, operator))
        self.stacks: list[Stack] = []
        for members in alike.values():
            for chunk in _chunks(members):
                if len(chunk) > 1:
                    self.stacks.append(Stack(chunk))
                else:
                    self.alone += chunk

    def turn(self) -> None:
        """Turn all gradients."""
        for stack in self.stacks:
            stack.turn()
        for pair in self.alone:
            direct(*pair)


class Stack:
    """Alike layers and their inverses, beside each other.

    Args:
        pairs: equations with layouts, shapes and inverses alike; their operators keep views of the stacked inverses.
    """

    def __init__(self, pairs: Sequence[tuple[Equation, Inverse]]) -> None:
        self.pairs = pairs
        self.weights, *biases = zip(*(equation.trained for equation, _ in pairs), strict=True)
        self.biases: Sequence[Block] = biases[0] if biases else ()
        self.outputs = pairs[0][0].layout.sizes.outputs
        self.P = _moved_together([operator for _, operator in pairs])
        inputs = self.P.shape[-1] - len(biases)
        self.ww, self.wb = self.P[:, :inputs, :inputs].mT, self.P[:, :inputs, inputs:].mT
        self.bw, self.bb = self.P[:, inputs:, :inputs].mT, self.P[:, inputs:, inputs:]

    def turn(self) -> None:
        """Turn the gradients of all layers; one by one where they do not lie as the inverses do."""
        weights = self._gradients(self.weights)
        biases = self._gradients(self.biases)
        if weights is None or biases is None:
            for pair in self.pairs:
                direct(*pair)
            return
        with no_autocast(self.P.device.type):
            W = self._stacked(weights)
            if not biases:
                D = [torch.bmm(W, self.ww)]
            else:
                b = self._stacked(biases)
                D = [(b * self.wb).baddbmm_(W, self.ww), (b * self.bb).baddbmm_(W, self.bw)]
        gradients = [weights, biases] if biases else [weights]
        found = [d.reshape(len(g), *g[0].shape).unbind() for d, g in zip(D, gradients, strict=True)]
        copy_all([*weights, *biases], [part for parts in found for part in parts])

    def _gradients(self, blocks: Iterable[Block]) -> list[Tensor] | None:
        """The blocks' gradients; None where one is missing, sparse or elsewhere."""
        found = []
        for block in blocks:
            gradient = block.gradient
            if gradient is None or gradient.is_sparse or gradient.device != self.P.device:
                return None
            found.append(gradient)
        return found

    def _stacked(self, gradients: list[Tensor]) -> Tensor:
        """Gradients of all layers and groups as `[layers·groups, outputs, features]`."""
        return torch.stack(gradients).to(self.P.dtype).reshape(len(self.P), self.outputs, -1)


def _stackable(equation: Equation) -> bool:
    """Whether the equation is about whole outputs of a weight, and perhaps a bias, that are here in whole."""
    layout = equation.layout
    return (
        isinstance(layout, Affine)
        and type(layout) in ROWS_ARE_OUTPUTS
        and layout.weight_shape is not None
        and not getattr(layout, "transposed", False)
        and all(mesh_of(parameter) is None for parameter in equation.parameters)
    )


def _chunks(members: Sequence[tuple[Equation, Inverse]]) -> Iterable[Sequence[tuple[Equation, Inverse]]]:
    equation, operator = members[0]
    P = operator.kept
    largest = max(P.numel(), equation.trained[0].shape.numel()) * P.element_size()
    size = max(TOGETHER_BYTES // max(largest, 1), 1)
    return (members[i : i + size] for i in range(0, len(members), size))


def _moved_together(operators: Sequence[Inverse]) -> Tensor:
    """All inverses in one tensor, which the operators then keep parts of; rows begin where a GPU likes them to."""
    groups, features, _ = operators[0].kept.shape
    stride = round_up(features, tuning.ALIGNED)
    P = operators[0].kept.new_empty(len(operators) * groups, features, stride)[..., :features]
    for operator, part in zip(operators, P.split(groups), strict=True):
        operator.kept = part.copy_(operator.kept)
    return P
