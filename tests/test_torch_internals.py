"""The private names of torch that the package uses are there, and are used in one module alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn import functional

PACKAGE = Path(__file__).parents[1] / "src" / "proxprop"
LEAF = torch.ones(2, requires_grad=True)

OWNERS = {
    torch: ["_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_foreach_sub"],
    torch._C: [
        "_construct_storage_from_data_pointer",
        "_current_graph_task_id",
        "_len_torch_dispatch_stack",
        "_will_engine_execute_node",
    ],
    torch._C._autograd: ["_top_saved_tensors_default_hooks"],
    torch._C._functorch: [
        "is_batchedtensor",
        "is_gradtrackingtensor",
        "is_legacy_batchedtensor",
        "peek_interpreter_stack",
    ],
    torch.autograd.Variable: ["_execution_engine"],
    torch.utils._pytree: ["TreeSpec", "tree_flatten", "tree_unflatten"],
    forward_ad: ["_current_level"],
    functional: ["_mha_shape_check"],
    nn.Conv2d: ["_conv_forward"],
    nn.ConvTranspose2d: ["_output_padding"],
    FSDPModule: ["_get_fsdp_state"],
    FSDPState: ["_fsdp_param_group"],
    torch.distributed.ProcessGroup: ["_device_types", "_get_backend"],
    nn.parallel.DistributedDataParallel: ["_get_active_ddp_module"],
    nn.Linear(1, 1): ["_backward_hooks", "_buffers", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters"],
    LEAF: ["_backward_hooks", "_base", "_nnz", "_post_accumulate_grad_hooks", "_version"],
    LEAF.view(2).grad_fn: ["_sequence_nr", "_set_sequence_nr"],
}  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: getattr(owner, "__name__", type(owner).__name__))
def test_torch_has_what_the_package_uses(owner: object) -> None:
    missing = [name for name in OWNERS[owner] if not hasattr(owner, name)]
    assert not missing, (
        f"torch {torch.__version__} has no {', '.join(missing)}: see proxprop/torch_internals.py"
    )


def test_fully_sharded_modules_are_still_known_by_that_name() -> None:
    from torch.distributed import _composable_state

    assert hasattr(_composable_state, "_module_state_mapping")


# What torch.nn.Module keeps for its subclasses may be used by ours.
PRIVATE = re.compile(
    r"torch(\.\w+)*\._|torch\.[\w.]* import _|"
    r"\b(" + "|".join(n for names in OWNERS.values() for n in names if n[0] == "_" and n not in ("_buffers", "_modules", "_parameters")) + r")\b"
)  # fmt: skip


def test_one_module_uses_them() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "lab"]
    users = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in files
        if path.name != "torch_internals.py"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line)
    }
    assert not users


def test_an_import_leaves_the_compiler_and_the_shards_alone() -> None:
    """They take seconds; torch itself is imported first, with whatever it brings."""
    script = """
import sys, torch
before = set(sys.modules)
import proxprop
heavy = "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy", "triton", "numpy"
print(*(name for name in heavy if name in sys.modules and name not in before))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
