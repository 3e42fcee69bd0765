"""A small model with its loss, its data, a loop to compare with, and the trainers of others without their noise."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytorch_lightning
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from cases import randn

MICRO_BATCH, PER_STEP, RATE = 8, 2, 1e-2
X, Y = randn(64, 8, seed=1), randn(64, 3, seed=2)


class Net(nn.Module):
    """Returns its loss, as Trainer wants it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        dtype = self.layers[0].weight.dtype
        return {"loss": (self.layers(x.to(dtype)) - y).square().mean()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def by_hand(
    net: Net,
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
    bf16: bool = False,
    before_step: Callable[[], object] = lambda: None,
) -> dict[str, Tensor]:
    """The parameters after some epochs, in a loop that everyone can read."""
    for _ in range(epochs):
        for x, y in zip(X.split(MICRO_BATCH * PER_STEP), Y.split(MICRO_BATCH * PER_STEP), strict=True):
            optimizer.zero_grad()
            for micro_x, micro_y in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True):
                with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                    loss = net(micro_x, micro_y)["loss"]
                (loss / PER_STEP).backward()
            before_step()
            optimizer.step()
    return dict(net.named_parameters())


class Lit(pytorch_lightning.LightningModule):
    """The model with Lightning's hooks."""

    def __init__(self, net: Net, optimizer: Callable[[nn.Module], object] = adamw) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.net(*batch)["loss"]

    def configure_optimizers(self) -> object:
        return self.optimizer(self.net)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the trainers' own warnings, of torch's names, of workers and of pinned memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(?!proxprop)")
        warnings.filterwarnings("error", module="proxprop")
        yield


def fit(
    lit: pytorch_lightning.LightningModule, ckpt_path: Path | None = None, **options: object
) -> pytorch_lightning.Trainer:
    """One call of Lightning's trainer, without shuffling."""
    defaults: dict[str, object] = {"max_epochs": 1, "accumulate_grad_batches": PER_STEP}
    with quiet():
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            **{"enable_checkpointing": False} | defaults | options,
        )  # fmt: skip
        trainer.fit(lit, DataLoader(TensorDataset(X, Y), batch_size=MICRO_BATCH), ckpt_path=ckpt_path)
    return trainer


class Pairs(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index], "y": Y[index]}


class InOrder(transformers.Trainer):
    """Trainer without shuffling."""

    def _get_train_sampler(self, *args: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def hugging_face(
    net: nn.Module,
    folder: Path,
    optimizer: torch.optim.Optimizer | None,
    callbacks: Sequence[transformers.TrainerCallback] = (),
    **options: object,
) -> transformers.Trainer:
    """Hugging Face's trainer, not yet called. Without an optimizer it makes AdamW itself."""
    defaults: dict[str, object] = {"num_train_epochs": 1, "max_grad_norm": 1e9, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=PER_STEP,
        learning_rate=RATE, lr_scheduler_type="constant", report_to=[], logging_strategy="no", use_cpu=True,
        disable_tqdm=True, **defaults | options,
    )  # fmt: skip
    return InOrder(
        net, arguments, train_dataset=Pairs(), optimizers=(optimizer, None), callbacks=list(callbacks)
    )


def train(trainer: transformers.Trainer, **options: object) -> None:
    with quiet():
        trainer.train(**options)
