"""A model with quantisation-aware modules, and why they stay explicit."""

import torch
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import default_qat_qconfig

QAT = "its weight is rounded in forward, so that the output is not linear in it"


def quantisation_aware() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 1),
        qat.Conv1d(3, 3, 1, qconfig=default_qat_qconfig),
        nn.Flatten(),
        qat.Linear(12, 4, qconfig=default_qat_qconfig),
        nn.Linear(4, 2),
    )
