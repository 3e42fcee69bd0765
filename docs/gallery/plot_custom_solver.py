"""
A solver of your own
====================

A solver gets :math:`S = A^\\top A` and the gradient :math:`B = A^\\top G` and returns something close to
:math:`D = (\\lambda I + S)^{-1} B`. Subclass :class:`proxprop.Solver` to bring your own: name the spaces it
works in, count its FLOPs, and implement one method for each space. Here that is Chebyshev's iteration in
feature space, which needs no inner products, only bounds on the eigenvalues. You see how fast it comes close
to ``Exact()``, next to ``CG(k)``, and that it trains a network.
"""

from dataclasses import dataclass
from typing import ClassVar

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import proxprop
from proxprop.lab.figures.style import LOOKS, SETTINGS
from proxprop.solvers import Sizes, Solution

plt.rcParams.update(SETTINGS)

# %%
# The solver. All eigenvalues of :math:`\lambda I + S` lie between :math:`\lambda` and :math:`\lambda` plus
# the largest row sum of :math:`|S|`. Shapes are ``S [groups, features, features]`` and ``B [groups, features,
# outputs]``, and the columns of B are independent problems. Scaling B scales the result, and NaN passes
# through, as a solver should let it.


@dataclass(frozen=True)
class Chebyshev(proxprop.Solver):
    """Some steps of Chebyshev's semi-iteration from zero, in feature space."""

    iterations: int = 10
    spaces: ClassVar[tuple[str, ...]] = ("feature",)

    def flops(self, sizes: Sizes, space: str) -> float:
        """One product with S in each step but the first, which starts from zero."""
        return (self.iterations - 1) * 2.0 * sizes.groups * sizes.features**2 * sizes.outputs

    def features(self, S: torch.Tensor, B: torch.Tensor, damping: float) -> Solution:
        """The iterate, from products with S alone."""
        width = S.abs().sum(-1).amax(-1)[:, None, None] / 2  # half the length of the interval
        centre = damping + width
        rho = width / centre
        step = B / centre
        D, R = step, B
        for _ in range(self.iterations - 1):
            R = R - damping * step - S @ step
            rho, before = 1 / (2 * centre / width - rho), rho
            step = rho * before * step + 2 * rho / width * R
            D = D + step
        return Solution(D)


# %%
# It goes wherever ``CG(3)`` or ``Exact()`` would. First, how close it comes to the exact direction of one
# layer, for two values of :math:`\tau_\theta`.

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def network():
    """An MLP with the same initial parameters every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def direction(solver, tau_theta):
    """The direction of the first layer of the untrained network on 500 digits, in float64."""
    model = proxprop.convert(network().double(), solver, tau_theta=tau_theta)
    nn.functional.cross_entropy(model(x[:500].double()), y[:500]).backward()
    return model[0].weight.grad


COUNTS, TAUS = (1, 2, 4, 8, 16, 32, 64), (0.01, 1.0)
SOLVERS = {"CG": proxprop.CG, "Chebyshev": Chebyshev}
distance = {}
for tau_theta in TAUS:
    exact = direction(proxprop.Exact(), tau_theta)
    for name, solver in SOLVERS.items():
        distance[name, tau_theta] = [
            ((direction(solver(count), tau_theta) - exact).norm() / exact.norm()).item()
            for count in COUNTS
        ]

# %%
# Then training: eight epochs of SGD with each solver, all at the same rate.


def train(solver, lr=1.0, epochs=8):
    """The training loss after each epoch."""
    model = proxprop.convert(network(), solver, tau_theta=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(x), y).item())
    return losses


TRAINED = {
    "CG(3)": (proxprop.CG(3), LOOKS["cg:3"]),
    "Chebyshev(3)": (Chebyshev(3), LOOKS["running:10"] | {"linestyle": ":"}),
    "Chebyshev(30)": (Chebyshev(30), LOOKS["running:10"]),
    "Exact()": (proxprop.Exact(), LOOKS["exact"]),
}
curves = {name: train(solver) for name, (solver, _) in TRAINED.items()}

# %%
# The gap to the exact direction closes with every product. The two lines of a method are two systems: the
# larger :math:`\tau_\theta` is, the worse conditioned is its system and the slower is either iteration.

fig, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
for (name, tau_theta), distances in distance.items():
    look = LOOKS["cg:3"] if name == "CG" else LOOKS["running:10"]
    style = look | {"linestyle": "-" if tau_theta == 1.0 else ":"}
    left.plot(COUNTS, distances, **style, label=rf"{name}, $\tau_\theta$ = {tau_theta:g}")
for name, losses in curves.items():
    right.plot(range(1, len(losses) + 1), losses, **TRAINED[name][1], label=name)
left.set(xscale="log", yscale="log", xticks=COUNTS, xticklabels=COUNTS, ylim=(1e-10, 2))
left.set(xlabel="iterations", title="Distance from the exact direction")
left.minorticks_off()
right.set(yscale="log", xlabel="epoch", title="Training loss")
left.legend(loc="lower left")
right.legend()
plt.show()

# %%
# Conjugate gradients need far fewer products for the same accuracy, because they find out by themselves where
# the eigenvalues are. With enough steps the new solver trains as the exact one does.

for name, losses in curves.items():
    print(f"{name:14} training loss {losses[-1]:.4f}")
for tau_theta in TAUS:
    assert all(
        cg < other
        for cg, other in zip(
            distance["CG", tau_theta], distance["Chebyshev", tau_theta], strict=True
        )
    )
    assert distance["Chebyshev", tau_theta] == sorted(
        distance["Chebyshev", tau_theta], reverse=True
    )
for name in SOLVERS:
    assert distance[name, 1.0][3] > distance[name, 0.01][3]
assert curves["Chebyshev(30)"][-1] < 3 * curves["Exact()"][-1]
