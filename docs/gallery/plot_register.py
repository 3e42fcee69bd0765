"""
A linear layer of another library
=================================

:func:`proxprop.convert` knows torch's layers. A linear layer that another library wrote under another name is
one call of :func:`proxprop.register` away. Here such a class stores its weight transposed and sits in a small
network. After the call `convert` takes it like ``nn.Linear``, and its direction is checked against the dense
formula in float64. The pictures show what the formula does to a gradient: it evens out inputs of different
scale.
"""

import textwrap

import matplotlib.pyplot as plt
import torch
from torch import nn

import proxprop
from proxprop.lab.figures.style import SETTINGS

torch.manual_seed(0)
plt.rcParams.update(SETTINGS)

# %%
# The layer of the other library. It computes :math:`xW + b`, with W of shape ``[features, outputs]``.


class Dense(nn.Module):
    """A linear layer that torch has never heard of."""

    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, outputs) / features**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        """`x W + b`."""
        return x @ self.weight + self.bias


model = nn.Sequential(Dense(20, 24), nn.Tanh(), Dense(24, 24), nn.Tanh(), nn.Linear(24, 3)).double()

# %%
# Unregistered, the layers stay as they are, and since nothing else is left to convert, an error says what to
# do.

try:
    proxprop.convert(model, proxprop.Exact(), tau_theta=0.1)
    raise AssertionError("convert should have found nothing to convert")
except ValueError as error:
    print(textwrap.fill(str(error), 88))

# %%
# One call, and they are converted.

proxprop.register(Dense, transposed=True)
proxprop.convert(model, proxprop.Exact(), tau_theta=0.1)
print(model)

# %%
# Backward on inputs whose scale falls from 1 to 0.03. Hooks keep what the formula needs: the rows A that a
# layer saw (with a column of ones for the bias), and the gradient G that arrived at its output.

x = torch.randn(200, 20, dtype=torch.float64) * torch.logspace(0, -1.5, 20)
y = torch.randint(3, (200,))

seen: dict[str, dict[str, torch.Tensor]] = {}
for name in ("0", "2"):

    def keep(layer, inputs, output, name=name):
        """Keep A, and G when it arrives."""
        seen[name] = {
            "A": torch.cat([inputs[0].detach(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
        }
        output.register_hook(lambda G: seen[name].update(G=G.clone()))

    model.get_submodule(name).register_forward_hook(keep)

nn.functional.cross_entropy(model(x), y, reduction="sum").backward()

# %%
# The dense formula, :math:`D = (I/\tau_\theta + A^\top A)^{-1} A^\top G`: weight and bias are its rows.

directions, gradients = {}, {}
for name, of in seen.items():
    S, B = of["A"].T @ of["A"], of["A"].T @ of["G"]
    layer = model.get_submodule(name)
    weight, bias = layer.parameters()
    assert weight.grad is not None
    assert bias.grad is not None
    directions[name] = torch.cat([weight.grad, bias.grad[None]])
    gradients[name] = B
    dense = torch.linalg.solve(torch.eye(len(S), dtype=torch.float64) / 0.1 + S, B)
    distance = ((directions[name] - dense).norm() / dense.norm()).item()
    print(f"layer {name}: relative distance from the dense formula {distance:.0e}")
    assert distance < 1e-9

# %%
# Gradient and direction of both layers. Rows are features, columns outputs, and the last row is the bias. In
# the first layer the gradient is large for the loud inputs on top. The direction reaches the quiet ones below
# as well.

fig, axes = plt.subplots(1, 4, figsize=(10, 3.8), layout="constrained")
for pair, name in zip((axes[:2], axes[2:]), seen, strict=True):
    for ax, values, title in zip(
        pair, (gradients[name], directions[name]), ("gradient", "direction D"), strict=True
    ):
        limit = values.abs().max().item()
        shown = ax.imshow(values / limit, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
        ax.set(title=f"Layer {name}: {title}", xlabel="output")
        ax.set_yticks((0, 5, 10, 15, len(values) - 1), ("0", "5", "10", "15", "bias"))
        ax.grid(False)
    pair[0].set_ylabel("feature")
fig.colorbar(shown, ax=axes, label="relative to the largest entry")
plt.show()

# %%
# In numbers: the share of the first layer's entries that its ten quiet inputs have, and the angle between the
# two.

for title, values in (("gradient", gradients["0"]), ("direction", directions["0"])):
    print(
        f"{title:10} {values[10:20].norm() / values.norm():.0%}",
        "of the norm in the quiet half of the inputs",
    )
for name in seen:
    cosine = nn.functional.cosine_similarity(
        gradients[name].flatten(), directions[name].flatten(), dim=0
    )
    print(f"layer {name}: {cosine.acos().rad2deg():.0f}° between direction and gradient")
    assert 0 < cosine < 0.99
quiet = [
    (values[10:20].norm() / values.norm()).item() for values in (gradients["0"], directions["0"])
]
assert quiet[1] > 1.5 * quiet[0]

proxprop.unregister(Dense)  # other pages are built in the same process
