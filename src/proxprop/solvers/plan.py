"""Which space to solve in, and why."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from proxprop.solvers.solver import DIAGONAL, FEATURE, MATRIX_FREE, SAMPLE, SPACES, Sizes, Solver


@dataclass(frozen=True)
class Cost:
    """What one space costs beyond BackProp.

    Attributes:
        flops: FLOPs.
        numbers: numbers stored.
        effort: FLOPs weighted by their price on this device, in FLOPs of a product with K or S. Efforts are compared.
    """

    flops: float
    numbers: float
    effort: float

    def ratio(self, sizes: Sizes) -> float:
        """Extra FLOPs as a fraction of BackProp's for this layer."""
        return self.flops / sizes.backprop_flops if sizes.backprop_flops else 0.0


@dataclass(frozen=True)
class Plan:
    """A choice of space, and the costs behind it.

    Attributes:
        space: where the system is solved: "sample", "feature", "matrix_free", or "diagonal" in closed form.
        sizes: the system's sizes.
        costs: cost of every space the solver can work in.
        pinned: whether the user chose, rather than the cost model.
        backend: what solves in this space, and in feature space how S is formed; empty if not asked for.
    """

    space: str
    sizes: Sizes
    costs: dict[str, Cost]
    pinned: bool
    backend: str = field(default="", compare=False)

    @property
    def flops(self) -> float:
        """FLOPs beyond BackProp's in the chosen space."""
        return self.costs[self.space].flops

    @property
    def backprop_flops(self) -> float:
        """FLOPs of BackProp for this layer."""
        return self.sizes.backprop_flops

    @property
    def bytes(self) -> int:
        """Extra memory in the chosen space while this layer is solved, in float32."""
        return int(4 * self.costs[self.space].numbers)

    def __str__(self) -> str:
        how = "pinned" if self.pinned else "closed form" if self.space == DIAGONAL else "fewest FLOPs"
        if how == "fewest FLOPs" and any(cost.effort != cost.flops for cost in self.costs.values()):
            how += " by their price on this device"
        ranked = sorted(self.costs.items(), key=lambda item: item[1].effort)
        costs = ", ".join(f"{space} {cost.ratio(self.sizes):.3g}x" for space, cost in ranked)
        return f"{self.space} ({how}; beyond BackProp: {costs})"


def choose_plan(
    sizes: Sizes,
    solver: Solver,
    space: str | None = None,
    available: tuple[str, ...] = SPACES,
    gram_flops: float | None = None,
    gram_price: float = 1.0,
    own_price: float = 1.0,
) -> Plan:
    """Choose the space with the fewest FLOPs, or the pinned one.

    With N samples, n features and m outputs, a space costs its Gram matrix (`2N²n` for K, `2Nn²` for S, nothing
    matrix-free) and the solver's own work, beyond BackProp's `6Nnm`.

    Args:
        sizes: the system's sizes, features counted with the ones column.
        solver: has the spaces it can work in and its FLOPs there.
        space: the pinned space; None to choose.
        available: the spaces that the layer has.
        gram_flops: FLOPs of S, if the layer needs fewer than `2Nn²`.
        gram_price: price of one of these FLOPs, in FLOPs of a product with K or S.
        own_price: price of a FLOP of the layer's own products, likewise.

    Raises:
        ValueError: the solver and the layer have no space in common, or lack the pinned one.

    Example:
        >>> from proxprop import CG
        >>> print(choose_plan(Sizes(groups=1, samples=500, features=3073, outputs=4000), CG(3)))
        sample (fewest FLOPs; beyond BackProp: sample 0.204x, matrix_free 2x, feature 6.4x)
    """
    spaces = possible_spaces(solver, space, available)
    usable = [name for name in available if name in (*solver.spaces, DIAGONAL)]
    prices = gram_price, own_price
    costs = {name: _cost(sizes, solver, name, gram_flops, prices) for name in usable}
    cheapest = spaces[0]
    for name in spaces[1:]:  # a loop, because torch.compile does not trace `min(..., key=...)`
        if costs[name].effort < costs[cheapest].effort:
            cheapest = name
    return Plan(cheapest, sizes, costs, pinned=cheapest == space)


def remembered_plan(*question: Any) -> Plan:
    """`choose_plan`, cached: choosing takes four times as long as looking up."""
    try:
        return _remembered(*question)
    except TypeError:  # a solver or a symbolic size that can't be hashed
        return choose_plan(*question)


_remembered = lru_cache(maxsize=1024)(choose_plan)


def possible_spaces(
    solver: Solver, space: str | None, available: tuple[str, ...] = SPACES
) -> tuple[str, ...]:
    """The spaces to choose from, or only the pinned one.

    Raises:
        ValueError: there is none.
    """
    if space is not None and space not in SPACES:
        raise ValueError(f"space should be one of {', '.join(SPACES)} or None (choose) but is {space!r}")
    if DIAGONAL in available:
        return (DIAGONAL,)
    wanted = solver.spaces if space is None else (space,)
    common = tuple(name for name in wanted if name in solver.spaces and name in available)
    if not common:
        asked = "any space" if space is None else f"space {space!r}"
        raise ValueError(
            f"{solver!r} cannot solve this layer in {asked}: the solver works in {', '.join(solver.spaces)}, "
            f"the layer has {', '.join(available)}"
        )
    return common


def _cost(
    sizes: Sizes, solver: Solver, space: str, gram_flops: float | None, prices: tuple[float, float]
) -> Cost:
    """The cost of a space beyond BackProp: its Gram matrix, the solver, and about four arrays of the unknowns."""
    groups, samples, features, outputs = sizes
    if space == DIAGONAL:
        flops = groups * (samples + features * outputs)
        return Cost(flops, groups * features, flops)
    form = {
        SAMPLE: 2.0 * groups * samples**2 * features,
        FEATURE: 2.0 * groups * samples * features**2 if gram_flops is None else gram_flops,
        MATRIX_FREE: 0.0,
    }
    numbers = {
        SAMPLE: samples**2 + 4.0 * samples * outputs,
        FEATURE: features**2 + 4.0 * features * outputs,
        MATRIX_FREE: (samples + 4.0 * features) * outputs,
    }
    gram_price, own_price = prices
    forming, solving = form[space], solver.flops(sizes, space)
    effort = forming * (gram_price if space == FEATURE else 1.0)
    effort += solving * (own_price if space == MATRIX_FREE else 1.0)
    return Cost(forming + solving, groups * numbers[space], effort)
