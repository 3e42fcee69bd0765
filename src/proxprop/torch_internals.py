"""Private names of torch, each in a small function that says what breaks without it.

Nothing else in the package uses one, but for what `torch.nn.Module` keeps for its subclasses: `_parameters`,
`_buffers` and `_modules`. `tests/test_torch_internals.py` names those that the installed torch does not have.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "TreeSpec",
    "tree_flatten",
    "tree_unflatten",
]  # without them calls of generic layers can't be replayed

# Autograd


def is_due(node: Any) -> bool:
    """Whether the backward pass that is running will come to a node; else S is summed where no gradient is."""
    due: bool = torch._C._will_engine_execute_node(node)
    return due


def backward_pass() -> int:
    """The number of the backward pass that is running, -1 outside; else passes of one step can't be told apart."""
    return torch._C._current_graph_task_id()


def after_backward_pass(callback: Callable[[], None]) -> None:
    """Call at the end of the backward pass that is running; else a gradient's last change is not seen."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sequence_number(node: Any) -> int:
    """A node's place in the order of backward; else early preparation does not begin with what is needed first."""
    number: int = node._sequence_nr()
    return number


def run_last(node: Any) -> None:
    """Let backward run a node when nothing else is left; else streams wait for directions too early."""
    node._set_sequence_nr(0)


def saved_tensors_are_hooked() -> bool:
    """Whether reading a saved tensor may compute, as in a checkpoint; else streams read what another computes."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def viewed(view: Tensor) -> Tensor | None:
    """The tensor that a view is of; else an optimizer that steps in backward is not recognised."""
    return view._base


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether something acts on a gradient as soon as it is there; else it would act before directions join."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_hooks(parameter: Tensor) -> bool:
    """Whether something may act on a gradient in backward; else a step in backward spoils the input's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def writes(tensor: Tensor) -> int:
    """How often a tensor was written to; else a gradient that was zeroed is not recognised."""
    return tensor._version


def stored_entries(sparse: Tensor) -> int:
    """How many entries a sparse tensor stores; else a sparse gradient that was zeroed is not recognised."""
    return sparse._nnz()


# Transforms and modes


def in_transform() -> bool:
    """Whether torch.func or forward mode differentiates a call; else it silently gets a direction as a derivative."""
    forward_mode: bool = forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_batched_or_differentiated(tensor: Tensor) -> bool:
    """Whether torch.func wraps a tensor; else products write to memory that it does not follow."""
    functorch = torch._C._functorch
    kinds = functorch.is_batchedtensor, functorch.is_legacy_batchedtensor, functorch.is_gradtrackingtensor
    return any(kind(tensor) for kind in kinds)


def dispatch_modes() -> int:
    """How many modes see each operation; else a counter of FLOPs does not see what Triton kernels do."""
    return torch._C._len_torch_dispatch_stack()


# Layers


def clear_hooks(module: nn.Module) -> None:
    """Take a module's own hooks off; else a copy that solves for a generic layer runs the user's hooks again."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        hooks.clear()


def convolve(conv: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution's forward with other parameters; else padding modes would be written down twice."""
    output: Tensor = conv._conv_forward(input, weight, bias)
    return output


def output_padding(conv: nn.ConvTranspose2d, input: Tensor, size: list[int] | None) -> list[int]:
    """The padding that gives a transposed convolution's output the size that was asked for; else it is refused."""
    stride, padding, taps, dilation = map(list, (conv.stride, conv.padding, conv.kernel_size, conv.dilation))
    return conv._output_padding(input, size, stride, padding, taps, len(taps), dilation)  # type: ignore[arg-type]


def is_batched_attention(inputs: Sequence[Tensor], masks: Sequence[Tensor | None], heads: int) -> bool:
    """Whether query, key and value are batched; else attention's errors about shapes are not torch's."""
    batched: bool = functional._mha_shape_check(*inputs, *masks, heads)  # type: ignore[attr-defined]
    return batched


# Many tensors at once; without these running averages take a call a layer


Tensors = list[Tensor] | tuple[Tensor, ...]


def norms(tensors: Tensors, order: float) -> Tensors:
    """The norm of each tensor."""
    return torch._foreach_norm(tensors, order)


def multiply_all(tensors: Tensors, factors: Tensors) -> None:
    """Multiply each tensor by its factor, in place."""
    torch._foreach_mul_(tensors, factors)


def add_all(tensors: Tensors, others: Tensors) -> None:
    """Add to each tensor another, in place."""
    torch._foreach_add_(tensors, others)


def copy_all(tensors: Tensors, others: Tensors) -> None:
    """Copy another into each tensor."""
    torch._foreach_copy_(tensors, others)


# Memory


def without_owning(tensor: Tensor) -> Tensor:
    """The same memory, which may be freed all the same; else captured solves can't share theirs."""
    memory = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


# Many ranks


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward is running; else its layers are not warned of in immediate mode."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()


def sharded_modules() -> list[nn.Module]:
    """Modules given to `fully_shard`; else their layers are not warned of in immediate mode."""
    states = sys.modules.get("torch.distributed._composable_state")
    return list(states._module_state_mapping) if states is not None else []


def timeout(group: Any) -> timedelta | None:
    """The timeout that a process group was made with; else another one falls back to torch's default."""
    options = group._get_backend(group._device_types[0]).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def local_rows(parameter: Any) -> slice:
    """The rows of a sharded parameter that this rank holds; else tables under FSDP2 can't be rescaled."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return slice(offset[0], offset[0] + shape[0])
