"""FSDP2: the same directions as one process, each layer solved by its owner; tensor parallel is refused."""

import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from networks import NETWORKS
from parity import assert_parity, mean_square, one_process, share, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import proxprop
from proxprop.deferred import preconditioner


def mesh(hybrid: bool = False) -> DeviceMesh:
    """All ranks in a row, or two rows of them that hold the same shards."""
    ranks = dist.get_world_size()
    if hybrid:
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def cut(network: str, hybrid: bool = False, **options: object) -> nn.Module:
    """Every layer a unit of its own, then the rest."""
    model = NETWORKS[network].model()
    options["mesh"] = mesh(hybrid)
    for module in model.children():
        if next(module.parameters(), None) is not None:
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def sharded(network: str, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = cut(network, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model)
    return model, optimizer


def one_step(network: str, **options: object) -> None:
    model, optimizer = sharded(network, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        mean_square(model(share(whole(network)))).backward()
    optimizer.step()
    assert_parity(model, one_process(network))


def offloaded(network: str) -> None:
    one_step(network, offload_policy=CPUOffloadPolicy(pin_memory=False))


def cut_by_features() -> None:
    """A weight that the user has sharded along its inputs is gathered, solved and cut again."""
    one_step("even", shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))


def accumulated() -> None:
    """Gradients are reduced in the last of three micro-batches."""
    model, optimizer = sharded("gradient")
    mine = share(whole("gradient"))
    parts = mine.split([1, 2, len(mine) - 3])
    for index, part in enumerate(parts):
        model.set_requires_gradient_sync(index == len(parts) - 1)
        (len(part) / len(mine) * mean_square(model(part))).backward()
    optimizer.step()
    assert_parity(model, one_process("gradient"))


def mixed_precision() -> None:
    """Products in bfloat16, sums and the solve in float32: as near as bfloat16 is to the float64 direction."""
    model = NETWORKS["exact"].model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    proxprop.attach(optimizer, model)
    mean_square(model(share(whole("exact")).float())).backward()
    optimizer.step()
    expected = one_process("exact")
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.full_tensor() - expected[name]).norm() / expected[name].norm()
        assert error < 0.03, f"{name}: {error:.1e}"


def each_layer_by_its_owner() -> None:
    """Every layer is solved once over all ranks, with all of its outputs."""
    model, optimizer = sharded("exact")
    mean_square(model(share(whole("exact")))).backward()
    solved: list[int] = []
    original = preconditioner.Solve.apply

    def recorded(self: preconditioner.Solve, B: Tensor) -> object:
        solved.append(B.shape[-1])
        return original(self, B)

    with mock.patch.object(preconditioner.Solve, "apply", recorded):
        optimizer.step()
    everyones: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, solved)
    assert sorted(outputs for own in everyones for outputs in own) == [5, 7], everyones


def sent_while_backward_runs() -> None:
    """S of the later layer is on its way before backward has reached the first, and memory of what has left is free."""
    model = cut("exact")
    attached = proxprop.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
    attached.clusters[0].group.limit = 1
    seen, traffic = [], attached.reduction.ranks.traffic
    model[1].register_full_backward_hook(lambda *_: seen.append(traffic.calls["S"]))
    mean_square(model(share(whole("exact")))).backward()
    assert seen == [1], seen
    assert traffic.calls["S"] == 2
    for _, bucket in attached.reduction._round.sent:
        bucket.wait()
        assert bucket.flat.is_meta != bucket.mine


def two_steps_with_adam() -> None:
    """Parameters after two steps are those of one process."""
    model = cut("exact")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    proxprop.attach(optimizer, model)
    alone = NETWORKS["exact"].model()
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(model(share(whole("exact")))).backward()
        optimizer.step()
        reference.zero_grad()
        mean_square(alone(whole("exact"))).backward()
        reference.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(found.full_tensor(), expected, rtol=1e-9, atol=1e-12)


def two_optimizers() -> None:
    """Without a module around all others, the second step does not solve again what the first has solved."""
    model = NETWORKS["exact"].model()
    for module in (model[0], model[2], model[4]):
        fully_shard(module, mesh=mesh())
    weight, *others = model.parameters()
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD(others, lr=0.1)]
    proxprop.attach(optimizers, model)
    mean_square(model(share(whole("exact")))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_parity(model, one_process("exact"))


def warned_once_in_immediate_mode() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = NETWORKS["exact"].model()
            fully_shard(model, mesh=mesh())
            mean_square(model(share(whole("exact")))).backward()
    told = [str(w.message) for w in caught if "proxprop.attach" in str(w.message)]
    assert len(told) == 1, told


def tensor_parallel_is_refused(style: str) -> None:
    """In immediate mode a layer whose weight is spread during its forward is named, with what to do."""
    model = NETWORKS["even"].model()
    plans = {"colwise": {"0": ColwiseParallel()}, "rowwise": {"2": RowwiseParallel()}}
    rows = {"colwise": "0", "rowwise": "2"}
    parallelize_module(model, mesh(), plans[style])
    with pytest.raises(TypeError, match=rf"^{rows[style]}: weight is .*tensor parallel.*proxprop.attach"):
        model(whole("even"))


def older_fsdp_is_refused() -> None:
    model = FullyShardedDataParallel(
        NETWORKS["exact"].model(), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel cuts .*fully_shard"):
        proxprop.attach(optimizer, model)


def bounded_steps_are_refused() -> None:
    _, optimizer = sharded("exact")
    with pytest.raises(ValueError, match=r"cut over ranks .*FSDP2.*whole parameters"):
        proxprop.bound(optimizer)


CASES: dict[str, Callable[[], None]] = {
    **{f"fsdp-{name}": partial(one_step, name) for name in NETWORKS},
    **{f"fsdp-offload-{name}": partial(offloaded, name) for name in ("exact", "convnet")},
    "fsdp-features": cut_by_features,
    "fsdp-accumulate": accumulated,
    "fsdp-bf16": mixed_precision,
    "fsdp-owners": each_layer_by_its_owner,
    "fsdp-overlap": sent_while_backward_runs,
    "fsdp-two-steps": two_steps_with_adam,
    "fsdp-two-optimizers": two_optimizers,
    "fsdp-immediate-warns": warned_once_in_immediate_mode,
    "fsdp-hybrid": partial(one_step, "convnet", hybrid=True),
    "fsdp-hybrid-cg": partial(one_step, "cg", hybrid=True),
    "fsdp-bounded-refused": bounded_steps_are_refused,
    "fsdp1-refused": older_fsdp_is_refused,
    "tensor-parallel-colwise": partial(tensor_parallel_is_refused, "colwise"),
    "tensor-parallel-rowwise": partial(tensor_parallel_is_refused, "rowwise"),
}
