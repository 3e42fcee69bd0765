"""Deferred mode under trainers that write the loop themselves: PyTorch Lightning's and Hugging Face's, as they are."""

import warnings
from pathlib import Path

import pytest
import pytorch_lightning
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

import proxprop
from cases import randn
from proxprop import Exact, Running
from training import assert_same

works = pytest.mark.compatibility
ACCUMULATED = "micro-batches as under gradient accumulation"
MICRO_BATCH, PER_STEP, RATE = 8, 2, 1e-2
X, Y = randn(64, 8, seed=1), randn(64, 3, seed=2)
RUNNING = pytest.mark.parametrize(
    "running",
    [None, Running(update_every=1, invert_every=2), Running(update_every=2, invert_every=2)],
    ids=str,
)


class Net(nn.Module):
    """A small converted model that returns its loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.layers = proxprop.convert(layers, Exact(), tau_theta=0.5, include_last=True)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}

    def attached(self, running: Running | None) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        proxprop.attach(optimizer, self, running=running)
        return optimizer


def by_hand(running: Running | None) -> dict[str, Tensor]:
    """The parameters after one epoch, in a loop that everyone can read."""
    net = Net()
    optimizer = net.attached(running)
    for x, y in zip(X.split(MICRO_BATCH * PER_STEP), Y.split(MICRO_BATCH * PER_STEP), strict=True):
        optimizer.zero_grad()
        for micro_x, micro_y in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True):
            (net(micro_x, micro_y)["loss"] / PER_STEP).backward()
        optimizer.step()
    return dict(net.named_parameters())


class Lit(pytorch_lightning.LightningModule):
    """The same model with Lightning's hooks."""

    def __init__(self, running: Running | None) -> None:
        super().__init__()
        self.net, self.running = Net(), running

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.net(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.net.attached(self.running)


LIGHTNING = "PyTorch Lightning's `Trainer`, with accumulation and clipping"


@works(LIGHTNING, mode="deferred")
@works(LIGHTNING, status="approximate", note=ACCUMULATED)
@RUNNING
def test_lightning(running: Running | None) -> None:
    lit = Lit(running)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of torch's names and of workers
        trainer = pytorch_lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=PER_STEP, gradient_clip_val=1e9,
        )  # fmt: skip
        trainer.fit(lit, DataLoader(TensorDataset(X, Y), batch_size=MICRO_BATCH))
    assert_same(dict(lit.net.named_parameters()), by_hand(running), 1e-12)


class Pairs(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index], "y": Y[index]}


class InOrder(transformers.Trainer):
    """Trainer without shuffling."""

    def _get_train_sampler(self, *args: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


TRAINER = "Hugging Face's `Trainer`, with accumulation and clipping"


@works(TRAINER, mode="deferred")
@works(TRAINER, status="approximate", note=ACCUMULATED)
@RUNNING
def test_trainer(running: Running | None, tmp_path: Path) -> None:
    net = Net()
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=PER_STEP,
        num_train_epochs=1, max_grad_norm=1e9, lr_scheduler_type="constant", report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pinned memory
        InOrder(net, arguments, train_dataset=Pairs(), optimizers=(net.attached(running), None)).train()
    assert_same(dict(net.named_parameters()), by_hand(running), 1e-12)
