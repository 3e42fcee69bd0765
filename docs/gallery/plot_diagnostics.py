"""
What the solves did
===================

:mod:`proxprop.diagnostics` looks into a training run. For every solve it reports the angle between the
direction and the gradient, and how much of the system conjugate gradients left unsolved. It also computes the
spectrum of a layer's :math:`S = A^\\top A`, which explains both. Nothing is measured, and nothing costs
anything, outside a ``with`` block.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import proxprop
from proxprop import diagnostics
from proxprop.lab.figures.style import SETTINGS

plt.rcParams.update(SETTINGS)
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = nn.Sequential(
    nn.Linear(64, 96),
    nn.ReLU(),
    nn.Linear(96, 96),
    nn.ReLU(),
    nn.Linear(96, 96),
    nn.ReLU(),
    nn.Linear(96, 10),
)
proxprop.convert(model, proxprop.CG(3), tau_theta=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True)
LAYERS = ("0", "2", "4")  # the last one stays explicit, so there is nothing to observe

# %%
# A training loop that looks at every fifth step. ``observe`` yields a dict from the name of a layer to its
# reports.


def step(batch):
    """One step of training; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    return loss.item()


def spectra():
    """Eigenvalues of S of each layer for a batch of the first 100 digits, largest first."""
    inputs = {name: model[: int(name)](x[:100]).detach() for name in LAYERS}
    ones = torch.ones(100, 1)  # the bias
    rows = {name: torch.cat([a, ones], dim=1) for name, a in inputs.items()}
    return {name: diagnostics.spectrum(A).eigenvalues.flip(0) for name, A in rows.items()}


STEPS, EVERY = 200, 5
before, losses = spectra(), []
angles: dict[str, list[float]] = {name: [] for name in LAYERS}
residuals: dict[str, list[float]] = {name: [] for name in LAYERS}
for number in range(STEPS):
    batch = torch.randint(len(x), (100,))
    if number % EVERY:
        losses.append(step(batch))
        continue
    with diagnostics.observe(model) as reports:
        losses.append(step(batch))
    for name in LAYERS:
        (report,) = reports[name]  # one call of the layer, one solve
        angles[name].append(report.cosine.acos().rad2deg().item())
        residuals[name].append(report.residual[report.residual > 0].median().item())
after = spectra()
print(reports["2"][0].plan)

# %%
# Four views of one run, a colour for each layer. The angle is that between D and the gradient B, and 0 is
# BackProp. The residual is :math:`\|B - (\lambda I + S)D\| / \|B\|`, the median over outputs, and 0 is an
# exact solve.

COLOURS = {"0": "#0072B2", "2": "#D55E00", "4": "#009E73"}
MARKS = {"0": "o", "2": "s", "4": "^"}
fig, axes = plt.subplots(2, 2, figsize=(10.5, 6.6), layout="constrained")
(top_left, top_right), (low_left, low_right) = axes
seen = range(0, STEPS, EVERY)
top_left.plot(losses, color="#1a1a1a", linewidth=1.2)
for name in LAYERS:
    style = {
        "color": COLOURS[name],
        "marker": MARKS[name],
        "markevery": 5,
        "label": f"layer {name}",
    }
    top_right.plot(seen, angles[name], **style)
    low_left.plot(seen, residuals[name], **style)
    low_right.plot(
        before[name].clamp(min=1e-4), **style | {"linestyle": ":", "label": None, "markevery": 12}
    )
    low_right.plot(after[name].clamp(min=1e-4), **style | {"markevery": 12})
low_right.axhline(1.0, color="#8c8c8c", linewidth=1, zorder=0)
low_right.text(97, 1.3, r"$\lambda = 1/\tau_\theta$", ha="right", color="#1a1a1a")
top_left.set(yscale="log", title="Loss of the mini-batch", xlabel="step")
top_right.set(
    title="Angle between direction and gradient", xlabel="step", ylabel="degrees", ylim=(0, 90)
)
low_left.set(title="Residual of CG(3)", xlabel="step", ylim=(0, None))
low_right.set(
    yscale="log", title="Eigenvalues of S (dotted: before training)", xlabel="largest first"
)
top_right.legend(loc="lower right")
plt.show()
# %%
# The directions are far from the gradient all along, and always less than 90° away, so they descend. In the
# untrained network S of the uppermost of the three layers has only a few eigenvalues above :math:`\lambda`,
# and three steps of conjugate gradients solve such a system well. As the network learns, its spectrum fills
# up, and in all layers more is left over after three steps. That is when more iterations, or ``Exact()``,
# give another direction than ``CG(3)``.

for name in LAYERS:
    large = [int((eigenvalues > 1.0).sum()) for eigenvalues in (before[name], after[name])]
    start, end = (sum(part) / len(part) for part in (residuals[name][:4], residuals[name][-10:]))
    print(f"layer {name}: angles {min(angles[name]):.0f}° to {max(angles[name]):.0f}°, ", end="")
    print(f"eigenvalues above λ {large[0]} -> {large[1]}, residual {start:.2f} -> {end:.2f}")
    assert min(angles[name]) > 20
    assert max(angles[name]) < 90
    assert end > 1.1 * start
assert large[1] > 1.5 * large[0]  # of the last of the three
