"""
Which step sizes can blow up
============================

ProxProp has two step sizes. One is :math:`\\tau_\\theta` inside the system, and it can be made as large as
you like. For one linear layer that is a theorem, and in the network below it holds over eight orders of
magnitude. The other is the optimizer's learning rate, and it can be too large: every method here diverges at
some rate. ProxProp changes how wide the range of useful rates is, and where it lies. One more line,
``proxprop.bound(optimizer)``, takes the upper end of that range away.
"""

import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import proxprop
from proxprop import CG, Exact
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)
warnings.filterwarnings(
    "ignore", category=RuntimeWarning, module="proxprop"
)  # a diverged layer says so; we know

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

# %%
# One linear layer
# ----------------
#
# Fit a linear layer to the digits by least squares, :math:`E(W) = \tfrac12\|AW - Y\|^2`. BackProp's step
# multiplies the error along an eigenvector of :math:`S = A^\top A` with eigenvalue :math:`\lambda` by
# :math:`1 - \tau\lambda`, so it diverges if :math:`\tau > 2/\lambda_{\max}`. The proximal step multiplies it
# by :math:`1/(1 + \tau_\theta\lambda)`, which lies between 0 and 1 for every :math:`\tau_\theta`. Conjugate
# gradients that start at zero can only lower the same objective. So no :math:`\tau_\theta` is too large.

A = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
Y = nn.functional.one_hot(y, 10).double()
least = 0.5 * (A @ torch.linalg.pinv(A) @ Y - Y).square().sum()
largest = torch.linalg.matrix_norm(A, 2) ** 2


def least_squares(solver, step_size, steps=40):
    """How far E is above its minimum after some steps from zero, as a share of its minimum."""
    layer = nn.Linear(64, 10, dtype=torch.float64)
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    if solver is not None:  # its step size is τ_θ, and the learning rate stays 1
        proxprop.convert(layer, solver, tau_theta=step_size, include_last=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=step_size if solver is None else 1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (layer(A[:, :-1]) - Y).square().sum()).backward()
        optimizer.step()
    with torch.no_grad():
        excess = 0.5 * (layer(A[:, :-1]) - Y).square().sum() / least - 1
        return excess.clamp(min=1e-12).item()  # rounding


SOLVERS = {"BackProp": None, "CG(3)": CG(3), "Exact": Exact()}
LOOK = {"BackProp": LOOKS["backprop"], "CG(3)": LOOKS["cg:3"], "Exact": LOOKS["exact"]}
relative = torch.logspace(-2, 6, 9).tolist()
fits = {
    name: [least_squares(solver, r / largest.item()) for r in relative]
    for name, solver in SOLVERS.items()
}

assert all(fit > 1e3 for r, fit in zip(relative, fits["BackProp"], strict=True) if r > 5)
for name in ("CG(3)", "Exact"):
    assert all(fit < fits[name][0] for fit in fits[name][1:])  # the smallest step is the worst

# %%
# A network
# ---------
#
# Nothing guarantees this for a network, where all layers move at once and the loss is no square. Here is a
# small MLP, trained for a hundred steps of plain SGD. First :math:`\tau_\theta` varies and the learning rate
# stays put.


