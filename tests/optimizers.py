"""Every optimizer of torch that takes dense gradients, and a model that all of them train."""

import inspect

import torch
from torch import nn

import proxprop

EXCLUDED = {torch.optim.SparseAdam: "takes sparse gradients only, and directions are dense"}


OPTIMIZERS = sorted(
    (
        optimizer
        for _, optimizer in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(optimizer, torch.optim.Optimizer)
        and optimizer is not torch.optim.Optimizer
        and optimizer not in EXCLUDED
    ),
    key=lambda optimizer: optimizer.__name__,
)


def matrices(solver) -> nn.Sequential:
    """A model of 2-D parameters only: what Muon takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    return proxprop.convert(model, solver)
