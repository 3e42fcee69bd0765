"""
ProxProp under Lightning
========================

One callback is all that changes: :class:`proxprop.integrations.lightning.ProxPropCallback` converts the module when
training starts, attaches its optimizers, solves each step from all of its micro-batches before Lightning clips, and
gives the module back as it was. Running averages are saved in Lightning's checkpoints.

The task is a small one for a CPU: an MLP learns the labels of a random linear map from inputs of very different
scale. One seed and one learning rate make a picture, not a comparison: those are in the records. At this rate AdamW
alone is ahead.
"""

import warnings

import matplotlib.pyplot as plt
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import proxprop
from proxprop.integrations.lightning import ProxPropCallback
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)

warnings.filterwarnings("ignore", module="pytorch_lightning")  # of workers and of torch's names

# %%
# A module as anyone would write it. It knows nothing of proxprop.


class Classifier(lightning.LightningModule):
    """An MLP that remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
        )
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; the callback finds it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# %%
# Both runs see the same batches and start from the same weights. The second also looks at the running averages through
# :func:`proxprop.diagnostics.scalars`, which could go to TensorBoard or Weights & Biases as they are.


class Look(lightning.Callback):
    """Keeps the last scalars of an attached model."""

    def __init__(self, callback: ProxPropCallback) -> None:
        self.callback, self.last = callback, dict[str, float]()

    def on_train_batch_end(self, *_: object) -> None:
        """After every micro-batch."""
        assert self.callback.attached is not None
        self.last = proxprop.diagnostics.scalars(self.callback.attached)


def fit(*callbacks: lightning.Callback) -> list[float]:
    """Losses of micro-batches, in order."""
    torch.manual_seed(0)
    x, teacher = torch.randn(4096, 64) * torch.logspace(0, -1.5, 64), nn.Linear(64, 10)
    data = DataLoader(TensorDataset(x, teacher(x).argmax(dim=1)), batch_size=64, shuffle=True)
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", callbacks=[*callbacks], accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return module.losses


callback = ProxPropCallback()
look = Look(callback)
plain, proximal = fit(), fit(callback, look)
for name, value in look.last.items():
    print(f"{name:36} {value:.3f}")

# %%
# A spread of 1 would mean white inputs, of which a proximal step has nothing to gain. What came out:


def smoothed(losses: list[float]) -> Tensor:
    """Means of 16 micro-batches."""
    return torch.tensor(losses).unfold(0, 16, 16).mean(dim=1)


steps = range(8, 8 * len(smoothed(plain)) + 1, 8)
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(steps, smoothed(plain), label="AdamW", **LOOKS["backprop"])
axes.plot(steps, smoothed(proximal), label="AdamW with ProxPropCallback", **LOOKS["running:10"])
axes.set(xlabel="step", ylabel="training loss", title="An MLP under Lightning")
axes.legend()
plt.show()

assert plain[-1] < 0.6 * plain[0]
assert proximal[-1] < 0.6 * proximal[0]
assert smoothed(plain)[-1] < smoothed(proximal)[-1]  # AdamW alone is ahead, as said above
