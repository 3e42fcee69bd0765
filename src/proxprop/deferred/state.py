"""Running averages as a dict of tensors, and back: what a checkpoint holds beside the model's and the optimizer's."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from proxprop.deferred.accumulator import System
from proxprop.deferred.joint import Term
from proxprop.deferred.running import Averages, Cluster


def state_dict(averages: Averages, clusters: Sequence[Cluster]) -> dict[str, Tensor]:
    """S̄ and N̄ of every system, and every cluster's number of steps and kept matrices; zeros before the first step.

    Keys are the layers' names followed by `S`, `samples`, `steps` and `kept`. The tensors are the ones in use.
    """
    return dict(_entries(averages, clusters))


def _entries(averages: Averages, clusters: Sequence[Cluster]) -> Iterator[tuple[str, Tensor]]:
    for cluster in clusters:
        _prepare(averages, cluster, [system for system in cluster.systems if system.usual])
        yield f"{cluster.name}.steps", torch.tensor(cluster.steps)
        for system in cluster.systems:
            if system in averages.averages:
                yield f"{system.name}.S", averages.averages[system].S
                yield f"{system.name}.samples", averages.averages[system].samples
        for equation, operator in cluster.operators:
            yield f"{equation.name}.kept", operator.kept


def _prepare(averages: Averages, cluster: Cluster, systems: Sequence[System]) -> None:
    """Make room for what was not taken in yet."""
    for system in systems:
        if system not in averages.averages and system.trained:
            averages.average(Term(system, *system.split(system.current)))
    if not cluster.operators:
        cluster.keep(averages.empty_operators(cluster))


def load_state_dict(averages: Averages, clusters: Sequence[Cluster], state: Mapping[str, Tensor]) -> None:
    """Take over what `state_dict` made; tensors are copied.

    Raises:
        ValueError: an entry is missing, not expected, or of another shape.
    """
    expected = set[str]()
    for cluster in clusters:
        _prepare(averages, cluster, [s for s in cluster.systems if f"{s.name}.S" in state])
        cluster.keep(averages.empty_operators(cluster))
    for name, tensor in _entries(averages, clusters):
        expected.add(name)
        if name not in state:
            raise ValueError(f"the state has no {name!r}, which this model needs")
        if state[name].shape != tensor.shape:
            found, wanted = list(state[name].shape), list(tensor.shape)
            raise ValueError(f"{name!r} should have shape {wanted} but has {found}")
        tensor.copy_(state[name])
    for cluster in clusters:
        cluster.reach(int(state[f"{cluster.name}.steps"]))
    if unknown := sorted(set(state) - expected):
        raise ValueError(f"the state has {unknown[0]!r}, which this model has no use for")
