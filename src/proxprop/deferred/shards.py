"""How parameters lie over ranks: what each rank holds of a DTensor."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from proxprop.distributed import mesh_of


def local(tensor: Any) -> Tensor:
    """What this rank holds; shares memory."""
    held: Tensor = tensor.to_local() if mesh_of(tensor) is not None else tensor
    return held


def cuts(parameter: Any) -> int:
    """How many shards a parameter is cut into."""
    if mesh_of(parameter) is None:
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if cut_dimension(placement) is not None)


def box(parameter: Any, coordinate: Sequence[int]) -> tuple[slice, ...]:
    """The part of a parameter that the rank at a coordinate of its mesh holds; torch cuts as `Tensor.chunk` does.

    Where FSDP2 cuts what tensor parallelism has cut along the same dimension, it cuts second.
    """
    sides = [range(size) for size in parameter.shape]
    cutting = list(zip(parameter.device_mesh.shape, parameter.placements, coordinate, strict=True))
    for size, placement, at in sorted(cutting, key=lambda cut: hasattr(cut[1], "split_factor")):
        if (dim := cut_dimension(placement)) is not None:
            chunk = -(-len(sides[dim]) // size)
            sides[dim] = sides[dim][at * chunk : (at + 1) * chunk]
    return tuple(slice(side.start, side.stop) for side in sides)


def cut_dimension(placement: Any) -> int | None:
    """The dimension that a placement cuts; None where every rank holds all of it."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def whole(tensor: Any) -> Tensor:
    """A tensor in whole; without its graph where it has to be gathered from the ranks of its mesh."""
    full: Tensor = tensor.detach().full_tensor() if mesh_of(tensor) is not None else tensor
    return full


def is_sharded(module: nn.Module) -> bool:
    """Whether a module was given to `fully_shard`."""
    return hasattr(module, "set_requires_gradient_sync")
