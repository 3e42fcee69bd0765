"""Whether this process is one of several ranks, and what immediate mode says to that."""

import warnings
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
