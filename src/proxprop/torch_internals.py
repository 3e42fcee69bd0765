"""Private names of torch, each in a small function that says what breaks without it.

No other module uses private names of torch, except `_parameters`, `_buffers` and `_modules`, which `torch.nn.Module`
keeps for its subclasses. `tests/test_torch_internals.py` lists the names that the installed torch lacks.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
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


# Deferred mode asks these for every layer and gradient, so they are torch's own, without a function around them.

is_due: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward pass will reach a node. Without it, S is summed where no gradient is asked for."""

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward pass, or -1. Without it, the passes of one step look alike."""

after_backward_pass: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls back at the end of the running backward pass. Without it, a gradient's last change is missed."""

writes: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to. Without it, a zeroed gradient is not recognised."""


def apply_untransformed(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function outside of torch.func's transforms. Without it, half of a call is a search for them."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def sequence_number(node: Any) -> int:
    """A node's place in the order of backward. Without it, early preparation may begin with the wrong layer."""
    number: int = node._sequence_nr()
    return number


def run_last(node: Any) -> None:
    """Let backward run a node when nothing else is left. Without it, streams wait for directions too early."""
    node._set_sequence_nr(0)


def saved_tensors_are_hooked() -> bool:
    """Whether reading a saved tensor may compute, as in a checkpoint. Without it, streams read unfinished tensors."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def viewed(view: Tensor) -> Tensor | None:
    """The base of a view. Without it, an optimizer that steps in backward is not recognised."""
    return view._base


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether a hook acts on a finished gradient. Without it, the hook acts before directions join."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook may act on a gradient in backward. Without it, a step there spoils the input's gradient."""
    return bool(parameter._backward_hooks) or steps_in_backward(parameter)


def stored_entries(sparse: Tensor) -> int:
    """How many entries a sparse tensor stores. Without it, a zeroed sparse gradient is not recognised."""
    return sparse._nnz()


def entries(tensor: Tensor) -> Tensor:
    """The stored numbers of a tensor, sparse or dense. Without it, a sparse gradient can't be compared with zero."""
    return tensor._values() if tensor.is_sparse else tensor


# Transforms and modes


def in_transform() -> bool:
    """Whether torch.func or forward mode differentiates a call. Without it, a direction passes for a derivative."""
    forward_mode: bool = forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def is_batched_or_differentiated(tensor: Tensor) -> bool:
    """Whether torch.func wraps a tensor. Without it, products write to memory that torch.func does not track."""
    functorch = torch._C._functorch
    batched: bool = functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    return batched or functorch.is_gradtrackingtensor(tensor)


def dispatch_modes() -> int:
    """How many dispatch modes see each operation. Without it, a counter of FLOPs misses the Triton kernels."""
    return torch._C._len_torch_dispatch_stack()


# Layers


def clear_hooks(module: nn.Module) -> None:
    """Remove a module's own hooks. Without it, the copy that solves for a generic layer repeats the user's hooks."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
        hooks.clear()


def convolve(conv: nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution's forward with other parameters. Without it, padding modes need code of their own."""
    output: Tensor = conv._conv_forward(input, weight, bias)
    return output


def output_padding(conv: nn.ConvTranspose2d, input: Tensor, size: list[int] | None) -> list[int]:
    """The padding that gives a transposed convolution's output this size. Without it, the size is refused."""
    stride, padding, taps, dilation = map(list, (conv.stride, conv.padding, conv.kernel_size, conv.dilation))
    return conv._output_padding(input, size, stride, padding, taps, len(taps), dilation)  # type: ignore[arg-type]


def is_batched_attention(inputs: Sequence[Tensor], masks: Sequence[Tensor | None], heads: int) -> bool:
    """Whether query, key and value are batched. Without it, attention's errors about shapes differ from torch's."""
    batched: bool = functional._mha_shape_check(*inputs, *masks, heads)  # type: ignore[attr-defined]
    return batched


# Many tensors at once: without these, running averages and bounded steps take one call for each layer

norms, differences = torch._foreach_norm, torch._foreach_sub
add_all, multiply_all, copy_all = torch._foreach_add_, torch._foreach_mul_, torch._foreach_copy_


# Memory


def without_owning(tensor: Tensor) -> Tensor:
    """A tensor on the same memory, which may be freed meanwhile. Without it, captured solves can't share memory."""
    memory = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


# Many ranks


active_ddp: Callable[[], Any] = nn.parallel.DistributedDataParallel._get_active_ddp_module
"""The DistributedDataParallel whose forward is running. Without it, immediate mode does not warn of it."""


def sharded_modules() -> list[nn.Module]:
    """Modules given to `fully_shard`. Without it, immediate mode does not warn of them."""
    states = sys.modules.get("torch.distributed._composable_state")
    return list(states._module_state_mapping) if states is not None else []


def timeout(group: Any) -> timedelta | None:
    """The timeout of a process group. Without it, groups made after it fall back to torch's default."""
    options = group._get_backend(group._device_types[0]).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. Without it, rounds of sums wait for a hook that is compiled away."""
    return module._compiled_call_impl is not None


def averages_gradients(around: Any) -> bool:
    """Whether DDP or FSDP2 averages in the next backward pass. Without it, S is sent under `no_sync` as well."""
    if not hasattr(around, "_get_fsdp_state"):
        synchronised: bool = around.require_backward_grad_sync
        return synchronised
    states = (module._get_fsdp_state() for module in around.modules() if hasattr(module, "_get_fsdp_state"))
    groups = (state._fsdp_param_group for state in states)
    return all(group.reduce_grads for group in groups if group is not None)
