"""ProxProp under the Trainer of `transformers`: one callback. A small GPT-2 learns source code."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from proxprop.integrations.huggingface import ProxPropCallback


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of 64 bytes of a module of Python's library; the Trainer shifts the labels."""

    windows = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 512 * 64]))

    def __len__(self) -> int:
        return len(self.windows) // 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[64 * index : 64 * index + 64]
        return {"input_ids": window, "labels": window}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    "out/trainer", num_train_epochs=1, per_device_train_batch_size=8, gradient_accumulation_steps=2,
    learning_rate=3e-3, logging_steps=8, save_strategy="no", report_to="none", use_cpu=True,
    disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=Windows(), callbacks=[ProxPropCallback()])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
