"""
ProxProp under Hugging Face's Trainer
=====================================

One callback is all that changes: :class:`proxprop.integrations.huggingface.ProxPropCallback` converts the model when
training starts, attaches the optimizer that the Trainer made, solves each step from all of its micro-batches before
it is clipped, and gives the model back as it was. Running averages are saved in the Trainer's checkpoints.

The model here is a GPT-2 with random weights, small enough for a CPU. It learns the bytes of a module of Python's own
library, so nothing is downloaded. One seed and one learning rate make a picture, not a comparison: those are in the
records.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from proxprop.integrations.huggingface import ProxPropCallback
from proxprop.lab.figures.style import LOOKS, SETTINGS

plt.rcParams.update(SETTINGS)
logging.set_verbosity_error()

# %%
# The data: windows of 64 bytes. The Trainer shifts the labels itself.

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 512 * 64]))


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Each window is input and label."""

    def __len__(self) -> int:
        return len(TEXT) // 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = TEXT[64 * index : 64 * index + 64]
        return {"input_ids": window, "labels": window}


# %%
# The training: accumulation over two micro-batches, clipping to a norm of 1 as is the Trainer's default, AdamW. The
# last lines are the same with and without the callback.


def losses(callbacks: list[TrainerCallback]) -> list[float]:
    """The training loss of every second step."""
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(
        GPT2Config.from_dict({"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, **shape})
    )
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, learning_rate=3e-3,
            per_device_train_batch_size=8, gradient_accumulation_steps=2, logging_steps=2,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Windows(), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)  # the picture shows the losses
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain, proximal = losses([]), losses([ProxPropCallback()])

# %%
# Both learn. What came out:

assert plain[-1] < 0.8 * plain[0]
assert proximal[-1] < 0.8 * proximal[0]

steps = range(2, 2 * len(plain) + 1, 2)
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(steps, plain, label="AdamW", **LOOKS["backprop"])
axes.plot(steps, proximal, label="AdamW with ProxPropCallback", **LOOKS["running:10"])
axes.set(
    xlabel="step", ylabel="training loss (nats a byte)", title="A small GPT-2 under the Trainer"
)
axes.legend()
plt.show()
