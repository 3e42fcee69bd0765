"""
A deep autoencoder
==================

Deep autoencoders with a narrow code are the classic example of networks that gradient descent trains slowly.
This one squeezes pictures of random curves, which have six degrees of freedom, through a code of six numbers.
Adam drives both methods: once with BackProp's gradients and once with exact proximal directions, each at its
own best of four learning rates. The pictures show what the lower loss looks like.
"""

import time
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import nn

import proxprop
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)

# %%
# The data: Bézier curves with three random control points, drawn with a soft pen on 16×16 pixels.

SIZE = 16


def draw_curves(number, seed):
    """Pictures of random curves `[number, SIZE²]`, with values from 0 to 1."""
    start, middle, end = 0.05 + 0.9 * torch.rand(
        3, number, 1, 2, generator=torch.Generator().manual_seed(seed)
    )
    t = torch.linspace(0, 1, 24)[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    pixels = torch.cartesian_prod(axis, axis).flip(1)
    return torch.exp(
        -((SIZE / 1.2 * torch.cdist(points, pixels.expand(number, -1, -1)).amin(1)) ** 2)
    )


train, test = draw_curves(2000, seed=0), draw_curves(500, seed=1)

# %%
# One run: layers 256-128-64-6-64-128-256, and a learning rate that falls linearly to zero.

EPOCHS, BATCH = 12, 100


def autoencoder():
    """An encoder and a decoder of three layers each; the code and the output are linear."""
    torch.manual_seed(0)
    layers = []
    for wide, narrow in pairwise((SIZE**2, 128, 64, 6, 64, 128, SIZE**2)):
        layers += [nn.Linear(wide, narrow), nn.Identity() if narrow in (6, SIZE**2) else nn.SiLU()]
    return nn.Sequential(*layers)


def run(solver, lr):
    """Train; return the model, squared errors (test by epoch, training at the end) and seconds."""
    model = autoencoder()
    if solver is not None:
        proxprop.convert(model, solver, tau_theta=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = EPOCHS * len(train) // BATCH
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    errors, start = [], time.perf_counter()
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(batch), batch).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            errors.append((model(test).sigmoid() - test).square().mean().item())
    seconds = time.perf_counter() - start
    with torch.no_grad():
        return model, errors, (model(train).sigmoid() - train).square().mean().item(), seconds


# %%
# Each method takes the rate with the lowest error on the training pictures.

RATES = (0.003, 0.01, 0.03, 0.1)
METHODS = {"Adam": None, "Adam on proximal directions": proxprop.Exact()}
best = {}
for name, solver in METHODS.items():
    runs = {lr: run(solver, lr) for lr in RATES}
    best[name] = min(((lr, *found) for lr, found in runs.items()), key=lambda found: found[3])
    print(
        f"{name:28} "
        + ", ".join(f"lr {lr:g}: {error:.4f}" for lr, (_, _, error, _) in runs.items())
    )

# %%
# The error on pictures that were not trained on, and some of these pictures.

LOOK = dict(zip(METHODS, (LOOKS["backprop"], LOOKS["exact"]), strict=True))
shown = test[:7]
fig = plt.figure(figsize=(10, 3.8), layout="constrained")
left, right = fig.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.7))[0]
ax, rows = left.subplots(), {"original": shown}
for name, (lr, model, errors, _, _) in best.items():
    lines = name.replace(" on ", "\non ")
    ax.plot(range(1, EPOCHS + 1), errors, **LOOK[name], label=f"{lines}, lr {lr:g}")
    rows[lines] = model(shown).detach().sigmoid()
ax.set(yscale="log", xlabel="epoch", title="Squared error on test pictures")
ax.set(yticks=(0.01, 0.02, 0.03, 0.05), yticklabels=("0.01", "0.02", "0.03", "0.05"))
ax.minorticks_off()
ax.legend(fontsize=8.5, loc="center right")
for axes, (name, pictures) in zip(right.subplots(3, len(shown)), rows.items(), strict=True):
    for ax, picture in zip(axes, pictures, strict=True):
        ax.imshow(picture.view(SIZE, SIZE), cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.grid(False)
    axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
plt.show()

# %%
# With the same number of steps the proximal directions end at a much lower error, and the pictures show
# strokes where Adam alone shows clouds. The last line also says what that cost in time.

(_, _, plain, _, plain_seconds), (_, _, proximal, _, proximal_seconds) = best.values()
print(
    f"error {proximal[-1] / plain[-1]:.2f} times Adam's,",
    f"time {proximal_seconds / plain_seconds:.1f} times Adam's",
)
assert proximal[-1] < 0.7 * plain[-1]
