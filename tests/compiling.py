"""What the tests of compiled models share: a model of the table, its directions, and torch's own warnings."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import proxprop
from models import ModelCase
from proxprop.solvers import Solver
from training import grads

# torch's own: dynamo makes an instance of every autograd.Function and reads the .grad of what a compiled part of a model
# is called with; inductor calls what torch has deprecated.
quiet_compiler = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning"),
]


def converted(case: ModelCase, solver: Solver, **form) -> nn.Module:
    """A model of the table, `form` as for `Module.to`."""
    return proxprop.convert(case.model(), solver, tau_theta=0.5, module_types=case.module_types).to(**form)


def in_one_graph(case: ModelCase, model: nn.Module) -> bool:
    """Whether torch can compile a model whole: not recurrent ones, nor modules that are solved through autograd."""
    return case.module_types is None and not any(isinstance(m, nn.RNNBase) for m in model.modules())


def directions(
    case: ModelCase, model: nn.Module, call: Callable, batch: int, autocast: bool = False
) -> dict[str, Tensor]:
    """What a backward pass leaves in `.grad`, for so many samples; `call` runs the model."""
    like = next(model.parameters())
    data = {
        name: value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
        for name, value in case.data(batch).items()
    }
    model.zero_grad()
    with torch.autocast(like.device.type, torch.bfloat16, enabled=autocast):
        loss = case.loss(call, data)
    loss.backward()
    return grads(model)
