"""ProxProp under Lightning's Trainer: one callback, with accumulation, clipping and a checkpoint."""

import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from proxprop.integrations.lightning import ProxPropCallback


class Classifier(lightning.LightningModule):
    """An MLP that learns the labels of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of one micro-batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; the callback finds it."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
x, teacher = torch.randn(2048, 64) * torch.logspace(0, -1.5, 64), nn.Linear(64, 10)
data = DataLoader(TensorDataset(x, teacher(x).argmax(dim=1)), batch_size=32, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", callbacks=[ProxPropCallback()], accumulate_grad_batches=2,
    gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir="out/lightning",
)  # fmt: skip
trainer.fit(Classifier(), data)
print(f"loss {trainer.callback_metrics['loss']:.3f} at last")
