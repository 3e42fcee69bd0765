"""Several ranks: whether there are any, what each of them holds, and what immediate mode refuses or warns of."""

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from proxprop.torch_internals import active_ddp, sharded_modules


def several_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh of a DTensor; None for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


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
    """The whole of a tensor, gathered from the ranks of its mesh without its graph where it is cut."""
    full: Tensor = tensor.detach().full_tensor() if mesh_of(tensor) is not None else tensor
    return full


def is_sharded(module: nn.Module) -> bool:
    """Whether a module was given to `fully_shard`."""
    return hasattr(module, "set_requires_gradient_sync")


_told: set[str] = set()
_seen: WeakSet[nn.Module] = WeakSet()


def check_layer(layer: nn.Module, name: str, attached: bool) -> None:
    """Look at a layer in its forward, on one of several ranks.

    Warns once if its model is data-parallel and it solves inside backward.

    Raises:
        TypeError: the layer's parameters are spread over ranks while it computes, in a way that is not solved for.
    """
    for key, parameter in layer.named_parameters(recurse=False):
        if mesh_of(parameter) is None:
            continue
        spread = f"{name}: {key} is a DTensor in the layer's forward (tensor parallel)"
        if not attached:
            raise TypeError(
                f"{spread}, which is not solved for inside backward: no rank has all features and outputs. Call "
                "proxprop.attach(optimizer, model), or leave the layer out with exclude=[...]"
            )
        if active_ddp() is not None:
            raise TypeError(
                f"{spread}, and DistributedDataParallel does not tell which ranks share its batch. Use fully_shard "
                "on a mesh with both dimensions, or leave the layer out with exclude=[...]"
            )
    if not attached and (around := _data_parallel(layer)) and around not in _told:
        _told.add(around)
        warnings.warn(
            f"{name}: under {around} each rank solves for its own share of the batch, and the average of their "
            "solutions is not the direction of the whole batch. proxprop.attach(optimizer, model) solves for the "
            "whole batch, whatever the number of ranks",
            UserWarning,
            stacklevel=2,
        )


def _data_parallel(layer: nn.Module) -> str:
    """The name of what spreads the layer's batch over ranks; empty where nothing does."""
    if active_ddp() is not None:
        return "DistributedDataParallel"
    if layer in _seen:
        return ""
    _seen.add(layer)
    inside = (module for root in sharded_modules() for module in root.modules())
    return "fully_shard" if any(layer is module for module in inside) else ""
