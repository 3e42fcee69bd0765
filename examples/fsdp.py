"""ProxProp on several processes with FSDP2 (`fully_shard`), on a model of Llama's shape, with checkpoints.

    torchrun --standalone --nproc-per-node=2 examples/fsdp.py

Each rank keeps a share of every weight's rows, and the averages and inverses of the layers it owns. On GPUs take the
backend "nccl", a mesh of type "cuda", and put the data on the rank's device; nothing else changes.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import proxprop

WIDTH, HIDDEN, HEADS, WORDS, LENGTH, BLOCKS = 32, 88, 4, 32, 16, 2
STEPS, SAVED = 60, 30
RUNNING = proxprop.Running(update_every=5, invert_every=10, copies=0)  # inverses stay with their owners

Run = tuple[nn.Module, torch.optim.Optimizer, proxprop.Attached]


def main() -> None:
    """Start, train, stop."""
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


def train() -> None:
    """Train on this rank's sequences, save half-way, and compare with a run that goes on from the checkpoint."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    run = prepared()
    model, _, attached = run
    for step in range(STEPS):
        if step == SAVED:
            dcp.save(state(run), checkpoint_id=folder[0])
        loss = take_step(run, step)
        if step == 0:
            difference = distance(model)
        if dist.get_rank() == 0 and step in (0, STEPS // 2, STEPS - 1):
            print(f"step {step:2}: loss {loss:.4f}")
    held: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(held, attached.bytes_held)
    apart = distance_of_resumed(run, folder[0])
    if dist.get_rank() == 0:
        print(f"direction, relative distance from one process with all samples: {difference:.0e}")
        print(f"averages and inverses on each rank, kB: {', '.join(f'{size / 1e3:.0f}' for size in held)}")
        print(f"sent for ProxProp: {attached.bytes_sent / STEPS / 1e3:.0f} kB a step")
        print(f"distance of a resumed run: {apart}")


def prepared() -> Run:
    """A sharded model, its optimizer and what is attached to it."""
    model = Llama()
    proxprop.convert(model, proxprop.Exact())  # the first line that differs from plain training
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, proxprop.attach(optimizer, model, running=RUNNING)  # the second line


def take_step(run: Run, step: int) -> float:
    """One step on this rank's sequences; the loss is the mean over ranks."""
    model, optimizer, _ = run
    loss = loss_of(model, data(step)[dist.get_rank() :: dist.get_world_size()])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach_())
    return float(loss) / dist.get_world_size()


def state(run: Run) -> dict[str, Any]:
    """All that a checkpoint holds; each rank has the averages it owns, and DCP puts them together."""
    model, optimizer, attached = run
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "proxprop": attached.state_dict()}


def distance_of_resumed(run: Run, folder: str) -> float:
    """Largest distance of parameters from those of a run that goes on from the checkpoint, on any number of ranks."""
    resumed = model, optimizer, attached = prepared()
    saved = state(resumed)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    attached.load_state_dict(saved["proxprop"])
    for step in range(SAVED, STEPS):
        take_step(resumed, step)
    pairs = zip(run[0].parameters(), model.parameters(), strict=True)
    return max(float(whole(p - q).abs().max()) for p, q in pairs)


def distance(model: nn.Module) -> float:
    """Largest relative distance of a direction from the one that one process with all samples takes at first."""
    alone = proxprop.convert(Llama(), proxprop.Exact())
    attached = proxprop.attach(torch.optim.AdamW(alone.parameters()), alone, running=RUNNING)
    loss_of(alone, data(0)).backward()
    attached.solve()
    grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    pairs = [(whole(p), q) for p, q in grads if p is not None and q is not None]
    return max(float((found - expected).norm() / expected.norm()) for found, expected in pairs)


def whole(shards: Tensor) -> Tensor:
    """A sharded tensor, put together."""
    assert isinstance(shards, DTensor)
    return shards.full_tensor().detach()


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Cross-entropy of the next word."""
    return functional.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


def data(step: int, count: int = 48) -> Tensor:
    """Sequences that count on, each in steps of its own `[count, LENGTH]`."""
    draw = torch.Generator().manual_seed(step)
    start, stride = torch.randint(WORDS, (2, count, 1), generator=draw)
    return (start + (1 + stride % 4) * torch.arange(LENGTH)) % WORDS


class Llama(nn.Module):
    """Llama's layers, with learned positions for brevity; the same initial parameters on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Words `[sequences, length]` to logits `[sequences, length, WORDS]`."""
        x = self.words(words) + self.positions.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a gated MLP, none with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[sequences, length, WIDTH]`."""
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


if __name__ == "__main__":
    main()
