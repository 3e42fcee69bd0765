"""ProxProp on several processes with DistributedDataParallel; two lines differ from plain training.

    torchrun --standalone --nproc-per-node=2 examples/ddp.py

On GPUs take the backend "nccl" and put model and data on the rank's device; nothing else changes.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import proxprop


def main() -> None:
    """Start, train, stop. By then DistributedDataParallel is gone: where it outlives the group, torch can hang."""
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


def train() -> None:
    """Train on this rank's samples, and compare the first direction with that of one process."""
    model = network()
    proxprop.convert(model, proxprop.Exact(), tau_theta=10.0, scaling="gradient")  # the first line
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    attached = proxprop.attach(optimizer, ddp)  # the second line

    x, y = data()
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # every rank has samples of its own
    for step in range(61):
        loss = nn.functional.cross_entropy(ddp(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            difference = distance(model, x, y)
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:2}: loss {loss / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        print(f"direction, relative distance from one process with all samples: {difference:.0e}")
        print(f"sent for ProxProp: {attached.bytes_sent / (step + 1) / 1e6:.2f} MB a step")


def network() -> nn.Module:
    """The same initial parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def data(samples: int = 1024) -> tuple[Tensor, Tensor]:
    """Inputs of very different scale, labelled by a random network."""
    torch.manual_seed(1)
    x = torch.randn(samples, 64)
    y = (torch.randn(10, 128) @ (torch.randn(128, 64) @ x.T).relu()).argmax(dim=0)
    return x * torch.logspace(0, -1.5, 64), y


def distance(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Largest relative distance of a direction from the one that one process with all samples takes at first."""
    alone = proxprop.convert(network(), proxprop.Exact(), tau_theta=10.0, scaling="gradient")
    nn.functional.cross_entropy(alone(x), y).backward()
    pairs = zip(directions(model), directions(alone), strict=True)
    return max(float((found - expected).norm() / expected.norm()) for found, expected in pairs)


def directions(model: nn.Module) -> list[Tensor]:
    """What `.grad` holds after a solve."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


if __name__ == "__main__":
    main()
