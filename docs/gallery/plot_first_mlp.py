"""
A first MLP
===========

Train a small network on scikit-learn's handwritten digits, once as usual and once with proximal directions.
The model, the optimizer and the training loop are the same: one call of :func:`proxprop.convert` is the whole
difference. Each method gets the same six learning rates and is shown at its own best. You see what that buys
per epoch, and what an epoch costs.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import proxprop
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)

# %%
# The data: 1,797 images of 8×8 pixels, 500 of them held out for testing.

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[500:], order[:500]

# %%
# One run. The solver is the only thing that differs between the methods: ``None`` is BackProp, ``CG(3)``
# takes three conjugate-gradient steps towards the proximal direction, ``Exact()`` solves for it.

EPOCHS, BATCH = 10, 100


def run(solver, lr, seed):
    """Train; return training loss and test accuracy at the start and after each epoch, and seconds."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    if solver is not None:
        proxprop.convert(model, solver, tau_theta=1.0)  # the only line that differs
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    losses, accuracies, seconds = [], [], 0.0
    for epoch in range(EPOCHS + 1):
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(x[train]), y[train]).item())
            accuracies.append((model(x[test]).argmax(1) == y[test]).float().mean().item())
        if epoch == EPOCHS:
            break
        start = time.perf_counter()
        for batch in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        seconds += time.perf_counter() - start
    return torch.tensor(losses), torch.tensor(accuracies), seconds


# %%
# Every method tries the same rates, with one seed. A rate is judged by the training loss it ends with, and a
# run that diverged counts as infinitely bad. Then each method trains at its best rate with three other seeds.

RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
METHODS = {"BackProp": None, "CG(3)": proxprop.CG(3), "Exact": proxprop.Exact()}
LOOK = {"BackProp": LOOKS["backprop"], "CG(3)": LOOKS["cg:3"], "Exact": LOOKS["exact"]}

print("training loss  " + "".join(f"lr {lr:<9g}" for lr in RATES))
best, loss, accuracy, seconds = {}, {}, {}, {}
for name, solver in METHODS.items():
    ends = [run(solver, lr, seed=0)[0][-1].nan_to_num(nan=torch.inf).item() for lr in RATES]
    print(f"{name:15}" + "".join(f"{end:<12.4f}" for end in ends))
    best[name] = RATES[ends.index(min(ends))]
    losses, accuracies, seconds[name] = zip(
        *(run(solver, best[name], seed) for seed in (1, 2, 3)), strict=True
    )
    loss[name], accuracy[name] = torch.stack(losses), torch.stack(accuracies)

# %%
# Lines are means over the three seeds, bands go from the lowest seed to the highest.

fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
for ax, curves in zip(axes, (loss, accuracy), strict=True):
    for name, seeds in curves.items():
        ax.plot(seeds.mean(0), **LOOK[name], label=f"{name}, lr {best[name]:g}")
        ax.fill_between(
            range(EPOCHS + 1),
            seeds.amin(0),
            seeds.amax(0),
            color=LOOK[name]["color"],
            alpha=0.15,
            lw=0,
        )
    ax.set_xlabel("epoch")
axes[0].set(yscale="log", title="Training loss")
axes[1].set(ylim=(0.8, 1.0), yticks=(0.8, 0.85, 0.9, 0.95, 1.0), title="Test accuracy")
axes[1].yaxis.set_major_formatter("{x:.0%}")
axes[0].legend()
plt.show()

# %%
# In the same number of epochs the proximal methods reach a clearly lower training loss. The test accuracy of
# these small networks gains far less: all of them fit the digits.

for name in METHODS:
    end, correct = loss[name][:, -1].mean(), accuracy[name][:, -1].mean()
    print(f"{name:10} training loss {end:.4f}, test accuracy {correct:.1%}")
for name in ("CG(3)", "Exact"):
    assert loss[name][:, -1].mean() < 0.7 * loss["BackProp"][:, -1].mean()
    assert abs(accuracy[name][:, -1].mean() - accuracy["BackProp"][:, -1].mean()) < 0.03

# %%
# An epoch is not free. This is what it took here, and the extra FLOPs that :func:`proxprop.summary` counts.
# In a network this small much of the time goes into starting many short operations. The page on performance
# has the ratios of larger networks.

for name in ("CG(3)", "Exact"):
    print(
        f"{name:10} {min(seconds[name]) / min(seconds['BackProp']):.1f}",
        "times BackProp's time on this machine",
    )
model = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
print(proxprop.summary(proxprop.convert(model, proxprop.Exact()), x[:BATCH]))
