"""ProxProp on several processes with FSDP2 (`fully_shard`); two lines differ from plain training.

    torchrun --standalone --nproc-per-node=2 examples/fsdp.py

Each rank keeps a share of every weight's rows and solves for those rows alone. On GPUs take the backend "nccl", a
mesh of type "cuda", and put the data on the rank's device; nothing else changes.
"""

import torch
import torch.distributed as dist
from ddp import data, directions, network
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import proxprop


def main() -> None:
    """Start, train, stop."""
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


def train() -> None:
    """Train on this rank's samples, and compare the first direction with that of one process."""
    model = network()
    proxprop.convert(model, proxprop.Exact(), tau_theta=10.0, scaling="gradient")  # the first line
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attached = proxprop.attach(optimizer, model)  # the second line

    x, y = data()
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # every rank has samples of its own
    for step in range(61):
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            difference = distance(model, x, y)
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:2}: loss {loss / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        print(f"rank 0 holds {len(first.to_local())} of {len(first)} rows of the first weight")
        print(f"direction, relative distance from one process with all samples: {difference:.0e}")
        print(f"sent for S: {attached.bytes_sent / (step + 1) / 1e6:.2f} MB a step")


def distance(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Largest relative distance of a direction from the one that one process with all samples takes at first."""
    alone = proxprop.convert(network(), proxprop.Exact(), tau_theta=10.0, scaling="gradient")
    nn.functional.cross_entropy(alone(x), y).backward()
    gathered = [part.full_tensor() for part in directions(model) if isinstance(part, DTensor)]
    pairs = zip(gathered, directions(alone), strict=True)
    return max(float((found - expected).norm() / expected.norm()) for found, expected in pairs)


if __name__ == "__main__":
    main()
