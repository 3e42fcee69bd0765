"""Any module that is linear in its parameters, through its own forward and autograd's backward."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from proxprop.solvers import MATRIX_FREE, Sizes
from proxprop.torch_internals import TreeSpec, clear_hooks, tree_flatten, tree_unflatten
from proxprop.transfer.transfer import LayerCall, Parameters, Shapes, Transfer


class AutogradTransfer(Transfer):
    """`φ` is the module's forward, `φ*` its parameters' gradient: all that matrix-free solvers ask for.

    Nothing is known of how parameters belong to outputs, so the system has one column: all trained parameters
    stacked. Conjugate gradients then take one step length for the whole module.

    Args:
        module: a plain module (its forward is its own, without hooks), whose buffers may be changed.
        arguments: what it was called with, in the precision to solve in.
        keywords: likewise.
        shapes: shape of every parameter by name, None for one that is not trained.
        dtype: the precision to solve in.
    """

    spaces = (MATRIX_FREE,)

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        shapes: Mapping[str, torch.Size | None],
        dtype: torch.dtype,
    ) -> None:
        self.module, self.arguments, self.keywords = module, arguments, dict(keywords)
        for part in module.modules():
            clear_hooks(part)
            floating = {
                name: b for name, b in part._buffers.items() if b is not None and b.is_floating_point()
            }
            part._buffers.update({name: buffer.to(dtype) for name, buffer in floating.items()})
        zeros = {name: torch.zeros_like(p, dtype=dtype) for name, p in module.named_parameters()}
        self.frozen = {name: zero for name, zero in zeros.items() if shapes[name] is None}
        self.shapes = dict(shapes)
        with torch.enable_grad():
            # One graph serves every φ*: the map is linear, so it may be linearised at zero.
            trained = [zeros[name].requires_grad_() for name, shape in shapes.items() if shape is not None]
            self.image = self.output(self._with_gaps(trained))
        self.trained = trained
        self.sizes = Sizes(1, self.image.numel(), sum(leaf.numel() for leaf in trained), 1)

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

    It has no hooks of its own; those of modules inside it stay. Replacing parameters in the copy never shows in
    the module, so threads do not meet.
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    copy = deepcopy(module, shared)
    clear_hooks(copy)
    return copy


TENSOR = object()
"""Stands in a call's arguments where one of its saved tensors goes."""


@dataclass(frozen=True, eq=False)
class AutogradCall(LayerCall):
    """A call of any module that is linear in its parameters.

    Attributes:
        module: the plain copy of the module that was called.
        leaves: its arguments, flattened, with `TENSOR` for each tensor.
        structure: how they were nested.
    """

    module: nn.Module
    leaves: Sequence[Any]
    structure: TreeSpec

    @classmethod
    def of(
        cls, module: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple["AutogradCall", list[Tensor]]:
        """The call of a plain module with these arguments, and the tensors among them."""
        leaves, structure = tree_flatten((tuple(arguments), dict(keywords)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(module, [TENSOR if isinstance(x, Tensor) else x for x in leaves], structure), tensors

    def transfer(self, inputs: Sequence[Tensor], like: Tensor, shapes: Shapes) -> AutogradTransfer:
        """The transfer of this call."""
        following = iter(inputs)
        filled = [next(following) if leaf is TENSOR else leaf for leaf in self.leaves]
        arguments, keywords = tree_unflatten(filled, self.structure)
        named = dict(zip((name for name, _ in self.module.named_parameters()), shapes, strict=True))
        return AutogradTransfer(copied(self.module), arguments, keywords, named, like.dtype)


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
    """Equal but for rounding, measured against the whole array; autocast rounds more than the array may show."""
    difference, size = (left - right).abs().max(), torch.maximum(left.abs().max(), right.abs().max())
    device, dtypes = left.device.type, [left.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    return bool(difference <= max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * size)


def cuda_devices(module: nn.Module) -> list[torch.device]:
    """The GPUs whose random state a call of the module may move."""
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
