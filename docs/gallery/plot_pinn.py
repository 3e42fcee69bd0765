"""
A network that solves Poisson's equation
========================================

A physics-informed network is trained to satisfy a differential equation, so its loss holds second derivatives
of the network. That needs ``create_graph=True``, which works in deferred mode: backward leaves torch's own
gradient, and :func:`proxprop.attach` turns it into a direction when the optimizer steps. Here S is a running
average, so most steps are Adam's own plus one small product per layer. The page shows how to do it, and that
both methods solve the equation. It is one problem and one seed, so it ranks nothing. :doc:`/peers` has
Poisson's equation with tuned rates and several seeds.
"""

from math import pi

import matplotlib.pyplot as plt
import torch
from torch import nn

import proxprop
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)

# %%
# The problem: :math:`-\Delta u = f` on the unit square with :math:`u = 0` on its border. We choose u and
# compute f from it, so that the error is known.


def waves(points):
    """The two waves that u is made of, at points `[n, 2]`."""
    x, y = points.T
    first = torch.sin(2 * pi * x) * torch.sin(pi * y)
    return first, 0.5 * torch.sin(pi * x) * torch.sin(3 * pi * y)


def solution(points):
    """The u to be found."""
    first, second = waves(points)
    return first + second


def f(points):
    """Minus its Laplacian."""
    first, second = waves(points)
    return 5 * pi**2 * first + 10 * pi**2 * second


# %%
# The network is multiplied by a function that vanishes on the border, so only the equation is left to be
# learned.


def u(model, points):
    """The network's solution at points `[n, 2]`."""
    x, y = points.T
    return 4 * x * (1 - x) * y * (1 - y) * model(points).squeeze(-1)


def residual(model, points):
    """How far the equation is from being true: the Laplacian of u, plus f."""
    points.requires_grad_()
    (slope,) = torch.autograd.grad(u(model, points).sum(), points, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)
    ]
    return sum(second) + f(points)


# %%
# Two lines make it ProxProp with a running S. The rest is a plain training loop.

SIDE = 60
grid = torch.cartesian_prod(torch.linspace(0, 1, SIDE), torch.linspace(0, 1, SIDE))
STEPS, BATCH = 240, 128


def run(running, lr):
    """Train; return the model, its residual, and the relative error of u at every tenth step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    if running is not None:
        proxprop.convert(model, proxprop.Exact())
        proxprop.attach(optimizer, model, running=running)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    errors = []
    for step in range(STEPS):
        optimizer.zero_grad()
        residual(model, torch.rand(BATCH, 2)).square().mean().backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            with torch.no_grad():
                errors.append(
                    ((u(model, grid) - solution(grid)).norm() / solution(grid).norm()).item()
                )
    return model, residual(model, torch.rand(1000, 2)).square().mean().item(), errors


RATES = (0.01, 0.03, 0.1, 0.3)
best = {}
for name, running in {"Adam": None, "Adam, running S": proxprop.Running()}.items():
    runs = {lr: run(running, lr) for lr in RATES}
    best[name] = min(((lr, *found) for lr, found in runs.items()), key=lambda found: found[2])
    print(
        f"{name:16} residual " + ", ".join(f"{r:.2g} (lr {lr:g})" for lr, (_, r, _) in runs.items())
    )

# %%
# Each method is shown at the rate with the smallest residual, which is all one could judge by if u were not
# known.

fig, axes = plt.subplots(2, 2, figsize=(8.5, 6.6), layout="constrained")
axes = axes.flatten()
LOOK = {"Adam": LOOKS["backprop"], "Adam, running S": LOOKS["running:10"]}


def picture(ax, values, title, limit):
    """A function on the square, in colours from blue to red."""
    values = values.view(SIDE, SIDE).T
    shown = ax.imshow(
        values, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r", vmin=-limit, vmax=limit
    )
    ax.set(title=title, xticks=(0, 1), yticks=(0, 1), xlabel="x", ylabel="y")
    ax.grid(False)
    return shown


with torch.no_grad():
    found = u(best["Adam, running S"][1], grid)
    wrong = {
        name: 1000 * (u(model, grid) - solution(grid)) for name, (_, model, _, _) in best.items()
    }
limit = max(error.abs().max() for error in wrong.values()).item()
fig.colorbar(picture(axes[1], found, "Solution, running S", 1.5), ax=axes[1], label="u", shrink=0.8)
picture(axes[2], wrong["Adam"], "Error, Adam", limit)
last = picture(axes[3], wrong["Adam, running S"], "Error, running S", limit)
fig.colorbar(last, ax=axes[2:], label="1000 × error of u", shrink=0.8)
for name, (lr, _, _, errors) in best.items():
    axes[0].plot(
        range(10, STEPS + 1, 10), errors, **LOOK[name], markevery=5, label=f"{name}, lr {lr:g}"
    )
axes[0].set(yscale="log", xlabel="step", title="Relative error of u")
axes[0].legend()
plt.show()

# %%
# S holds the rows of the forward pass and not those of the derivatives, as the page on deferred mode
# explains. The directions stay descent directions, and the equation is solved.

for name, (_, _, _, errors) in best.items():
    print(f"{name:16} relative error {errors[-1]:.2%}")
    assert errors[-1] < 0.05
