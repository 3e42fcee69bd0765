"""A weight that a hook computes before each call is no parameter: such a layer stays explicit and says why."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import proxprop
from cases import randn

HOOKED = pytest.mark.compatibility(
    "Pruning, and weight and spectral norm by hooks (`torch.nn.utils`)",
    section="Layers",
    status="explicit",
    note="a hook computes the weight, and the output is not linear in what is trained",
)


def weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own: deprecated, and in many models
        return torch.nn.utils.weight_norm(layer)


@HOOKED
@pytest.mark.parametrize(
    "hook",
    [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), weight_norm, torch.nn.utils.spectral_norm],
    ids=["prune", "weight_norm", "spectral_norm"],
)
def test_a_hooked_weight_stays_explicit(hook: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(hook(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model = copy_of(plain)
    proxprop.convert(model)
    first, second, _ = proxprop.summary(model, randn(6, 4, seed=1)).rows
    assert first.status == "explicit"
    assert "hook" in first.reason
    assert second.status == "converted"
    for each in (plain, model):
        torch.manual_seed(1)
        each(randn(6, 4, seed=1)).square().sum().backward()
    for (name, found), expected in zip(model[0].named_parameters(), plain[0].parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad), name


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; torch refuses to copy the computed weight, which the next call makes anew."""
    for module in model.modules():
        if isinstance(vars(module).get("weight"), torch.Tensor):
            module.weight = module.weight.detach()
    return copy.deepcopy(model)


@HOOKED
@pytest.mark.parametrize(
    "hook",
    [
        lambda layer: prune.l1_unstructured(layer, "in_proj_bias", 0.5),
        lambda layer: prune.l1_unstructured(layer.out_proj, "weight", 0.5),
        lambda layer: torch.nn.utils.parametrizations.weight_norm(layer.out_proj),
    ],
    ids=["bias", "inner weight", "inner parametrization"],
)
def test_a_bias_and_inner_modules_count_too(hook: Callable[[nn.Module], nn.Module]) -> None:
    """A direction that goes through a mask or a norm is none of what is trained."""
    layer = nn.MultiheadAttention(4, 2)
    hook(layer)
    with pytest.raises(ValueError, match=r"computes? its weight or bias|computed by a parametrization"):
        proxprop.convert(layer, include_last=True)
    late = proxprop.convert(nn.MultiheadAttention(4, 2), include_last=True)
    hook(late)
    with pytest.raises(RuntimeError, match="its weight or bias is computed by a hook or a parametrization"):
        late(*[torch.ones(2, 4)] * 3)
