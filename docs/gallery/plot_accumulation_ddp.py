"""
Micro-batches and many processes
================================

A proximal direction is no sum over samples, so the mean of the directions of two half batches is not the
direction of the whole batch. Deferred mode sums :math:`S = A^\\top A` and the gradient first, over
micro-batches and over processes, and solves once when the optimizer steps. One call of
:func:`proxprop.attach` turns it on. You see how far each mode is from the step of the large batch, and then
two processes under ``torchrun`` that take the step of one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import proxprop
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)

# %%
# Micro-batches
# -------------
#
# A batch of 240 samples, inputs of very different scale, a small network. The direction of the whole batch is
# the reference.

torch.manual_seed(0)
x, y = torch.randn(240, 32) * torch.logspace(0, -1.5, 32), torch.randint(10, (240,))


def direction(parts, deferred):
    """The direction of the first two layers, from equal micro-batches, as one vector."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )
    proxprop.convert(model, proxprop.Exact(), tau_theta=10.0, scaling="gradient")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attached = proxprop.attach(optimizer, model) if deferred else None
    for samples in torch.arange(len(x)).chunk(parts):
        (nn.functional.cross_entropy(model(x[samples]), y[samples]) / parts).backward()
    if attached is not None:
        attached.solve()  # optimizer.step() would do it; we only want to look
    return torch.cat([p.grad.flatten() for layer in model[:3] for p in layer.parameters()])


PARTS = (2, 3, 4, 6, 8, 12, 24)
whole = direction(parts=1, deferred=False)
off = {
    name: [((direction(parts, deferred) - whole).norm() / whole.norm()).item() for parts in PARTS]
    for name, deferred in {"immediate": False, "deferred": True}.items()
}

# %%
# The relative distance from the direction of the whole batch. Deferred mode is off by rounding, whatever the
# split. Immediate mode takes another direction, the more so the smaller the parts are.

for name, distances in off.items():
    print(
        f"{name:10} "
        + ", ".join(f"{parts}: {d:.0e}" for parts, d in zip(PARTS, distances, strict=True))
    )
assert max(off["deferred"]) < 1e-4
assert min(off["immediate"]) > 1e-2

# %%
# Two processes
# -------------
#
# Under DistributedDataParallel every process has its own samples, which is the same question again. This is a
# whole training script. Two of its lines are about proxprop. It also writes its losses to a file, for the
# figure below.

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import proxprop

dist.init_process_group("gloo")  # on GPUs: "nccl", and everything on the process's own device
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same data and initial parameters everywhere
x = torch.randn(960, 32) * torch.logspace(0, -1.5, 32)
y = (torch.randn(10, 64) @ (torch.randn(64, 32) @ x.T).relu()).argmax(0)
model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
proxprop.convert(model, proxprop.Exact(), tau_theta=10.0, scaling="gradient")  # the first line
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0)
attached = proxprop.attach(optimizer, ddp)  # the second line

losses = []
for step in range(60):
    loss = nn.functional.cross_entropy(ddp(x[rank::ranks]), y[rank::ranks])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach_())
    losses.append(loss.item() / ranks)
if rank == 0:
    print(f"processes: {ranks}, loss {losses[0]:.4f} -> {losses[-1]:.4f}, ", end="")
    print(f"{attached.bytes_sent / len(losses) / 1e3:.0f} kB sent for S in a step")
    torch.save(losses, sys.argv[1])
del ddp, attached, optimizer  # before the group: where they outlive it, torch can hang
dist.destroy_process_group()
"""

# %%
# ``torchrun`` starts it, here from Python. In a shell the same command is::
#
#     torchrun --standalone --nproc-per-node=2 train.py losses.pt


def torchrun(processes):
    """Run the script in some processes, show what it prints, and return the losses it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        script, losses = Path(folder, "train.py"), Path(folder, "losses.pt")
        script.write_text(SCRIPT)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
        ]
        done = subprocess.run(
            [*command, script, losses], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        print(done.stdout, end="")
        return torch.load(losses)


alone, together = torchrun(1), torchrun(2)

# %%
# Left the micro-batches, right the training loss: the curve of two processes lies on that of one.

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.plot(
    PARTS, off["immediate"], **LOOKS["backprop"], label="immediate: solved in each micro-batch"
)
left.plot(PARTS, off["deferred"], **LOOKS["exact"], label="deferred: summed, then solved once")
left.set(xlabel="micro-batches", title="Distance from the large batch's direction")
left.set(xscale="log", yscale="log", xticks=PARTS, xticklabels=PARTS)
left.minorticks_off()
left.legend(loc="center right")
right.plot(alone, color=LOOKS["cg:1"]["color"], linewidth=6, label="one process, 960 samples")
right.plot(together, color="#1a1a1a", linestyle="--", label="two processes, 480 samples each")
right.set(xlabel="step", title="Training loss")
right.legend()
plt.show()

apart = max(abs(a - b) / a for a, b in zip(alone, together, strict=True))
print(f"the losses differ by at most {apart:.0e} of their value")
assert apart < 1e-2
