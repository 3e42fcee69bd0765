"""
An image as a network
=====================

A network that maps the coordinates of a pixel to its colour stores an image in its weights. Fourier features
let it reach fine detail, and how much of the detail arrives in a few steps depends on the optimizer. Here
Adam and Muon each train it on plain gradients and on exact proximal directions, every combination at its best
of four learning rates. Proximal directions help Adam a lot. Muon on plain gradients is ahead of both Adams,
and gains nothing from them here.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import nn

import proxprop
from proxprop.lab.figures.style import SETTINGS

plt.rcParams.update(SETTINGS)

# %%
# The image: a part of ``china.jpg``, which ships with scikit-learn, on 64×96 pixels.

photo = torch.tensor(load_sample_image("china.jpg")[50:370, 120:600]) / 255
shrunk = nn.functional.interpolate(photo.permute(2, 0, 1)[None], (64, 96), mode="area")
image = shrunk[0].permute(1, 2, 0)
colours = image.reshape(-1, 3)
pixels = torch.cartesian_prod(torch.linspace(-1, 1, 64), torch.linspace(-1.5, 1.5, 96))

# %%
# The network: 64 random waves in both phases, two hidden layers, three colours.


class FourierFeatures(nn.Module):
    """Sines and cosines of random projections of the coordinates; nothing in here is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", 6 * torch.randn(2, 64))

    def forward(self, x):
        """Features `[pixels, 128]` of coordinates `[pixels, 2]`."""
        return torch.cat([(x @ self.waves).sin(), (x @ self.waves).cos()], dim=-1)


def optimizers(model, name, lr):
    """Adam; or Muon for the hidden matrices and Adam for the rest, as Muon is meant to be used."""
    if name == "Adam":
        return [torch.optim.Adam(model.parameters(), lr=lr)]
    matrices = [model[1].weight, model[3].weight]
    others = [model[1].bias, model[3].bias, *model[5].parameters()]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.Adam(others, lr=lr)]


def run(name, solver, lr, steps=100, batch=768):
    """Train with a learning rate that falls to zero; return the image and its PSNR in decibels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        FourierFeatures(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 3),
    )
    if solver is not None:
        proxprop.convert(model, solver, tau_theta=1.0)
    stepping = optimizers(model, name, lr)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=steps) for o in stepping
    ]
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (batch,))
        model.zero_grad()
        nn.functional.mse_loss(model(pixels[chosen]), colours[chosen]).backward()
        for part in (*stepping, *schedules):
            part.step()
    with torch.no_grad():
        found = model(pixels)
        return found.reshape(image.shape).clamp(0, 1), -10 * nn.functional.mse_loss(
            found, colours
        ).log10().item()


# %%
# Four methods, the same four rates for each.

RATES = (0.003, 0.01, 0.03, 0.1)
METHODS = {
    "Adam": ("Adam", None),
    "Adam on proximal directions": ("Adam", proxprop.Exact()),
    "Muon": ("Muon", None),
    "Muon on proximal directions": ("Muon", proxprop.Exact()),
}
best = {}
for name, (optimizer, solver) in METHODS.items():
    runs = {lr: run(optimizer, solver, lr) for lr in RATES}
    best[name] = max(runs.values(), key=lambda found: found[1])
    print(f"{name:28} " + ", ".join(f"lr {lr:g}: {psnr:.1f} dB" for lr, (_, psnr) in runs.items()))

# %%
# Above the images, below how far each pixel is off (its mean over the three colours; black is none).

fig, axes = plt.subplots(2, 5, figsize=(10, 3.7), layout="constrained")
for ax in axes.flat:
    ax.axis("off")
axes[0, 0].imshow(image)
axes[0, 0].set_title("The image\n", fontsize=9.5)
for (above, below), (name, (found, psnr)) in zip(axes[:, 1:].T, best.items(), strict=True):
    above.imshow(found)
    title = name.replace(" on proximal directions", ", proximal")
    above.set_title(f"{title}\n{psnr:.1f} dB", fontsize=9.5)
    shown = below.imshow((found - image).abs().mean(-1), cmap="magma", vmin=0, vmax=0.15)
fig.colorbar(
    shown, ax=axes[1, 0], orientation="horizontal", label="mean absolute error", fraction=0.5
)
plt.show()

# %%
# The decibels say the same in numbers: three more halve the squared error. This is one network with one seed.
# How much there is to gain depends on the network, and :doc:`/peers` has the record of a SIREN.

psnr = {name: found[1] for name, found in best.items()}
print(
    f"proximal directions: {psnr['Adam on proximal directions'] - psnr['Adam']:+.1f} dB for Adam, ",
    end="",
)
print(f"{psnr['Muon on proximal directions'] - psnr['Muon']:+.1f} dB for Muon")
print(
    "Muon on plain gradients:",
    f"{psnr['Muon'] - psnr['Adam on proximal directions']:+.1f} dB over the better Adam",
)
assert psnr["Adam on proximal directions"] > psnr["Adam"] + 1
assert psnr["Muon"] > psnr["Adam on proximal directions"]
assert psnr["Muon on proximal directions"] < psnr["Muon"] + 0.5
