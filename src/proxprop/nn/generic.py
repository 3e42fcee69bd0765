"""Any module whose output is one tensor, linear in its parameters: solved matrix-free through autograd."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from proxprop.backward import Shapes
from proxprop.nn.layer import MixedLayer, handles
from proxprop.transfer import AutogradTransfer, check_linear
from proxprop.transfer.autograd import twin

TENSOR = object()
"""Stands in a call's arguments where one of its saved tensors goes."""


class AnyLinearInParameters(MixedLayer):
    """Mixed into any class whose output is one tensor, linear in its parameters; solved matrix-free.

    Linearity is checked on the first training call.
    """

    spaces = AutogradTransfer.spaces

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The plain class's own forward; under torch.compile it runs uncompiled."""
        if not self._trains():
            return cast(Tensor, super().forward(*args, **kwargs))
        plain = twin(self, self.plain)
        parameters = handles(*self.parameters())
        constants = {name: parameter.detach() for name, parameter in self.named_parameters()}
        output = cast(Tensor, torch.func.functional_call(plain, constants, args, kwargs))
        self._check_once(output, args, kwargs)
        for module, copied in zip(self.modules(), plain.modules(), strict=True):
            module._buffers.update(copied._buffers)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        build = functools.partial(
            self._transfer, [TENSOR if isinstance(x, Tensor) else x for x in leaves], structure
        )
        return self._attach(output, build, tensors, parameters)

    def _check_once(self, output: Any, args: Any, kwargs: Any) -> None:
        """Check linearity on the first call that can tell: not an empty one, nor one with infinities or NaN."""
        if vars(self).get("_checked"):
            return
        telling = not isinstance(output, Tensor) or (output.numel() and bool(output.isfinite().all()))
        if telling:
            check_linear(twin(self, self.plain), *args, **kwargs)
            self._checked = True

    def _transfer(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        inputs: Sequence[Tensor],
        like: Tensor,
        shapes: Shapes,
    ) -> AutogradTransfer:
        """The transfer of one call; `leaves` are its arguments, with `TENSOR` for each of `inputs`."""
        following = iter(inputs)
        filled = [next(following) if leaf is TENSOR else leaf for leaf in leaves]
        arguments, keywords = pytree.tree_unflatten(filled, structure)
        named = dict(zip((name for name, _ in self.named_parameters()), shapes, strict=True))
        return AutogradTransfer(twin(self, self.plain), arguments, keywords, named, like.dtype)
