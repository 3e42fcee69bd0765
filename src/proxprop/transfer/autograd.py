"""Any module that is linear in its parameters, through its own forward and autograd's backward."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from proxprop.solvers import MATRIX_FREE, Sizes
from proxprop.torch_internals import TreeSpec, clear_hooks, tree_flatten, tree_unflatten
from proxprop.transfer.call import LayerCall
from proxprop.transfer.transfer import Parameters, Shapes, Transfer


class AutogradTransfer(Transfer):
    """`φ` is the module's forward and `φ*` its parameters' gradient, which is all that matrix-free solvers need.

    It is not known which parameters belong to which outputs, so the system has one column: all trained parameters
    stacked. Conjugate gradients then take one step length for the whole module.

    Args:
        inputs: the tensors among the module's arguments, in the precision to solve in.
        like: a tensor of that precision.
        shapes: the parameters' shapes.
        module: a plain module (its forward is its own, without hooks).
        leaves: its arguments, flattened, with `TENSOR` for each tensor.
        structure: how they were nested.
    """

    spaces = (MATRIX_FREE,)

    def __init__(
        self,
        inputs: Sequence[Tensor],
        like: Tensor,
        shapes: Shapes,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
    ) -> None:
        following = iter(inputs)
        filled = [next(following) if leaf is TENSOR else leaf for leaf in leaves]
        self.arguments, self.keywords = tree_unflatten(filled, structure)
        self.module = _in_precision(copied(module), like.dtype)
        zeros = {name: torch.zeros_like(p, dtype=like.dtype) for name, p in module.named_parameters()}
        self.shapes = dict(zip(zeros, shapes, strict=True))
        self.frozen = {name: zero for name, zero in zeros.items() if self.shapes[name] is None}
        with torch.enable_grad():
            # One graph serves every φ*: the map is linear, so it may be linearised at zero.
            self.trained = [zeros[name].requires_grad_() for name in zeros if name not in self.frozen]
            self.image = self.output(self._with_gaps(self.trained))
        self.sizes = Sizes(1, self.image.numel(), sum(leaf.numel() for leaf in self.trained), 1)

    def output(self, parameters: Parameters) -> Tensor:
        """The module's forward at these parameters, those not trained at zero."""
        given = {name: v for name, v in zip(self.shapes, parameters, strict=True) if v is not None}
        result = functional_call(self.module, {**self.frozen, **given}, self.arguments, self.keywords)
        assert isinstance(result, Tensor)
        return result

    def gradient(self, G: Tensor) -> Parameters:
        """Autograd's gradient of the trained parameters."""
        gradients = torch.autograd.grad(
            self.image, self.trained, G, retain_graph=True, materialize_grads=True
        )
        return self._with_gaps(gradients)

    def to_features(self, parameters: Parameters) -> Tensor:
        """All trained parameters stacked as one column."""
        return torch.cat([value.reshape(-1) for value in parameters if value is not None]).view(1, -1, 1)

    def from_features(self, V: Tensor) -> Parameters:
        """The inverse of `to_features`."""
        parts = V.view(-1).split([leaf.numel() for leaf in self.trained])
        return self._with_gaps([part.view_as(leaf) for part, leaf in zip(parts, self.trained, strict=True)])

    def _with_gaps(self, trained: Sequence[Tensor]) -> Parameters:
        """The trained parameters' tensors in the order of all parameters, None for the others."""
        following = iter(trained)
        return tuple(next(following) if shape is not None else None for shape in self.shapes.values())


def copied(module: nn.Module) -> nn.Module:
    """A copy of the module that shares its parameters but not its buffers.

    It has no hooks of its own; those of modules inside it stay. Replacing parameters in the copy does not change the
    module, so threads do not interfere.
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    copy = deepcopy(module, shared)
    clear_hooks(copy)
    return copy


def _in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module without hooks and with floating buffers of this precision, all changed in place."""
    for part in module.modules():
        clear_hooks(part)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


TENSOR = object()
"""Placeholder for a saved tensor in a call's arguments."""


def generic_call(
    module: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[LayerCall, list[Tensor]]:
    """The call of a plain module with these arguments, and the tensors among them."""
    leaves, structure = tree_flatten((tuple(arguments), dict(keywords)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return LayerCall(AutogradTransfer, (module, leaves, structure)), tensors


def check_linear(module: nn.Module, *arguments: Any, **keywords: Any) -> None:
    """Raise unless the module's output is one tensor that is linear in its parameters, for these arguments.

    Compares `φ(θ₁ + 2θ₂)` with `φ(θ₁) + 2φ(θ₂)` for two random settings of the parameters, and asks that the
    same call gives the same output twice. Neither the module nor the random state is changed.

    Raises:
        TypeError: the output is not one tensor.
        ValueError: the output is not linear in the parameters, or not a function of them.

    Example:
        >>> check_linear(nn.Linear(3, 2), torch.ones(1, 3))
        >>> check_linear(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.ones(1, 3))
        Traceback (most recent call last):
        ...
        ValueError: Sequential is not linear in its parameters: ...
    """
    name = type(module).__name__
    plain = copied(module)

    def phi(parameters: Mapping[str, Tensor]) -> Tensor:
        result = functional_call(plain, dict(parameters), arguments, keywords)
        if not isinstance(result, Tensor):
            raise TypeError(f"{name} should return one tensor but returned {type(result).__name__}")
        return result

    with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices(module)):
        first, second = _random_like(module), _random_like(module)
        combined = {key: first[key] + 2 * second[key] for key in first}
        Y_first, Y_second, Y_combined = phi(first), phi(second), phi(combined)
        if not _close(phi(first), Y_first):
            raise ValueError(
                f"{name} gives another output each time it is called (dropout? sampling?); "
                "a proximal step needs a fixed linear map of its parameters"
            )
        if not _close(Y_combined, Y_first + 2 * Y_second):
            raise ValueError(
                f"{name} is not linear in its parameters: φ(θ₁ + 2θ₂) differs from φ(θ₁) + 2φ(θ₂). "
                "Accepted are maps like W x + b; an activation, a product of parameters, or a term without "
                "parameters (a residual connection, a constant) belongs in a module of its own"
            )


def _random_like(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(value) for name, value in module.named_parameters()}


def _close(left: Tensor, right: Tensor) -> bool:
    """Equal up to rounding relative to the largest entry, also to that of autocast."""
    difference, size = (left - right).abs().max(), torch.maximum(left.abs().max(), right.abs().max())
    device, dtypes = left.device.type, [left.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return bool(difference <= max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * size)


def cuda_devices(module: nn.Module) -> list[torch.device]:
    """The GPUs whose random state a call of the module may move."""
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
