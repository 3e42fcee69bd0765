"""What all cases do: take a share of one batch, and compare with one process that has all of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from networks import NETWORKS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SAMPLES = 24
TOLERANCE = 1e-9

Loss = Callable[[Tensor], Tensor]


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def share(batch: Tensor) -> Tensor:
    """This rank's rows; every rank has as many."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def whole(network: str, samples: int = SAMPLES) -> Tensor:
    return NETWORKS[network].input(samples)


def one_process(network: str, loss: Loss = mean_square, samples: int = SAMPLES) -> dict[str, Tensor]:
    """Immediate mode on the whole batch: the method's definition."""
    model = NETWORKS[network].model()
    loss(model(whole(network, samples))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_parity(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every direction is the one-process one, whatever wrapper named it."""
    names = set()
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        names.add(name)
        assert parameter.grad is not None, name
        found = gathered(parameter.grad)
        error = float((found - expected[name]).norm() / expected[name].norm())
        assert error <= TOLERANCE, f"{name}: relative error {error:.2e}"
    assert names == set(expected)


def assert_same_on_all_ranks(tensor: Tensor) -> None:
    """Bit for bit, NaN included."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    for rank, other in enumerate(others):
        assert torch.equal(other.nan_to_num(7.0), tensor.nan_to_num(7.0)), f"rank {rank} differs"
