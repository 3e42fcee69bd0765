"""ProxProp on several processes with DistributedDataParallel; two lines differ from plain training.

    torchrun --standalone --nproc-per-node=2 examples/ddp.py

On GPUs: backend "nccl", and model and data on `torch.device("cuda", local_rank)`; nothing else changes.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import proxprop


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    proxprop.convert(model, proxprop.Exact(), tau_theta=0.5, scaling="gradient")  # the first line
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    proxprop.attach(optimizer, ddp)  # the second line

    x, y = data(1024)
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # every rank has rows of its own
    for step in range(41):
        before = copy.deepcopy(model.state_dict())
        loss = nn.functional.cross_entropy(ddp(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_().div_(dist.get_world_size()))
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:2}: loss {loss:.4f}")
    if dist.get_rank() == 0:
        print(f"relative distance from one process with the whole batch: {distance(model, before, x, y):.0e}")
    dist.destroy_process_group()


def data(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs of very different scale, labelled by a random linear map."""
    x = torch.randn(samples, 64, dtype=torch.float32) * torch.logspace(0, -2, 64)
    return x, (x @ torch.randn(64, 10) * 3).argmax(dim=1)


def distance(model: nn.Module, before: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    """Largest relative distance of a direction from the one that this process alone would take from `before`."""
    alone = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    proxprop.convert(alone, proxprop.Exact(), tau_theta=0.5, scaling="gradient").load_state_dict(before)
    nn.functional.cross_entropy(alone(x), y).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)


if __name__ == "__main__":
    main()