def train(solver, lr, tau_theta=1.0, scaling="paper", steps=100, bounded=False):
    """The loss on all digits after some steps on batches of 100, NaN or huge if it diverged."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    if solver is not None:
        proxprop.convert(model, solver, tau_theta=tau_theta, scaling=scaling)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if bounded:
        proxprop.bound(optimizer)
    for _ in range(steps):
        batch = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        if not loss < 1e4:
            return torch.inf
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).nan_to_num(nan=torch.inf).item()


taus = torch.logspace(-3, 5, 5).tolist()
over_tau = {
    name: [train(SOLVERS[name], lr=3.0, tau_theta=tau) for tau in taus]
    for name in ("CG(3)", "Exact")
}
assert all(loss < 2.2 for losses in over_tau.values() for loss in losses)

# %%
# Then the learning rate varies over five orders of magnitude. With ``scaling="gradient"`` the direction is as
# long as a gradient where S is small, which moves the useful rates closer to BackProp's.

rates = torch.logspace(-2, 3, 11).tolist()
over_rate = {
    "BackProp": [train(None, lr) for lr in rates],
    "CG(3)": [train(CG(3), lr) for lr in rates],
    "Exact": [train(Exact(), lr) for lr in rates],
    'Exact, scaling="gradient"': [
        train(Exact(), lr, tau_theta=10.0, scaling="gradient") for lr in rates
    ],
}
LOOK['Exact, scaling="gradient"'] = {"color": "#E69F00", "linestyle": "-.", "marker": "X"}

# %%
# Once more with bounded steps: no step is longer than a tenth of the norm that the parameters had at the
# start, and all of them together, as the root of their summed squares, come to about that norm.

over_bounded = {
    name: [train(solver, lr, bounded=True) for lr in rates] for name, solver in SOLVERS.items()
}

# %%
# Crosses on top mark runs that diverged, or ended above the loss of a network that knows nothing.

START = nn.functional.cross_entropy(torch.zeros(1, 10), y[:1]).item()  # ln 10


def draw(ax, steps, losses, name, failed):
    """A curve of what trained, and crosses for what did not."""
    shown = [loss if loss < failed else torch.nan for loss in losses]
    ax.plot(steps, shown, **LOOK[name], label=name, zorder=3 if name == "BackProp" else 2)
    lost = [step for step, loss in zip(steps, losses, strict=True) if not loss < failed]
    height = 1.02 + 0.04 * list(over_rate).index(name)
    style = {"marker": "x", "s": 22, "color": LOOK[name]["color"], "clip_on": False}
    ax.scatter(lost, [height] * len(lost), transform=ax.get_xaxis_transform(), **style)
    ax.set(xscale="log", yscale="log", xlim=(steps[0] / 2, steps[-1] * 2))


fig, grid = plt.subplots(2, 2, figsize=(10, 8.6), layout="constrained")
axes = grid.flatten()
for ax, steps, curves, failed in zip(
    axes,
    (relative, taus, rates, rates),
    (fits, over_tau, over_rate, over_bounded),
    (1e3, START, START, START),
    strict=True,
):
    for name, losses in curves.items():
        draw(ax, steps, losses, name, failed)
    ax.set_ylabel("loss after 100 steps")
axes[0].set(
    xlabel=r"$\tau$ or $\tau_\theta$, times $\lambda_{\max}$",
    ylabel="excess loss after 40 steps, relative",
)
axes[1].set(xlabel=r"$\tau_\theta$, at a learning rate of 3")
axes[2].set(xlabel="learning rate")
axes[3].set(xlabel="learning rate, steps bounded", ylim=axes[2].get_ylim())
titles = (
    "One linear layer",
    r"A network over $\mathbf{\tau_\theta}$",
    "A network over the learning rate",
    "The same with bounded steps",
)
for ax, title in zip(axes, titles, strict=True):
    ax.set_title(title, pad=40)
axes[0].legend(loc="lower left")
axes[2].legend(loc="lower left", fontsize=8)
plt.show()

# %%
# Call a rate useful if the network reaches a loss below 0.6 within a hundred steps. The range of useful rates
# is wider with proximal directions, and the best loss in it is lower. Without a bound each method has rates
# that are too large. With one none does, BackProp's included. That has a price in so short a run: with
# proximal directions, a hundred steps that are cut do not take the network as far as the best rate did.
# Small rates are as they were. So it is still worth tuning the rate.

ranges = {}
for kind, curves in (("", over_rate), (", bounded", over_bounded)):
    for name, losses in curves.items():
        useful = [lr for lr, loss in zip(rates, losses, strict=True) if loss < 0.6]
        ranges[name + kind] = useful[-1] / useful[0]
        print(
            f"{name + kind:26} useful from {useful[0]:.3g} to {useful[-1]:.3g},",
            f"best loss {min(losses):.3f}",
        )

for name in ("CG(3)", "Exact"):
    assert ranges[name] >= 2.9 * ranges["BackProp"]
    assert min(over_rate[name]) < 0.6 * min(over_rate["BackProp"])
    assert min(over_rate[name]) < min(over_bounded[name])  # the price
for name in SOLVERS:
    assert over_rate[name][0] == over_bounded[name][0]  # small rates
assert not any(losses[-1] < START for losses in over_rate.values())
assert all(loss <= START for losses in over_bounded.values() for loss in losses)
