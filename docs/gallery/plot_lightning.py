"""
ProxProp under Lightning
========================

One callback is all that changes: :class:`proxprop.integrations.lightning.ProxPropCallback` converts the module when
training starts, attaches its optimizers, solves each step from all of its micro-batches before Lightning clips, and
gives the module back as it was. Running averages are saved in Lightning's checkpoints.

The task is a small one for a CPU: an MLP learns the labels of a random linear map from inputs of very different
scale. Both try the same three learning rates and are shown at their own best. It is one seed, so it is a picture and
not a comparison: :doc:`/peers` has those.
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

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
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
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


# %%
# All runs see the same batches and start from the same weights. Those with the callback also look at the running
# averages through :func:`proxprop.diagnostics.scalars`, which could go to TensorBoard or Weights & Biases as they are.


class Look(lightning.Callback):
    """Keeps the last scalars of an attached model."""

    def __init__(self, callback: ProxPropCallback) -> None:
        self.callback, self.last = callback, dict[str, float]()

    def on_train_batch_end(self, *_: object) -> None:
        """After every micro-batch."""
        assert self.callback.attached is not None
        self.last = proxprop.diagnostics.scalars(self.callback.attached)


def fit(lr: float, *callbacks: lightning.Callback) -> Tensor:
    """The training loss, as means of 16 micro-batches."""
    torch.manual_seed(0)
    x, teacher = torch.randn(4096, 64) * torch.logspace(0, -1.5, 64), nn.Linear(64, 10)
    data = DataLoader(TensorDataset(x, teacher(x).argmax(dim=1)), batch_size=64, shuffle=True)
    module = Classifier(lr)
    trainer = lightning.Trainer(
        max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[*callbacks],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return torch.tensor(module.losses).unfold(0, 16, 16).mean(dim=1)


RATES = (1e-3, 1e-2, 3e-2)
plain, proximal = {}, {}
for lr in RATES:
    look = Look(ProxPropCallback())
    plain[lr], proximal[lr] = fit(lr), fit(lr, look.callback, look)
    print(
        f"lr {lr:g}: AdamW ends at {plain[lr][-1]:.2f}, with the callback at {proximal[lr][-1]:.2f}"
    )
for name, value in look.last.items():
    print(f"{name:36} {value:.3f}")

# %%
# A spread of 1 would mean white inputs, where a proximal step has nothing to gain. Both at their best rates:

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, runs, look_of in (
    ("AdamW", plain, "backprop"),
    ("AdamW with ProxPropCallback", proximal, "running:10"),
):
    best = min(RATES, key=lambda lr: runs[lr][-1])
    steps = range(8, 8 * len(runs[best]) + 1, 8)
    axes.plot(steps, runs[best], label=f"{name}, lr {best:g}", **LOOKS[look_of])
    assert best == RATES[1]
axes.set(yscale="log", xlabel="step", ylabel="training loss", title="An MLP under Lightning")
axes.legend()
plt.show()

assert proximal[1e-2][-1] < plain[1e-2][-1] < 0.2 * plain[1e-2][0]
