"""Any module whose output is one tensor, linear in its parameters: solved matrix-free through autograd."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxprop.nn.layer import ProximalLayer, parameter_views
from proxprop.transfer import AutogradTransfer, check_linear, generic_call
from proxprop.transfer.autograd import copied


class AnyLinearInParameters(ProximalLayer):
    """Mixed into any class whose output is one tensor, linear in its parameters; solved matrix-free.

    Linearity is checked on the first training call.
    """

    spaces = AutogradTransfer.spaces

    @classmethod
    def derived(cls, plain: type[nn.Module]) -> type[ProximalLayer]:
        """The class that stands for `plain`, whose forward torch.compile does not trace.

        This is not a decorator because `torch.compiler.disable` imports the compiler, which takes seconds.
        """
        found = super().derived(plain)
        if "forward" not in vars(found):
            found.forward = torch.compiler.disable(AnyLinearInParameters.forward)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The plain class's own forward; under torch.compile it runs uncompiled."""
        if not self._solves():
            return cast(Tensor, super().forward(*args, **kwargs))
        plain = _plain_copy(self)
        parameters = parameter_views(*self.parameters())
        constants = {name: parameter.detach() for name, parameter in self.named_parameters()}
        output = cast(Tensor, torch.func.functional_call(plain, constants, args, kwargs))
        self._check_once(plain, output, args, kwargs)
        output = _own_memory(output, [*constants.values(), *args, *kwargs.values()])
        for own, changed in zip(self.buffers(), plain.buffers(), strict=True):
            own.copy_(changed)
        call, tensors = generic_call(plain, args, kwargs)
        return self._attach(output, call, tensors, parameters)

    def _check_once(self, plain: nn.Module, output: Any, args: Any, kwargs: Any) -> None:
        """Check linearity on the first call whose output is finite and not empty."""
        if vars(self).get("_checked"):
            return
        telling = not isinstance(output, Tensor) or _tells(output)
        if telling:
            check_linear(plain, *args, **kwargs)
            self._checked = True


def _plain_copy(layer: "AnyLinearInParameters") -> nn.Module:
    """A copy of the layer as its plain class, with plain layers inside it: a proximal one's gradient is a direction."""
    copy = copied(layer)
    for inner in copy.modules():
        if isinstance(inner, ProximalLayer):
            inner._abandon()
    return copy


def _tells(output: Tensor) -> bool:
    """Whether an output can show that a map is not linear; a complex one is refused for what it is."""
    if output.is_meta or output.is_complex() or output.numel() == 0:
        return False
    return bool(output.isfinite().all())


def _own_memory(output: Tensor, others: Sequence[Any]) -> Tensor:
    """The output, copied if it is a view of a parameter or an argument, which an in-place activation would change."""
    taken = {t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor)}
    return output.clone() if output.untyped_storage().data_ptr() in taken else output
